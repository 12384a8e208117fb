"""An engine that becomes ready and stops when asked to."""

from child import begin, exit_on_order, report_ready, sleep_for_ever

bootstrap, ready = begin()
exit_on_order("engine")
ready.progress("loading weights", 0.5)
report_ready(bootstrap, ready)
sleep_for_ever()
