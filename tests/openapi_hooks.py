"""What `schemathesis` is told besides the document itself (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def before_call(_context: Any, case: Any, _arguments: dict[str, Any]) -> None:
    """A request whose time in the queue is over at once is answered 503, and should be."""
    if isinstance(case.body, dict):
        case.body.pop("max_queue_time", None)
