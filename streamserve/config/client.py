"""What clients of a server take from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

API_KEY_VARIABLE = "OPENAI_API_KEY"


def client_api_key(environ: Mapping[str, str] | None = None) -> str | None:
    """The key to send to a server, where OpenAI's own clients look for it; None if there is none."""
    return (os.environ if environ is None else environ).get(API_KEY_VARIABLE) or None
