"""`make loadtest`: locust against a server that runs, or against one of its own.

`python -m loadtest.load.serving HOST MODEL OPTION…`: with an empty HOST a server is started on MODEL (empty:
the default model) for the time of the test. The exit code is locust's.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# A line for each request would hide what the load test says.
_SERVER_OPTIONS = ("--port", "0", "--no-access-log")
_INTERRUPTED = 130
_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running_server(model: str) -> Iterator[str]:
    """A server on a free port of this machine; gives its address.

    Raises:
        RuntimeError: it ended before it was ready; it has said why.
    """
    command = [sys.executable, "-m", "streamserve", "serve", *([model] if model else []), *_SERVER_OPTIONS]
    # In a group of its own Ctrl-C does not reach it: it is to serve until the load test has ended.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, process_group=0) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                print(line, end="", file=sys.stderr, flush=True)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield found[0]
                    return
            raise RuntimeError("the server did not start")
        finally:
            server.terminate()
            server.communicate()


def locust(host: str, options: Sequence[str]) -> int:
    """Runs the load test and returns its exit code. Ctrl-C is for the load test, which ends and reports."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(_ROOT / "loadtest" / "locustfile.py"),
        "--host",
        host,
    ]
    with subprocess.Popen([*command, *options], cwd=_ROOT) as process:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()


def main(host: str, model: str, *options: str) -> int:
    """What the module says."""
    try:
        if host:
            return locust(host, options)
        with running_server(model) as url:
            return locust(url, options)
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
