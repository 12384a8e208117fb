"""Child processes: how one is started, heard, signalled and buried."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from streamserve.bootstrap import Bootstrap
from streamserve.supervisor.reports import Report, ReportDecoder

_READ_BYTES = 65536
# Libraries of the engine read these when they are loaded. The operator's own values win.
_CHILD_ENVIRONMENT = {
    # OpenMP's idle threads spin for the next parallel region, some 10 ms by default. On a machine whose cores
    # are wanted by anybody else (the frontend, say), that makes a step many times slower. Not to spin at all
    # makes a step of one request two times slower: between two products a thread has hardly gone to sleep
    # when it is woken. So they spin for less than half a millisecond (GNU's OpenMP; others do not read it).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    # oneDNN, and torch above it, keep what they made for each shape of a product: up to a megabyte for each
    # matrix and number of rows. Both would keep 1,024 of them.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}


class ChildFailed(Exception):
    """A child could not start, or ended while it was needed.

    Args:
        message: what happened, as the operator is told.
        reported_by: the child that said so itself.
    """

    def __init__(self, message: str, reported_by: Child | None = None) -> None:
        super().__init__(message)
        self.reported_by = reported_by


class Lifeline:
    """A pipe that reads end-of-file in every child once this process is gone, however it went.

    The write end is never written to and closes on exec, so that no child holds it open for another.
    """

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Cuts it: children that are still there exit at once."""
        os.close(self._write_end)
        os.close(self.read_end)


class Child:
    """A running child process and the supervisor's end of its ready pipe.

    Attributes:
        name: what the operator calls it.
        pidfd: readable once the process has ended.
        reports_fd: readable when the child has reported something, or has closed its end.
        is_ready: whether it serves; set by the supervisor.
        returncode: exit code, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], reports_fd: int) -> None:
        self.name = name
        self.is_ready = False
        self.returncode: int | None = None
        self.reports_fd = reports_fd
        self.pidfd = os.pidfd_open(process.pid)
        self._process = process
        self._decoder = ReportDecoder()
        os.set_blocking(reports_fd, False)

    def read_reports(self) -> list[Report] | None:
        """What the child has reported since the last call; None when it never will again.

        Raises:
            ValueError: it wrote something else.
        """
        try:
            data = os.read(self.reports_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        return self._decoder.decode(data) if data else None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; by pidfd, so that it can never hit a stranger with a reused pid."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> None:
        """Takes note of the end of a process that has ended, or is about to."""
        self.returncode = self._process.wait()

    def close(self) -> None:
        """Closes the descriptors of a child that was reaped."""
        os.close(self.pidfd)
        os.close(self.reports_fd)

    def epitaph(self) -> str:
        """How the process ended, as the end of a sentence that begins with its name."""
        assert self.returncode is not None, self.name
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        return f"was killed by {_signal_name(-self.returncode)}"


def spawn(name: str, module: str, bootstrap: Bootstrap, reports_fd: int) -> Child:
    """Starts `python -m module` with exactly the descriptors in `bootstrap`.

    A fresh interpreter, never a fork: threads and locks of this process do not come along, and the process
    list shows what each child is.

    Args:
        name: what the operator calls the child.
        module: the module to run.
        bootstrap: what the child is told.
        reports_fd: read end of the pipe whose write end is `bootstrap.ready`; the `Child` closes it.

    Raises:
        OSError: no process could be started.
    """
    document = bootstrap.write()
    try:
        with _inherit_blocked({signal.SIGINT, signal.SIGTERM}):
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--bootstrap", str(document)],
                stdin=subprocess.DEVNULL,
                env={**_CHILD_ENVIRONMENT, **os.environ},
                pass_fds=(document, *bootstrap.descriptors()),
            )
    finally:
        os.close(document)
    return Child(name, process, reports_fd)


@contextlib.contextmanager
def _inherit_blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    # A terminal's Ctrl-C goes to the whole process group, and so may a service manager's SIGTERM. Blocked in
    # the children, whatever handlers their libraries install, they reach the supervisor alone, which
    # stops them in order (STOP_ORDER). One that arrives in here is not lost: it comes after the block.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
