"""How much structure a JSON text has, looked at before it is parsed.

The parser keeps the interpreter lock to its end, and its time goes with the number of values rather than of
bytes: 28 MB are 40 ms as one text, and as empty lists half a second, and a fifth more to be freed. So what
is too rich is refused before. The look at it lets go of the lock again and again, so that in a thread it
holds up nobody, whatever the size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamserve.errors import InvalidRequest

# Shorter ones cannot be rich enough to matter, only too deep.
SMALL_BYTES = 64 * 1024

MAX_DEPTH = 100
# Strings (the names of members, too), lists and objects.
MAX_PARTS = 2**17
# Of any kind; where there are so many, most of them are numbers. In any case as many as a prompt has tokens.
MAX_VALUES = 2**20
SPARE_VALUES = 2**16

_PIECE_BYTES = 2**18
_QUOTE, _COMMA, _OPEN, _CLOSE = b'",{}'
_IS_MARK = np.zeros(256, dtype=np.bool_)
_IS_MARK[list(b'",[]{}')] = True
# Makes braces of brackets.
_BRACE = 0x20


def max_values(max_model_len: int) -> int:
    """Most values of a request to a model with that context."""
    return max(MAX_VALUES, max_model_len) + SPARE_VALUES


def check_structure(text: bytes, max_values: int, name: str = "The request body") -> None:
    """Refuses what would take long to parse, or is nested too deeply.

    Args:
        text: JSON, or something that is none.
        max_values: most values of any kind.
        name: what it is, for the message.

    Raises:
        InvalidRequest: says what there is too much of, and what to do instead.
    """
    if len(text) <= SMALL_BYTES and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    num_values = num_parts = depth = start = 0
    is_inside = False
    while start < len(text):
        piece, start = _piece(text, start)
        marks, num_quotes, is_inside = _marks(piece, is_inside)
        steps = (marks == _OPEN).view(np.int8) - (marks == _CLOSE).view(np.int8)
        opened = int(np.count_nonzero(steps > 0))
        # Each string has a second quotation mark, here or in the next piece.
        num_parts += 2 * opened + num_quotes
        num_values += opened + int(np.count_nonzero(marks == _COMMA))
        levels = depth + np.cumsum(steps, dtype=np.int32)
        if len(levels):
            depth = int(levels[-1])
            if levels.max() > MAX_DEPTH:
                raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep.")
        if num_parts > 2 * MAX_PARTS:
            raise InvalidRequest(
                f"{name} has more than {MAX_PARTS} strings, lists and objects; join texts, give "
                "token ids as one list, or send several requests."
            )
        if num_values > max_values:
            raise InvalidRequest(
                f"{name} has more than {max_values} values; give prompts as text, or send several requests."
            )


def _piece(text: bytes, start: int) -> tuple[bytes, int]:
    """What follows in `text`, without what is escaped by a backslash there; and where the next one starts."""
    end = min(start + _PIECE_BYTES, len(text))
    piece = text[start:end]
    if b"\\" not in piece:
        return piece, end
    # None starts with an escaped character, so in pairs from the left, the last backslash may be half of one.
    num_last = len(piece) - len(piece.rstrip(b"\\"))
    if num_last % 2 and end < len(text):
        piece, end = piece[:-1], end - 1
    return piece.replace(b"\\\\", b"").replace(b'\\"', b""), end


def _marks(piece: bytes, is_inside: bool) -> tuple[npt.NDArray[np.uint8], int, bool]:
    """The commas and brackets outside strings, all brackets as braces.

    Args:
        is_inside: whether the piece starts in a string.

    Returns:
        They, the number of quotation marks, and whether the next piece starts in a string.
    """
    codes = np.frombuffer(piece, dtype=np.uint8)
    marks = codes[_IS_MARK[codes]]
    quotes = marks == _QUOTE
    inside = np.logical_xor.accumulate(quotes) ^ is_inside
    outside = marks[~(inside | quotes)]
    outside[outside != _COMMA] |= _BRACE
    return outside, int(np.count_nonzero(quotes)), bool(inside[-1]) if len(inside) else is_inside
