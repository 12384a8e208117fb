"""Reads a Dockerfile and a .dockerignore, as far as this project uses their languages."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: number of its first line.
        name: in capitals.
        value: the rest, continuation lines joined by blanks.
    """

    line: int
    name: str
    value: str

    def command(self) -> list[str] | None:
        """The list of the exec form; None for the shell form."""
        text = self.value.partition("CMD")[2] if self.name == "HEALTHCHECK" else self.value
        if not text.strip().startswith("["):
            return None
        words: list[str] = json.loads(text)
        return words

    def words(self) -> list[str]:
        """The value as a shell splits it."""
        return shlex.split(self.value)


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it.

    Attributes:
        base: what it starts from, an image or an earlier stage.
        name: what others call it.
        instructions: after the FROM.
    """

    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def of(self, name: str) -> list[Instruction]:
        """Its instructions of one name."""
        return [instruction for instruction in self.instructions if instruction.name == name]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A whole file.

    Attributes:
        arguments: ARGs before the first FROM, with their defaults.
        stages: in order; the last one is what is built by default.
    """

    arguments: Mapping[str, str]
    stages: tuple[Stage, ...]

    @classmethod
    def parse(cls, text: str) -> Dockerfile:
        """The meaning of `text`."""
        arguments: dict[str, str] = {}
        stages: list[tuple[str, str, list[Instruction]]] = []
        for instruction in _instructions(text):
            if instruction.name == "FROM":
                base, *rest = instruction.value.split()
                name = rest[1] if len(rest) == 2 and rest[0].upper() == "AS" else ""
                stages.append((expand(base, arguments), name, []))
            elif stages:
                stages[-1][2].append(instruction)
            else:
                key, _, default = instruction.value.partition("=")
                arguments[key] = default
        return cls(arguments, tuple(Stage(base, name, tuple(body)) for base, name, body in stages))

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def lineage(self, name: str) -> list[Stage]:
        """The stages that `name` is built on, the outermost first, and itself."""
        stage = self.stage(name)
        names = {other.name for other in self.stages}
        return [*(self.lineage(stage.base) if stage.base in names else []), stage]


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    first, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        first = first if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            name, _, value = " ".join(parts).partition(" ")
            found.append(Instruction(first, name.upper(), value.strip()))
            parts = []
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Puts in the values of `$NAME` and `${NAME}`; unknown ones are empty."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a .dockerignore keeps a file from the build; the last pattern that fits counts."""
    candidates = [str(part) for part in (PurePosixPath(path), *PurePosixPath(path).parents)][:-1]
    ignored = False
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        globs = (glob, glob.removeprefix("**/"))
        # A pattern without a slash in front of it names things at the top, unless it begins with **.
        if any(_fits(candidate, one, glob) for candidate in candidates for one in globs):
            ignored = not pattern.startswith("!")
    return ignored


def _fits(candidate: str, pattern: str, whole: str) -> bool:
    if whole.startswith("**/"):
        return fnmatch.fnmatch(candidate.rpartition("/")[2], pattern)
    return candidate.count("/") == pattern.count("/") and fnmatch.fnmatch(candidate, pattern)
