"""A model that is there when somebody writes into the named pipe FIFO."""

import os
from pathlib import Path

from child import MODEL, begin, say

_, ready = begin()
ready.progress("fetching fake", 0.25)
say(f"model pid {os.getpid()}")
Path(os.environ["FIFO"]).read_text()
ready.ready(MODEL)
