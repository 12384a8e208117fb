"""Rings in one process, and children that hold the other end of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"


@dataclass
class Ring:
    """Both ends of a fresh ring and what they share."""

    segment: Segment
    data_bell: Doorbell
    space_bell: Doorbell
    writer: RingWriter
    reader: RingReader

    def descriptors(self) -> tuple[int, int, int]:
        """Segment, data bell and space bell, as the programs expect them."""
        return self.segment.fd, self.data_bell.fileno(), self.space_bell.fileno()


MakeRing = Callable[[int], Ring]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def make_ring() -> Iterator[MakeRing]:
    with ExitStack() as resources:

        def make(capacity: int) -> Ring:
            segment = resources.enter_context(Segment.create("test-ring", ring_bytes(capacity)))
            format_ring(segment.view, capacity)
            data_bell, space_bell = (resources.enter_context(Doorbell.create()) for _ in range(2))
            writer = RingWriter(segment.view, data_bell)
            return Ring(segment, data_bell, space_bell, writer, RingReader(segment.view, space_bell))

        yield make


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Runs a program of this folder with inherited descriptors and then other arguments."""
    children: list[subprocess.Popen[str]] = []

    def run(program: str, descriptors: Sequence[int], *arguments: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *map(str, descriptors), *map(str, arguments)],
            pass_fds=descriptors,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()
