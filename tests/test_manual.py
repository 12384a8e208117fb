"""docs/ speaks of what there is: options, exit codes, signals, error codes, messages, files.

Metrics are looked after by frontend/test_dashboard.py, examples by e2e/test_documented_examples.py.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from streamserve import cli, errors
from streamserve.config.options import flag
from streamserve.config.sections import options
from streamserve.frontend.api import problems, streams, websocket, websocket_responses
from streamserve.frontend.api.schema import responses
from streamserve.supervisor.supervisor import CONFIG_EXIT_CODE
from streamserve.supervisor.watch import STOP_SIGNALS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
# Of other commands that the pages tell of.
OTHER_FLAGS = {
    "--build", "--build-arg", "--detach", "--file", "--gpus", "--init", "--no-deps",
    "--no-install-recommends", "--read-only", "--rm", "--shm-size", "--stop-timeout", "--strict",
    "--target", "--tmpfs", "--yes",
}  # fmt: skip


def known_flags() -> set[str]:
    """Those of all commands of streamserve."""
    found = set(OTHER_FLAGS)
    parsers = [cli._parser()]
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


@pytest.mark.parametrize(
    "name", ["api", "architecture", "attention", "configuration", "graphs", "operations"]
)
def test_flags_are_options(name: str) -> None:
    """On the pages about the server; what measures and tests it has flags of its own."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b", page))
    assert named
    assert named <= known_flags()


def test_every_option_is_in_the_table_that_operations_point_to() -> None:
    assert "(configuration.md)" in OPERATIONS
    table = (ROOT / "docs" / "configuration.md").read_text()
    for _, item in options():
        assert item.metadata["positional"] or f"`{flag(item)}`" in table


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading that begins so, up to the next one of its level."""
    level = heading.split(maxsplit=1)[0]
    text = page.split(f"\n{heading}", 1)[1]
    text = re.split(rf"\n{level} ", text)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_every_exit_code_is_explained() -> None:
    cells = [row[0] for row in rows(OPERATIONS, "## Signals and exit codes")]
    explained = {int(code) for cell in cells for code in re.findall(r"\b\d+\b", cell)}
    assert {0, 1, CONFIG_EXIT_CODE, cli._INTERRUPTED} <= explained
    assert {128 + number for number in STOP_SIGNALS} <= explained


def test_every_signal_is_explained() -> None:
    cells = " ".join(row[0] for row in rows(OPERATIONS, "## Signals and exit codes"))
    for number in STOP_SIGNALS:
        assert number.name in cells


def error_codes() -> set[str]:
    """Of everything that a request is answered with."""
    modules = (errors, problems, responses, streams, websocket, websocket_responses)
    classes = [one for module in modules for _, one in inspect.getmembers(module, inspect.isclass)]
    own = {one.code for one in classes if issubclass(one, errors.RequestError)}
    return own | {code for _, _, _, code in problems._OURS}


@pytest.mark.parametrize("code", sorted(error_codes()))
def test_every_error_code_is_explained(code: str) -> None:
    assert f"`{code}`" in API


@cache
def messages() -> tuple[str, ...]:
    """The texts of the source, with … for what is put into them."""
    found = []
    for path in (ROOT / "streamserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
    return tuple(found)


def quoted_messages() -> Iterator[str]:
    """The messages in the first cells of the tables of failures."""
    for heading in ("### It does not start", "### It ends, or", "### Warnings and errors"):
        for row in rows(OPERATIONS, heading)[1:]:
            yield from re.findall(r"`([^`]* [^`]*)`", row[0])


@pytest.mark.parametrize("quoted", list(quoted_messages()))
def test_messages_are_those_of_the_source(quoted: str) -> None:
    # The part that says most; others may be put in from elsewhere.
    longest = max(re.split(r"…|'[^']*://[^']*'|engine (?=was|exited)", quoted), key=len).strip(" :;")
    longest = {"was killed by SIGKILL": "was killed by"}.get(longest, longest)
    assert len(longest) >= 8, quoted
    assert any(longest in message.replace("%s", "…").replace("%d", "…") for message in messages()), longest


def logged() -> Iterator[str]:
    """The text of each warning and error that is logged, with … for what is put into it."""
    for path in (ROOT / "streamserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name("logger"), attr="warning" | "error" | "exception"),
                    args=[ast.Constant(str(text)), *_],
                ) if text != "%s":
                    yield re.sub(r"%\w", "…", text)


@pytest.mark.parametrize("text", sorted(set(logged())))
def test_every_warning_and_error_in_the_log_is_explained(text: str) -> None:
    cells = " ".join(
        row[0] for row in rows(OPERATIONS, "## What goes wrong") + rows(OPERATIONS, "## Signals")
    )
    quoted = [one.split("…") for one in re.findall(r"`([^`]+)`", cells) if len(one) >= 10]
    assert any(all(part.strip() in text for part in parts) for parts in quoted)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, target


def test_targets_of_make_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`?make ([a-z][a-z0-9-]*)", "\n".join(code(page.read_text()))))
        assert named <= targets, page.name
    for target in re.findall(r"@echo 'make ([a-z0-9-]+)", makefile):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def code(text: str) -> list[str]:
    """What a page sets as code."""
    return re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
