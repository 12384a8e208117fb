"""Which sections there are, in which processes they run, and how long each may take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check.

    Attributes:
        name: of its module in `sections`.
        budget_s: seconds it may take on an H200, beginning with those of its process if it is the first.
    """

    name: str
    budget_s: float


# Sections of a group share a process: starting one costs what a small section does, and weights are there
# already. What is worth most comes first, should time run out.
GROUPS: tuple[tuple[Section, ...], ...] = (
    (Section("environment", 25), Section("attention", 70), Section("sampling", 25)),
    (Section("equality", 50), Section("dispatch", 20)),
    (Section("decode", 60), Section("gap", 25), Section("compiled", 55)),
    (Section("memory", 45),),
    (Section("server", 70),),
)
# Of the eight minutes, what is left for the installation before all that.
TOTAL_S = 450.0


def sections() -> tuple[str, ...]:
    """Their names, in order."""
    return tuple(section.name for group in GROUPS for section in group)


def chosen_groups(names: Iterable[str]) -> list[tuple[Section, ...]]:
    """The groups with only these sections in them; all of them if none is named.

    Raises:
        ValueError: no section is called so.
    """
    wanted = set(names) or set(sections())
    if unknown := wanted - set(sections()):
        raise ValueError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections())}")
    groups = (tuple(section for section in group if section.name in wanted) for group in GROUPS)
    return [group for group in groups if group]


def allowance(section: Section, elapsed_s: float, total_s: float, factor: float = 1.0) -> float:
    """Seconds that a section may take now: its budget, or what is left of the whole.

    Args:
        section: about to begin.
        elapsed_s: since the begin of the check.
        total_s: for all sections.
        factor: how much slower this machine may be.
    """
    return max(0.0, min(section.budget_s * factor, total_s - elapsed_s))


def without_finished(group: Sequence[Section], finished: Iterable[str]) -> tuple[Section, ...]:
    """What is left to do of a group whose process has ended."""
    done = set(finished)
    return tuple(section for section in group if section.name not in done)
