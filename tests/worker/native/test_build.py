"""Compiling the kernels: what can go wrong, and what must not. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.worker.native import build as build_module
from streamserve.worker.native.build import BuildError, Recipe, build, find_build, target_flags, targets_of

SPEC = importlib.util.find_spec("torch")
assert SPEC is not None
assert SPEC.origin is not None
TORCH = Path(SPEC.origin).parent
RECIPE = Recipe(TORCH, "2.13.0", ("-march=x86-64-v3",))
V3 = "fpu sse4_2 popcnt cx16 xsave avx2 bmi1 bmi2 abm f16c fma movbe"


@pytest.mark.parametrize(
    ("machine", "flags", "target"),
    [
        ("x86_64", f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl", ("-march=x86-64-v4",)),
        ("x86_64", f"{V3} avx512f avx512cd", ("-march=x86-64-v3",)),
        ("x86_64", "fpu sse2 avx", ()),
        ("x86_64", V3.replace("abm ", ""), ()),
        ("x86_64", "avx512f avx512bw avx512cd avx512dq avx512vl", ()),
        ("aarch64", "fp asimd", ()),
    ],
)
def test_a_target_that_the_processor_has(machine: str, flags: str, target: tuple[str, ...]) -> None:
    assert target_flags(machine, f"model name\t: x\nflags\t\t: {flags}\n\nflags : fpu\n") == target
    assert target_flags(machine, "") == ()


def test_an_image_gets_every_target() -> None:
    assert targets_of("x86_64") == ((), ("-march=x86-64-v3",), ("-march=x86-64-v4",))
    assert targets_of("aarch64") == ((),)


def test_a_name_tells_all_that_a_build_depends_on() -> None:
    others = [
        replace(RECIPE, torch_version="2.14.0"),
        replace(RECIPE, target=()),
        replace(RECIPE, namespace="x"),
    ]
    assert len({recipe.file_name() for recipe in (RECIPE, *others)}) == 4
    assert replace(RECIPE, torch_folder=Path("/elsewhere")).file_name() == RECIPE.file_name()


def a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The compiler is a shell script, in which $out is what it is to make."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_without_a_compiler_the_message_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
        build(RECIPE, tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler, which the variable CXX names"):
        build(RECIPE, tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo half > $out; echo no such  header >&2; exit 1")
    folder = tmp_path / "kernels"
    with pytest.raises(BuildError, match="compiler fails: no such header"):
        build(RECIPE, folder)
    assert list(folder.iterdir()) == []


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has started, which keeps its output open."""
    a_compiler(tmp_path, monkeypatch, "sleep 600 & wait")
    monkeypatch.setattr(build_module, "_TIMEOUT", 0.2)
    with pytest.raises(BuildError, match="takes longer than"):
        build(RECIPE, tmp_path / "kernels")


def test_what_is_kept_is_whole_or_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    assert find_build(RECIPE, tmp_path) is None
    path = build(RECIPE, tmp_path)
    content = path.read_bytes()
    assert content == b"code\n" + hashlib.sha256(b"code\n").digest()
    assert find_build(RECIPE, tmp_path) == path
    for broken in (b"", b"junk", content[:-1], b"x" + content[1:]):
        path.write_bytes(broken)
        assert find_build(RECIPE, tmp_path) is None
    assert build(RECIPE, tmp_path).read_bytes() == content


def test_what_others_may_have_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    folder = tmp_path / "kernels"
    path = build(RECIPE, folder)
    assert find_build(RECIPE, folder) == path
    for each in (path, folder):
        mode = each.stat().st_mode
        each.chmod(0o777)
        assert find_build(RECIPE, folder) is None
        each.chmod(mode)
    other = path.rename(tmp_path / "other.so")
    path.symlink_to(other)
    assert find_build(RECIPE, folder) is None


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    monkeypatch.setenv("CXX", f"env LANG=C {tmp_path / 'compiler'}")
    assert build(RECIPE, tmp_path).read_bytes().startswith(b"code")


def test_what_a_killed_build_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    build(RECIPE, tmp_path)
    assert not old.exists()
    assert new.exists()


def test_without_headers_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    with pytest.raises(BuildError, match="no headers of PyTorch"):
        build(replace(RECIPE, torch_folder=tmp_path), tmp_path)


def test_many_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees nothing or something whole, and nothing is left behind."""
    a_compiler(tmp_path, monkeypatch, "echo co > $out; sleep 0.05; echo de >> $out")
    folder = tmp_path / "kernels"

    def compile_and_look(_: int) -> bool:
        path = build(RECIPE, folder)
        return find_build(RECIPE, folder) == path

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compile_and_look, range(16)))
    assert [path.name for path in folder.iterdir()] == [RECIPE.file_name()]


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_compiler(tmp_path, monkeypatch, "echo code > $out")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        build(RECIPE, tmp_path / "file" / "kernels")


@pytest.mark.parametrize("target", targets_of("x86_64"), ids=str)
def test_the_sources_compile_without_a_warning(target: tuple[str, ...], tmp_path: Path) -> None:
    """For processors that need not be this one."""
    if os.uname().machine != "x86_64" or not any(
        (Path(folder) / "g++").exists() for folder in os.environ["PATH"].split(":")
    ):
        pytest.skip("needs g++ on x86-64")
    command = Recipe(TORCH, "any", target).command(["g++"], tmp_path / "kernels.so")
    # GCC 12 has complaints about its own header.
    extra = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized"]
    build_module._run([*command, *extra])
