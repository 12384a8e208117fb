"""Where streamed text is shown."""

from __future__ import annotations

import io
from typing import TextIO

# A model may write anything; on a terminal, control characters would move the cursor or do worse.
_HARMLESS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_HARMLESS |= {127: "\u2421"} | dict.fromkeys(range(128, 160), "\ufffd")


class Screen:
    """Writes text at once and knows whether its last line is open. Pipes get the text unchanged."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._line_is_open = False
        # A terminal that cannot show a character shows another one; it does not end the answer.
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        """Shows `text` now."""
        # Before the text: a Ctrl-C may come right after it was shown.
        self._line_is_open = not text.endswith("\n")
        self._out.write(text.translate(_HARMLESS) if self._is_terminal else text)
        self._out.flush()

    def end_line(self) -> None:
        """Ends the line if it is open."""
        if self._line_is_open:
            self.write("\n")
