"""Freed memory that the C library keeps, and how it goes back to the system.

What a long prompt takes to be tokenised is freed at its end, in hundreds of thousands of small pieces. The
library gives memory back by itself only from the end of its heap, and there is always something that lives
on near the end; so a frontend would stay for good as large as its largest requests have made it.
"""

from __future__ import annotations

import ctypes

_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Info(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap:
    """The heap of this process. Where the C library is none of GNU's, there is nothing to be done."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._info = getattr(library, "mallinfo2", None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._info is not None:
            self._info.restype = _Info

    def free_bytes(self) -> int:
        """What was freed, whether or not it has gone back since. Takes a tenth of a millisecond."""
        return 0 if self._info is None else int(self._info().fordblks)

    def trim(self) -> None:
        """Gives back what lies in whole pages. Takes some 4 ms for 100 MB."""
        if self._trim is not None:
            self._trim(0)
