"""`make loadtest`: locust against a server that runs, or against one of its own.

`python -m loadtest.load.serving HOST MODEL OPTION…`: with an empty HOST a server is started on MODEL (empty:
the default model) for the time of the test. The exit code is locust's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running_server(model: str) -> Iterator[str]:
    """A server on a free port of this machine; gives its address.

    Raises:
        RuntimeError: it ended before it was ready; it has said why.
    """
    command = [sys.executable, "-m", "streamserve", "serve", *([model] if model else []), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as server:
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
    """Runs the load test and returns its exit code."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(_ROOT / "loadtest" / "locustfile.py"),
        "--host",
        host,
    ]
    return subprocess.run([*command, *options], cwd=_ROOT, check=False).returncode


def main(host: str, model: str, *options: str) -> int:
    """What the module says."""
    if host:
        return locust(host, options)
    with running_server(model) as url:
        return locust(url, options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
