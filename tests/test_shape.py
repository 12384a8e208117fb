"""Small parts: no long file, no long function. A limit that nothing checks does not hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("streamserve", "loadtest", "clients")
SUFFIXES = (".py", ".js", ".mjs", ".ts", ".html", ".css")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def sources(*suffixes: str) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and not {"node_modules", "vendor"} & set(path.parts):
                yield path


def long_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.name, length


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*SUFFIXES)}
    assert lengths
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MAX_FILE_LINES]
    assert not long, "\n".join(long)


def test_no_function_is_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {name} has {length} lines"
        for path in sources(".py")
        for name, length in long_functions(path.read_text(encoding="utf-8"))
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(("body_lines", "is_long"), [(59, False), (60, True)])
def test_signature_and_body_count(body_lines: int, is_long: bool) -> None:
    text = "class C:\n    async def f(self):\n" + "        x = 1\n" * body_lines
    assert [name for name, _ in long_functions(text)] == ["f"] * is_long
