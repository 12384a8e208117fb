"""What an option is, and how text becomes its value."""

from __future__ import annotations

import math
import re
from dataclasses import Field, field
from typing import Any

_BYTE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2}


def parse_bytes(text: str) -> int:
    """Bytes from `4G`, `512MiB` or a plain number (units are powers of 1024).

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 4G")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def parse_count(text: str) -> int:
    """A whole number, with `k` and `m` for thousands and millions.

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number such as 4096 or 8k")
    return int(float(match[1]) * _COUNT_UNITS[match[2]])


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not true or false")


def _parse_int(text: str) -> int:
    if re.fullmatch(r"[+-]?\d+", text.strip()) is None:
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part for item in text.split(",") if (part := item.strip()))


PARSERS: dict[str, Any] = {
    "str": str,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "bytes": parse_bytes,
    "count": parse_count,
    "list": _parse_list,
}


def option(
    default: Any,
    help: str,
    *,
    kind: str,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    positional: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a flag, a variable, a YAML key and a line of documentation.

    Args:
        default: the value when nobody sets it; None means "worked out at start-up".
        help: one sentence for `--help` and the documentation, with the unit.
        kind: how text becomes a value: str, int, float, bool, bytes, count or list (separated by commas; as
            a flag it can be repeated).
        choices: the only values allowed, if any.
        minimum: the least value allowed, if any.
        positional: a bare argument instead of a flag.
        secret: its value is shown nowhere.
    """
    metadata = {
        "help": help,
        "kind": kind,
        "choices": choices,
        "minimum": minimum,
        "positional": positional,
        "secret": secret,
    }
    return field(default=default, metadata=metadata, repr=not secret)


def flag(item: Field[Any]) -> str:
    """The command-line flag of an option."""
    return "--" + item.name.replace("_", "-")
