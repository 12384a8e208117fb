"""A model that is found at once."""

from child import MODEL, begin

_, ready = begin()
ready.ready(MODEL)
