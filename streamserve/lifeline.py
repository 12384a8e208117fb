"""The child's side of the lifeline: no process outlives the supervisor that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def watch_lifeline(fd: int) -> None:
    """Ends this process at once when the supervisor is gone, whatever the main thread is doing.

    Args:
        fd: read end of a pipe whose only write end is the supervisor's; nothing is ever written to it.
    """
    threading.Thread(target=_exit_at_end_of_file, args=(fd,), name="lifeline", daemon=True).start()
    # The thread needs the GIL to act, and a native call may hold it for long. The kernel's signal needs
    # nothing, but it is lost when the supervisor died before this line. Together they leave no gap.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_at_end_of_file(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(1)
