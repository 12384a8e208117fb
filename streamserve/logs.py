"""How every process writes its log: one line an event, to stderr, with time and process name."""

from __future__ import annotations

import logging
import sys


def configure_logging(process: str, level: str) -> None:
    """Sets up logging for this process; called once, at its start.

    Args:
        process: name in every line, such as `engine`.
        level: least severe level that is written, in lower case.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(message)s",
        force=True,
    )
    # A line for each request that a model download makes is noise.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, logging.getLogger().level))
