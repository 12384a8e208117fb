"""Compiles the native kernels and keeps what was compiled. Torch-free.

What comes out depends on the sources, the flags and the version of torch, and its name tells all of them, so
a folder can be shared by several versions and processors. It ends with a checksum of itself: a linker that
maps half a file does not say so, it ends the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "source"
_MAIN = "operators.cpp"
# -O3: below it GCC leaves the small loops as they are, and what they hold does not stay in registers.
# -ffp-contract: a product and a sum are one instruction, in all that is compiled. The two others are of no
# meaning to results: nobody reads errno or the flags of exceptions.
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILERS = ("g++", "clang++", "c++")
# What each level of x86-64 adds, as /proc/cpuinfo calls it.
_LEVELS = (
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("x86-64-v3", frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
)
_TIMEOUT = 180.0
_MOST_WORDS = 300


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

    def command(self, compiler: str, target: Path) -> list[str]:
        """What compiles it to `target`."""
        return [
            *(compiler, *_FLAGS, *self.target, f"-DSTREAMSERVE_NAMESPACE={self.namespace}"),
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
    """What was compiled earlier and is whole; None where there is nothing."""
    path = folder / recipe.file_name()
    try:
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
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=folder)
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


def _find_compiler() -> str:
    named = os.environ.get("CXX")
    names = (named,) if named else _COMPILERS
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    if named:
        raise BuildError(f"finds no compiler {named}, which the variable CXX names")
    raise BuildError("finds no C++ compiler, apt-get install g++ or set CXX")


def _run(command: list[str]) -> None:
    """Raises BuildError unless it ends well and in time."""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} takes longer than {_TIMEOUT:.0f} s") from error
    except subprocess.CalledProcessError as error:
        words = " ".join(error.stderr.decode(errors="replace").split())
        raise BuildError(f"{command[0]} fails: {words[:_MOST_WORDS]}") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
