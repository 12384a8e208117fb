"""An engine that never gets ready."""

from child import begin, sleep_for_ever

_, ready = begin()
ready.progress("loading weights", 0.25)
sleep_for_ever()
