from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal.scripted_server import ScriptedServer, chat_answer, endless_answer, event, text_answer

from streamserve.cli import main

ROOT = Path(__file__).parents[2]
# Far longer than anything here takes, so that a slow machine fails no test.
PATIENCE_S = 30.0
NUM_PRESSES = 3

# Makes stdin the controlling terminal of a new session, so that Ctrl-C typed there becomes SIGINT.
AT_TERMINAL = (
    "-c",
    "import fcntl, sys, termios\n"
    "from streamserve.cli import main\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "sys.exit(main())",
)

Start = Callable[..., subprocess.Popen[bytes]]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_complete_streams_the_continuation(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [text_answer(" upon", " a", " time")]
    code, out, err = run(
        capsys, "complete", "Once", "--url", server.url + "/v1/", "--temperature", "0", "--seed", "7"
    )
    assert (code, out, err) == (0, " upon a time\n", "")
    expected = {
        "model": "tiny",
        "prompt": "Once",
        "temperature": 0.0,
        "seed": 7,
        "max_tokens": 256,
        "stream": True,
    }
    assert server.requests == [("/v1/completions", expected)]


def test_complete_reads_stdin(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [text_answer("c")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert run(capsys, "complete", "-", "--url", server.url, "--model", "m")[:2] == (0, "c\n")
    assert server.requests[0][1]["prompt"] == "a\nb\n"
    assert server.requests[0][1]["model"] == "m"


def test_a_piped_chat_is_one_turn_a_line_with_all_that_was_said_before(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [chat_answer("Hel", "lo."), chat_answer("Bye.\n")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\n  \nGo away"))
    assert run(capsys, "chat", "--url", server.url, "--system", "Be brief.") == (0, "Hello.\nBye.\n", "")
    assert server.requests[1][1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go away"},
    ]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (
            event({"error": {"message": "the engine is gone", "code": "engine_dead"}}) + "data: [DONE]\n\n",
            "the engine is gone",
        ),
        ("event: error\n" + event({"message": "broken"}), "broken"),
        (event({"error": "just text"}), "just text"),
        (event({"choices": [{"text": "cut"}]}), "broke off"),
        ("data: <html>\n\n", "no JSON"),
        ("data: []\n\n", "reports"),
    ],
)
def test_an_error_in_the_stream_is_one_line_and_exit_code_1(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], stream: str, words: str
) -> None:
    def answer(handler: Any) -> None:
        handler.begin_stream()
        handler.send(event({"choices": [{"index": 0, "text": "so far"}]}) + stream)

    server.answers = [answer]
    code, out, err = run(capsys, "complete", "x", "--url", server.url)
    assert code == 1
    assert out.startswith("so far")
    assert out.endswith("\n")
    assert err.startswith("streamserve: error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [({"error": {"message": "queue full"}}, "queue full"), (["?"], '["?"]'), (None, "null")],
)
def test_a_refusal_is_one_line(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], body: Any, words: str
) -> None:
    server.answers = [lambda handler: handler.send_json(503, body)]
    code, out, err = run(capsys, "complete", "x", "--url", server.url)
    assert (code, out) == (1, "")
    assert err == f"streamserve: error: the server answered 503: {words}\n"


@pytest.mark.parametrize("command", [["chat"], ["complete", "x"]])
def test_nobody_there(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, _, err = run(capsys, *command, "--url", url)
    assert code == 1
    assert err == f"streamserve: error: cannot connect to {url}: is a server running there?\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[", "http://a b"])
def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, _, err = run(capsys, "complete", "x", "--url", url)
    assert code == 1
    assert err.startswith("streamserve: error: ")
    assert err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback(server: ScriptedServer, start: Start) -> None:
    server.answers = [text_answer("word\n" * 50_000, "more")]
    process = start(["complete", "x", "--url", server.url], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word\n"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start_one(
            argv: list[str], run: tuple[str, str] = ("-m", "streamserve"), **options: Any
        ) -> subprocess.Popen[bytes]:
            command = [sys.executable, *run, *argv]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start_one


@pytest.fixture
def keyboard() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_conversation(
    server: ScriptedServer, start: Start, keyboard: tuple[int, int]
) -> None:
    ours, theirs = keyboard
    server.answers = [
        endless_answer("Once upon"),
        lambda handler: handler.send_json(400, {"error": {"message": "too long"}}),
        chat_answer("Bye"),
    ]
    process = start(
        ["chat", "--url", server.url], run=AT_TERMINAL, stdin=theirs, stdout=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = Transcript(ours)
    shown.until("> ")
    shown.press_ctrl_c_until("> ")
    os.write(ours, b"Tell me a story\n")
    shown.until("Once upon")
    shown.press_ctrl_c_until("> ")
    assert server.client_left.wait(30)
    os.write(ours, b"Too long\n")
    shown.until("> ")
    os.write(ours, b"Thanks\n")
    shown.until("Bye")
    shown.until("> ")
    os.write(ours, b"\x04")
    assert process.wait() == 0
    assert process.stderr is not None
    with process.stderr:
        errors = process.stderr.read().decode()
    assert "Talking to tiny." in errors
    assert "too long" in errors
    assert "Traceback" not in errors
    assert server.requests[-1][1]["messages"] == [
        {"role": "user", "content": "Tell me a story"},
        {"role": "assistant", "content": "Once upon"},
        {"role": "user", "content": "Thanks"},
    ]


def test_ctrl_c_ends_a_completion(server: ScriptedServer, start: Start) -> None:
    def answer(handler: Any) -> None:
        handler.begin_stream()
        handler.send(event({"choices": [{"index": 0, "text": "so far"}]}))
        handler.rfile.read(1)

    server.answers = [answer]
    process = start(["complete", "x", "--url", server.url], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read(6) == b"so far"
        for _ in range(NUM_PRESSES):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S / NUM_PRESSES)
                break
        assert process.wait(PATIENCE_S) == 130
        assert process.stdout.read() == b"\n"
        assert process.stderr.read() == b""


class Transcript:
    """What a program has shown on a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._text = ""

    def until(self, words: str) -> None:
        """Reads on until `words` were shown."""
        assert self._read_until(words, PATIENCE_S), f"{words!r} after {self._text!r}"

    def press_ctrl_c_until(self, words: str) -> None:
        """Presses Ctrl-C until `words` are shown, as people do.

        A signal that lands just before a system call begins to wait is noticed after it: no program written
        in Python, nor GNU readline, closes that gap of a microsecond.
        """
        for _ in range(int(PATIENCE_S)):
            os.write(self._terminal, b"\x03")
            if self._read_until(words, 1.0):
                return
        self.until(words)

    def _read_until(self, words: str, patience_s: float) -> bool:
        while words not in self._text:
            if not select.select([self._terminal], [], [], patience_s)[0]:
                return False
            self._text += os.read(self._terminal, 4096).decode()
        self._text = self._text.partition(words)[2]
        return True
