"""The process that brings the model: `python -m streamserve.artifacts.process --bootstrap FD`.

Finding, downloading and converting can take long, and much memory. In a process of its own it can be watched
and stopped at any time. It ends when it has said what it found.
"""

from __future__ import annotations

import logging
import sys

from streamserve.artifacts.resolve import resolve_model
from streamserve.bootstrap import Bootstrap, ReadyPipe
from streamserve.errors import ConfigError
from streamserve.lifeline import watch_lifeline
from streamserve.logs import configure_logging

logger = logging.getLogger(__name__)


def main() -> int:
    """Entry point of the process; returns its exit code."""
    bootstrap = Bootstrap.from_argv()
    watch_lifeline(bootstrap.lifeline)
    config = bootstrap.settings()
    configure_logging("model", config.server.log_level, config.server.log_format)
    ready = ReadyPipe(bootstrap.ready)
    try:
        model = resolve_model(config.model, ready.progress)
    except ConfigError as error:
        ready.failed(str(error))
        return 2
    except Exception as error:
        logger.exception("the model process failed")
        ready.failed(f"the model process failed: {error!r}")
        return 1
    ready.ready(model.to_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
