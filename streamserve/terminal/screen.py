"""Where streamed text is shown."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TextIO

from streamserve.errors import StreamserveError

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
        """Shows `text` now.

        Raises:
            BrokenPipeError: nobody reads it any more.
            StreamserveError: it cannot be written, to a full disk for example.
        """
        # Before the text: a Ctrl-C may come right after it was shown.
        self._line_is_open = not text.endswith("\n")
        try:
            self._out.write(text.translate(_HARMLESS) if self._is_terminal else text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._give_up()
            raise StreamserveError(f"cannot write the answer: {error.strerror or error}") from error

    def end_line(self) -> None:
        """Ends the line if it is open."""
        if self._line_is_open:
            self.write("\n")

    def _give_up(self) -> None:
        self._line_is_open = False
        # What is still in the buffer must not fail once more when the interpreter flushes it at exit.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._out.fileno())
