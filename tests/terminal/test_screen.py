from __future__ import annotations

import io

from streamserve.terminal.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_the_text_unchanged() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.write("a\x1b[2J")
    screen.write("\r\n")
    screen.end_line()
    assert out.getvalue() == "a\x1b[2J\r\n"


def test_a_terminal_gets_no_control_characters() -> None:
    out = Terminal()
    Screen(out).write("a\tb\nc\x1b]52;c;aGk=\x07\x9b2J\x7f é")
    assert out.getvalue() == "a\tb\nc␛]52;c;aGk=␇\ufffd2J␡ é"


def test_an_open_line_is_ended_once() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.end_line()
    screen.write("a")
    screen.end_line()
    screen.end_line()
    assert out.getvalue() == "a\n"


def test_a_terminal_that_cannot_show_a_character_shows_another() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Screen(out).write("é")
    assert raw.getvalue() == b"?"
