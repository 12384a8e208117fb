"""Chat users for locust: `locust -f loadtest/ --host http://127.0.0.1:8000`; see docs/performance.md.

locust takes each file below a folder that it is given for a locustfile, and imports it. Here that would be
all benchmarks with what they need. So when it was given the folder, it is started anew with this file alone.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from locust import events

FILE = Path(__file__).resolve()
if str(FILE.parents[1]) not in sys.path:
    sys.path.append(str(FILE.parents[1]))

from loadtest.load.command import for_one_file  # noqa: E402

# Before the modules that take their time.
if (_command := for_one_file(sys.orig_argv, FILE)) != sys.orig_argv:
    os.execv(sys.executable, _command)

from loadtest.load.options import add_options  # noqa: E402
from loadtest.load.session import Session  # noqa: E402
from loadtest.load.users import SseUser, WebSocketUser  # noqa: E402

__all__ = ["SseUser", "WebSocketUser"]


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser, **_: Any) -> None:
    add_options(parser)


@events.init.add_listener
def _init(environment: Any, **_: Any) -> None:
    try:
        Session(environment).attach()
    except ValueError as error:
        sys.exit(f"locust: error: {error}")
