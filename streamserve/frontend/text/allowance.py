"""How much text a chat template may make: counted before each operation, for none can be cut short.

Whatever makes text, or a list, is estimated first, rather too high than too low. An operation may make a few
times as much as the conversation has, and all of them together a great many times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

# What a single operation may make in any case, in characters, and how many such operations there may be.
LEAST_ROOM = 1 << 22
NUM_ROOMS = 64
# What else may be a count or a number of decimals.
MAX_COUNT = 100_000
MAX_DECIMALS = 300

_NUMBER = re.compile(r"\d+")
# `{name.attribute}`, which may lead anywhere, and `{:{width}}`.
_FAR_FIELD = re.compile(r"\{[^{}:!]*\.|\{[^{}]*\{")
# More than str() makes of a number, or of an object that is no container.
_OTHER_CHARS = 100


class Allowance:
    """What one rendering may use up.

    Args:
        check: called at each turn of a loop and at each call; what it raises ends the rendering.
        num_given: characters of all that the template is given.
        num_static: characters of the template that are text.
    """

    def __init__(self, check: Callable[[], None], num_given: int, num_static: int) -> None:
        self._check = check
        self._num_static = num_static
        self._room = LEAST_ROOM + 4 * num_given
        self._left = NUM_ROOMS * self._room

    def step(self, num_chars: int | None = None) -> None:
        """One turn of a loop, or one call.

        Args:
            num_chars: of the template's own text that are in it; all, if that is not known.

        Raises:
            SecurityError: there were too many, all in all.
        """
        self._check()
        self.spend(self._num_static if num_chars is None else num_chars)

    def admit(self, values: Iterable[Any]) -> None:
        """Somebody is about to make text of `values`.

        Raises:
            SecurityError: one of them would be too much of it.
        """
        for value in values:
            self.spend(size_of(value, self._room))

    def spend(self, num_chars: int) -> None:
        """Something is about to make so many characters.

        Raises:
            SecurityError: those are too many.
        """
        self._left -= num_chars
        if num_chars > self._room or self._left < 0:
            raise SecurityError("the result would be too large")


def size_of(value: Any, limit: float = math.inf) -> int:
    """At least the length of str(value), or more than `limit`: a list may be in another many times over."""
    if isinstance(value, str):
        return len(value)
    total = 0
    left = [value]
    while left and total <= limit:
        one = left.pop()
        if isinstance(one, str | bytes):
            total += 6 * len(one)
        elif isinstance(one, list | tuple | set | frozenset):
            total += 4 * len(one) + 2
            left += one
        elif isinstance(one, Mapping):
            total += 4 * len(one) + 2
            left += one
            left += one.values()
        else:
            total += one.bit_length() if isinstance(one, int) else _OTHER_CHARS
    return total


def percent_size(pattern: str | bytes, values: Any) -> int:
    """At least the length of `pattern % values`.

    Raises:
        SecurityError: a width is among the values.
    """
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if "*" in text:
        raise SecurityError("a width must stand in the pattern")
    given = (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else [values]
    )
    return _pattern_size(text, text.count("%"), given)


def format_size(pattern: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """At least the length of `pattern.format(*args, **kwargs)`.

    Raises:
        SecurityError: a field needs more than the values themselves.
    """
    if _FAR_FIELD.search(pattern):
        raise SecurityError("a field must name a value, and have its width in the pattern")
    return _pattern_size(pattern, pattern.count("{"), [*args, *kwargs.values()])


def _pattern_size(pattern: str, num_fields: int, values: Any) -> int:
    widths = sum(int(digits) for digits in _NUMBER.findall(pattern))
    return len(pattern) + widths + num_fields * max((size_of(value) for value in values), default=0)


def replaced_size(text: Any, old: Any, new: Any) -> int:
    """At least the length of `text.replace(old, new)`."""
    num_found = text.count(old) if old else len(text) + 1
    return len(text) + num_found * len(new)


def method_size(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """At least the length of what a method of a text makes.

    Raises:
        SecurityError: that cannot be told.
    """
    if isinstance(owner, str) and name in ("format", "format_map"):
        return format_size(owner, args, kwargs)
    if name in ("center", "ljust", "rjust", "zfill"):
        return len(owner) + _count(args[0])
    if name == "expandtabs":
        width = _count([*args, *kwargs.values(), 8][0])
        return len(owner) + width * int(owner.count("\t" if isinstance(owner, str) else b"\t"))
    if name == "replace":
        return replaced_size(owner, args[0], args[1])
    if name == "join":
        return size_of(args[0]) + len(owner) * len(args[0])
    if name == "translate":
        raise SecurityError("translate is not available")
    # A list has its places, besides what is in them.
    return (8 if "split" in name else 1) * len(owner)


def check_count(number: Any) -> int:
    """Refuses what would be a huge number of items.

    Raises:
        SecurityError: it is.
    """
    if isinstance(number, int) and abs(number) > MAX_COUNT:
        raise SecurityError(f"a number above {MAX_COUNT} is too large here")
    return _count(number)


def _count(number: Any) -> int:
    return number if isinstance(number, int) else 0


# Of filters: at least the length of what they make of a value and further arguments.


def _kept(value: Any, *args: Any, **kwargs: Any) -> int:
    return size_of(value) + sum(map(size_of, (*args, *kwargs.values())))


def _rewritten(value: Any, *_args: Any, **_kwargs: Any) -> int:
    # A character of four bytes is twelve in a URL.
    return 12 * size_of(value)


def _center(value: Any, width: Any = 80) -> int:
    return size_of(value) + _count(width)


def _format(value: Any, *args: Any, **kwargs: Any) -> int:
    return percent_size(str(value), kwargs or args)


def _indent(value: Any, width: Any = 4, *_args: Any, **_kwargs: Any) -> int:
    text = str(value)
    return len(text) + (1 + text.count("\n")) * (len(width) if isinstance(width, str) else _count(width))


def _join(value: Any, d: Any = "", *_args: Any, **_kwargs: Any) -> int:
    return size_of(value) + len(value) * size_of(d)


def _replace(value: Any, old: Any, new: Any, *_args: Any, **_kwargs: Any) -> int:
    return replaced_size(str(value), str(old), str(new))


def _wordwrap(value: Any, width: int = 79, *args: Any, **kwargs: Any) -> int:
    text = str(value)
    num_lines = 1 + text.count("\n") + len(text) // max(1, width)
    return len(text) + num_lines * (1 + sum(map(size_of, (*args, *kwargs.values()))))


def _tojson(value: Any, *args: Any, **kwargs: Any) -> int:
    size = size_of(value)
    return 6 * size + size * sum(check_count(one) or len(one or ()) for one in (*args, *kwargs.values()))


def _portions(value: Any, number: Any, *_args: Any, **_kwargs: Any) -> int:
    return len(value) + check_count(number)


def _round(_value: Any, precision: Any = 0, *_args: Any, **_kwargs: Any) -> int:
    if not -MAX_DECIMALS <= precision <= MAX_DECIMALS:
        raise SecurityError(f"more than {MAX_DECIMALS} decimals are too many")
    return MAX_DECIMALS


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise SecurityError("only numbers can be added up")
    return len(value)


FILTER_SIZES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("string", "striptags", "trim", "truncate", "wordcount"), _kept),
    **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "pprint"), _rewritten),
    **dict.fromkeys(("title", "upper", "urlencode"), _rewritten),
    "batch": _portions,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _portions,
    "sum": _sum,
    "tojson": _tojson,
    "wordwrap": _wordwrap,
}
