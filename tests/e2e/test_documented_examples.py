"""The examples in docs/api.md and README.md do what they say, as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from server import PATIENCE_S, RunningServer

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:8000"


@dataclass(frozen=True)
class Example:
    """A fenced block: where it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str


def examples(page: str) -> list[Example]:
    """The blocks of a page in languages that can be run here."""
    text = (ROOT / page).read_text()
    return [
        Example(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCE.finditer(text)
        if found[1] in ("sh", "python")
    ]


API = examples("docs/api.md")
# What else README has are commands that make a server.
README = [example for example in examples("README.md") if example.text.startswith("curl ")]


def run(example: Example, server: RunningServer, folder: Path) -> str:
    """What it prints on a server of the tests.

    Raises:
        AssertionError: it failed.
    """
    text = example.text.replace(ADDRESS, server.url.removeprefix("http://"))
    assert text != example.text, "it does not name the server"
    # So that curl fails where the server refuses.
    (folder / ".curlrc").write_text("fail\nsilent\nshow-error\n")
    if example.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", text]
    else:
        command = [sys.executable, "-W", "error", "-c", text]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment["CURL_HOME"] = str(folder)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{example.page}:{example.line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("example", API + README, ids=lambda one: f"{one.page}:{one.line}-{one.language}")
def test_it_works(example: Example, tiny_server: RunningServer, tmp_path: Path) -> None:
    if example.language == "sh" and shutil.which("curl") is None:
        pytest.skip("curl is not here")
    printed = run(example, tiny_server, tmp_path)
    # A model of random weights may well end its answer before it has begun; JSON is always printed.
    assert printed.strip() or example.language == "python"
    # An error in the middle of a stream or of a connection comes with status 200.
    assert '"error":{' not in printed.replace(" ", "")
    assert "'type': 'error'" not in printed


def test_there_is_something_to_run() -> None:
    assert {example.language for example in API} == {"sh", "python"}
    assert len(API) >= 12
    assert README


@pytest.mark.parametrize(
    ("language", "text"),
    [("sh", f"curl http://{ADDRESS}/v1/nothing\n"), ("python", f"raise SystemExit('http://{ADDRESS}')\n")],
)
def test_an_example_that_fails_is_noticed(
    language: str, text: str, tiny_server: RunningServer, tmp_path: Path
) -> None:
    if language == "sh" and shutil.which("curl") is None:
        pytest.skip("curl is not here")
    with pytest.raises(AssertionError, match="page:1"):
        run(Example("page", 1, language, text), tiny_server, tmp_path)
