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


def test_the_clients_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, streamserve.cli, streamserve.terminal\n"
        "print([name for name in ('torch', 'numpy', 'starlette') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
