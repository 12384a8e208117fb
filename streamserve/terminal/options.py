"""What the command line says about a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from streamserve.errors import ConfigError


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses what JSON cannot say; all else is for the server to judge.

    Raises:
        ConfigError: a number is infinite or none at all; names the option.
    """
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not a number to send.")
