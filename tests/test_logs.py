from __future__ import annotations

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


def test_a_line_has_time_process_and_level_and_goes_to_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.endswith(" engine WARNING 50 % done")
    assert first[:2] == "20"
    assert second.endswith(" engine INFO seen")
