"""Bytes that are no text, streams that are closed or full, numbers that are none: one line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminal.scripted_server import ScriptedServer, chat_answer, text_answer

from streamserve.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "streamserve"]


def run(*argv: str | bytes, stdin: bytes = b"", shell: str = "") -> subprocess.CompletedProcess[bytes]:
    """Runs the command as its users do; `shell` is what a shell does to its streams."""
    command: list[str | bytes] = [*COMMAND, *argv]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(command, input=stdin, capture_output=True, cwd=ROOT, timeout=60, check=False)


def one_line(done: subprocess.CompletedProcess[bytes], code: int) -> str:
    error = done.stderr.decode()
    assert done.returncode == code, error
    assert error.startswith("streamserve: error: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("command", [["complete", "x"], ["chat"]])
@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", "nan"), ("--temperature", "1e999"), ("--top-p", "-inf")]
)
def test_a_number_that_is_none_is_refused_before_the_server_is_asked(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], command: list[str], option: str, value: str
) -> None:
    assert main([*command, "--url", server.url, f"{option}={value}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"streamserve: error: {option}: {float(value)} is not a number to send.\n"
    assert server.requests == []


def test_bytes_that_are_no_text_on_the_command_line(server: ScriptedServer) -> None:
    server.answers = [text_answer("c"), chat_answer("d")]
    done = run("complete", b"a\xffb", "--url", server.url, "--model", b"m\xfe")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"c\n", b"")
    done = run("chat", "--url", server.url, "--system", b"\xf0\x9f", stdin=b"hi\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"d\n", b"")
    (_, completion), (_, chat) = server.requests
    assert (completion["prompt"], completion["model"]) == ("a\ufffdb", "m\ufffd")
    assert chat["messages"][0]["content"] == "\ufffd\ufffd"


def test_bytes_that_are_no_text_on_stdin(server: ScriptedServer) -> None:
    server.answers = [text_answer("c")]
    done = run("complete", "-", "--url", server.url, stdin=b"a\xff\xc3\xa9\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"c\n", b"")
    assert server.requests[0][1]["prompt"] == "a\ufffdé\n"


def test_a_turn_that_is_no_text_does_not_end_the_conversation(server: ScriptedServer) -> None:
    server.answers = [chat_answer("one"), chat_answer("two"), chat_answer("three")]
    done = run("chat", "--url", server.url, stdin=b"first\n\xff\xfe\nthird\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\ntwo\nthree\n", b"")
    said = [message["content"] for message in server.requests[-1][1]["messages"]]
    assert said == ["first", "one", "\ufffd\ufffd", "two", "third"]


def test_half_a_surrogate_pair_in_an_answer_can_be_sent_back(server: ScriptedServer) -> None:
    server.answers = [chat_answer("\ud83d"), chat_answer("two")]
    done = run("chat", "--url", server.url, stdin=b"first\nsecond\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"?\ntwo\n", b"")
    assert server.requests[-1][1]["messages"][1]["content"] == "\ufffd"


@pytest.mark.parametrize(
    "url", [b"http://127.0.0.1:1/\xff", b"http://\xff", "http://" + "a" * 300, "http://xn--/"]
)
def test_an_address_that_cannot_be_encoded(url: str | bytes) -> None:
    one_line(run("complete", "x", "--url", url), 1)


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_full_disk_is_one_line(server: ScriptedServer, command: str) -> None:
    server.answers = [text_answer("so", " much") if command == "complete" else chat_answer("so", " much")]
    argv = ["complete", "x"] if command == "complete" else ["chat"]
    done = run(*argv, "--url", server.url, stdin=b"one\ntwo\n", shell="> /dev/full")
    assert "cannot write the answer: No space left on device" in one_line(done, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("argv", "shell", "words"),
    [
        (["chat"], "<&-", "stdin is closed"),
        (["complete", "-"], "<&-", "stdin is closed"),
        (["chat"], ">&-", "stdout is closed"),
        (["complete", "x"], ">&-", "stdout is closed"),
    ],
)
def test_a_closed_stream_is_one_line(server: ScriptedServer, argv: list[str], shell: str, words: str) -> None:
    assert words in one_line(run(*argv, "--url", server.url, shell=shell), 2)
    assert server.requests == []


@pytest.mark.parametrize("argv", [["chat"], ["complete", "-"]])
def test_a_stdin_that_cannot_be_read_is_one_line(
    server: ScriptedServer, argv: list[str], tmp_path: Path
) -> None:
    done = run(*argv, "--url", server.url, shell=f"0> {tmp_path / 'file'}")
    assert "cannot read stdin: " in one_line(done, 1)


def test_a_prompt_as_an_argument_needs_no_stdin(server: ScriptedServer) -> None:
    server.answers = [text_answer("c")]
    done = run("complete", "x", "--url", server.url, shell="<&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"c\n", b"")


@pytest.mark.parametrize(
    "variables", [{"SSL_CERT_FILE": "/nowhere/certificates.pem"}, {"HTTPS_PROXY": "gopher://x"}]
)
def test_an_environment_that_allows_no_connection_is_one_line(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    one_line(run("complete", "x", "--url", "https://198.51.100.1"), 1)
