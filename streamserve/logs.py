"""How every process writes its log: one line an event, to stderr, with time and process name."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """A line is one JSON object. What a record carries as `fields` becomes members of it.

    Args:
        process: name in every line, such as `engine`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line for `record`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(process: str, level: str, form: str = "text") -> None:
    """Sets up logging for this process; called once, at its start.

    Args:
        process: name in every line, such as `engine`.
        level: least severe level that is written, in lower case.
        form: `text`, or `json` for machines.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # A line for each request that a model download makes is noise.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, logging.getLogger().level))
