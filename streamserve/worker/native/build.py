"""Compiles the native kernels and keeps what was compiled. Torch-free.

What comes out depends on the sources, the flags and the version of torch, and its name tells all of them, so
a folder can be shared by several versions and processors. It ends with a checksum of itself: a linker that
maps half a file does not say so, it ends the process. What others could have put there is not used: it is
code that the server runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_MAIN = "operators.cpp"
_HEADER = Path("include/torch/csrc/stable/library.h")
# -O3: below it GCC leaves the small loops as they are, and what they hold does not stay in registers.
# -ffp-contract: a product and a sum are one instruction, in all that is compiled. The two others are of no
# meaning to results: nobody reads errno or the flags of exceptions.
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILERS = ("g++", "clang++", "c++")
# What each level of x86-64 adds, as /proc/cpuinfo calls it.
_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "movbe", "popcnt", "sse4_2", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LEVELS = (("x86-64-v4", _V4), ("x86-64-v3", _V3))
# A start has ten minutes by default, and the weights are still to be loaded.
_TIMEOUT = 180.0
_MOST_WORDS = 300
# What a build leaves that was killed. None takes so long.
_LEFTOVER = ".tmp"
_LEFTOVER_AGE_S = 3600.0


class BuildError(Exception):
    """The kernels cannot be had; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a build depends on.

    Attributes:
        torch_folder: of the package, with its headers and libraries.
        torch_version: of that.
        target: flags that name the processor.
        namespace: under which the operators are registered.
    """

    torch_folder: Path
    torch_version: str
    target: tuple[str, ...]
    namespace: str = "streamserve_cpu"

    def file_name(self) -> str:
        """The same for the same recipe and sources, and no other."""
        digest = hashlib.sha256()
        facts = (self.torch_version, platform.machine(), self.namespace, *self.target, *_FLAGS)
        for part in facts:
            digest.update(part.encode() + b"\0")
        for path in sorted(_SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"{self.namespace}-{digest.hexdigest()[:20]}.so"

    def command(self, compiler: Sequence[str], target: Path) -> list[str]:
        """What compiles it to `target`."""
        return [
            *(*compiler, *_FLAGS, *self.target, f"-DSTREAMSERVE_NAMESPACE={self.namespace}"),
            *("-isystem", str(self.torch_folder / "include"), str(_SOURCES / _MAIN), "-o", str(target)),
            *(f"-L{self.torch_folder / 'lib'}", "-ltorch_cpu"),
        ]


def target_flags(machine: str, cpuinfo: str) -> tuple[str, ...]:
    """Flags for the processor; none where the compiler's default is good.

    Args:
        machine: as `platform.machine` says.
        cpuinfo: text of /proc/cpuinfo; empty if there is none.
    """
    if machine not in ("x86_64", "AMD64"):
        return ()
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((frozenset(value.split()) for key, _, value in lines if key.strip() == "flags"), frozenset())
    return next(((f"-march={level}",) for level, needed in _LEVELS if needed <= flags), ())


def targets_of(machine: str) -> tuple[tuple[str, ...], ...]:
    """All that `target_flags` may say of such machines."""
    cpuinfos = ("", *("flags: " + " ".join(needed) for _, needed in _LEVELS))
    return tuple(sorted({target_flags(machine, cpuinfo) for cpuinfo in cpuinfos}))


def target_of_this_machine() -> tuple[str, ...]:
    """`target_flags` here."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return target_flags(platform.machine(), cpuinfo)


def find_build(recipe: Recipe, folder: Path) -> Path | None:
    """What was compiled earlier, is whole, and nobody else can have made; None where there is nothing."""
    path = folder / recipe.file_name()
    try:
        if not (_is_ours(folder) and _is_ours(path)):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    return path if hashlib.sha256(content[:-size]).digest() == content[-size:] else None


def build(recipe: Recipe, folder: Path) -> Path:
    """Compiles into `folder`, which is made, in the place of what may be there.

    Others may do the same at the same time: each writes a file of its own and gives it its name when it is
    whole.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder cannot be written to.
    """
    compiler = _find_compiler()
    if not (recipe.torch_folder / _HEADER).exists():
        raise BuildError(f"finds no headers of PyTorch, {_HEADER} is not in {recipe.torch_folder}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(folder)
    handle, name = tempfile.mkstemp(suffix=_LEFTOVER, dir=folder)
    os.close(handle)
    unfinished, path = Path(name), folder / recipe.file_name()
    try:
        began = time.monotonic()
        logger.info("compiling kernels for this processor, once")
        _run(recipe.command(compiler, unfinished))
        logger.info("compiled kernels in %.1f s", time.monotonic() - began)
        content = unfinished.read_bytes()
        unfinished.write_bytes(content + hashlib.sha256(content).digest())
        unfinished.chmod(0o755)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _is_ours(path: Path) -> bool:
    """Whether nobody but the superuser and this user can write there."""
    status = path.lstat()
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _sweep(folder: Path) -> None:
    """Removes what builds left that did not end."""
    for path in folder.glob(f"*{_LEFTOVER}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                path.unlink()


def _find_compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [[name] for name in _COMPILERS]:
        if (path := shutil.which(command[0])) is not None:
            return [path, *command[1:]]
    if named:
        raise BuildError(f"finds no compiler {named}, which the variable CXX names")
    raise BuildError("finds no C++ compiler, apt-get install g++ or set CXX")


def _run(command: list[str]) -> None:
    """Raises BuildError unless it ends well and in time."""
    try:
        # In a group of its own: a compiler has others do the work.
        compiler = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    with compiler:
        try:
            _, said = compiler.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} takes longer than {_TIMEOUT:.0f} s") from error
        finally:
            if compiler.returncode is None:
                os.killpg(compiler.pid, signal.SIGKILL)
    if compiler.returncode:
        words = " ".join(said.decode(errors="replace").split())
        raise BuildError(f"{command[0]} fails: {words[:_MOST_WORDS]}")
