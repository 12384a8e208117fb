from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import streamserve
from streamserve.cli import main
from streamserve.supervisor.listener import bind

ROOT = Path(__file__).parents[1]


def exit_code_of(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    return caught.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out == f"streamserve {streamserve.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert streamserve.__version__ == project["version"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["serve", "chat", "complete"]),
        (["serve"], ["MODEL", "--max-num-seqs", "paged KV cache", "(default: 8000)", "--config FILE"]),
        (["chat"], ["--system", "Ctrl-D", "http://127.0.0.1:8000"]),
        (["complete"], ["PROMPT", "(default: 256)"]),
    ],
)
def test_help(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(*command, "--help") == 0
    text = capsys.readouterr().out
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "argv", [[], ["sing"], ["serve", "--prot", "1"], ["serve", "--max-num", "1"], ["complete"]]
)
def test_a_wrong_command_line_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(*argv) == 2
    assert "usage: streamserve" in capsys.readouterr().err


def test_a_wrong_value_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "many"]) == 2
    assert capsys.readouterr().err == "streamserve: error: --port: 'many' is not a whole number.\n"


def test_a_port_in_use_is_one_line_and_exit_code_2_before_the_model_is_looked_at() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "streamserve", "serve", "no/such/model", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    reason = f"cannot listen on 127.0.0.1 port {port}: address already in use."
    assert done.stderr == f"streamserve: error: --port: {reason}\n"


def test_a_model_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamserve", "serve", str(tmp_path / "none.gguf"), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("streamserve: error: MODEL ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(closed: str) -> None:
    """Their numbers must not go to a socket or a segment, which every child would then print into."""
    look = "for number in 0 1 2; do readlink /proc/self/fd/$number; done"
    code = (
        "import os, subprocess, sys\n"
        "from streamserve.cli import main\n"
        "assert main(['serve', '--port', 'many']) == 2\n"
        "first = os.open('/dev/zero', os.O_RDONLY)\n"
        "assert first > 2, first\n"
        f"seen = subprocess.run(['bash', '-c', '{look}'], stdout=subprocess.PIPE, text=True).stdout\n"
        "assert seen.splitlines()[2] == os.devnull, seen\n"
        "sys.exit(7)"
    )
    command = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize("command", ["complete x", "chat"])
def test_nobody_to_complain_to(command: str) -> None:
    program = f"{sys.executable} -m streamserve {command} --url http://127.0.0.1:1 </dev/null 2>&-"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_clients_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, streamserve.cli, streamserve.terminal\n"
        "print([name for name in ('torch', 'numpy', 'starlette') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


@pytest.mark.parametrize("limit", [6, 20, 60])
def test_too_few_descriptors_are_a_sentence(limit: int) -> None:
    command = f"ulimit -n {limit}; exec {sys.executable} -m streamserve serve nowhere --port=0"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"streamserve: error: a process may have {limit} files open here")
    assert "LimitNOFILE=" in line
