from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CODE = """
import logging
from streamserve.logs import configure_logging
configure_logging("engine", "warning")
logging.getLogger("streamserve.engine").info("unseen")
logging.getLogger("streamserve.engine").warning("50 % done")
configure_logging("engine", "info")
logging.getLogger("httpx").info("unseen")
logging.getLogger("x").info("seen")
"""


JSON_CODE = """
import logging
from streamserve.logs import configure_logging
configure_logging("frontend 1", "info", "json")
logging.getLogger("x").info("two\\nlines of %s", "ünïcode", extra={"fields": {"status": 200}})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("x").exception("failed")
"""


def test_a_line_can_be_json() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JSON_CODE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    first, second = map(json.loads, done.stderr.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "process": "frontend 1",
        "logger": "x",
        "message": "two\nlines of ünïcode",
        "status": 200,
    }
    assert "ZeroDivisionError" in second["exception"]


def test_a_line_has_time_process_and_level_and_goes_to_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.endswith(" engine WARNING 50 % done")
    assert first[:2] == "20"
    assert second.endswith(" engine INFO seen")
