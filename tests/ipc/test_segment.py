"""Shared memory: reserved at once, without a name, and closed whoever still looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from streamserve.errors import ConfigError
from streamserve.host_memory import available_bytes
from streamserve.ipc import segment as segments
from streamserve.ipc.segment import Segment


def is_mapped(name: str) -> bool:
    """Whether this process maps the memfd of that name."""
    return f"/memfd:{name}" in Path("/proc/self/maps").read_text()


def test_what_one_side_writes_the_other_reads() -> None:
    with Segment.create("test-shared", 4096) as mine, Segment.attach(mine.fd) as other:
        assert (mine.size, other.size) == (4096, 4096)
        assert mine.view.format == "B"
        assert bytes(mine.view) == bytes(4096)
        mine.view[5:10] = b"hello"
        assert other.view[5:10] == b"hello"


def test_memory_is_reserved_at_creation() -> None:
    size = 1 << 20
    with Segment.create("test-reserved", size) as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= size


def test_more_than_the_machine_has_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"test-huge needs \d+ bytes"):
        Segment.create("test-huge", 1 << 50)


def test_more_than_the_container_may_have_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "sys/fs/cgroup/pod"
    for path, text in (
        (tmp_path / "proc/meminfo", "MemAvailable: 8000000 kB\n"),
        (tmp_path / "proc/self/cgroup", "0::/pod\n"),
        (group / "memory.max", "1000000\n"),
        (group / "memory.current", "400000\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(segments, "available_bytes", partial(available_bytes, tmp_path))
    Segment.create("test-fits", 500_000).close()
    # Linux would have given this much, and killed whoever wrote to it.
    with pytest.raises(ConfigError, match=r"only 600000 are available; .* raise the limit of this container"):
        Segment.create("test-large", 700_000)


def test_a_refused_reservation_is_a_config_error() -> None:
    program = (
        "import resource; from streamserve.ipc.segment import Segment\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: Segment.create('test-limited', 1 << 20)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = run_python(program)
    assert said.startswith("ConfigError cannot reserve 1048576 bytes of shared memory for test-limited")


def test_failing_to_create_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError):
        Segment.create("test-huge", 1 << 50)
    assert os.listdir("/proc/self/fd") == before


def test_close_unmaps_and_closes() -> None:
    before = os.listdir("/proc/self/fd")
    segment = Segment.create("test-closed", 4096)
    assert is_mapped("test-closed")
    segment.close()
    segment.close()
    assert not is_mapped("test-closed")
    assert len(segment.view) == 0
    assert os.listdir("/proc/self/fd") == before


def test_an_attached_segment_leaves_the_descriptor_open() -> None:
    with Segment.create("test-attached", 4096) as segment:
        Segment.attach(segment.fd).close()
        assert os.fstat(segment.fd).st_size == 4096


def test_close_with_a_view_alive_waits_for_the_view() -> None:
    segment = Segment.create("test-view", 4096)
    segment.view[:4] = b"data"
    part = segment.view[:4]
    segment.close()
    assert part == b"data"
    assert is_mapped("test-view")
    del part
    assert not is_mapped("test-view")


def test_close_with_an_array_alive_waits_for_the_array() -> None:
    before = os.listdir("/proc/self/fd")
    segment = Segment.create("test-array", 4096)
    array = np.frombuffer(segment.view, dtype="<u8")
    segment.view[0] = 7
    segment.close()
    assert array[0] == 7
    del array
    assert not is_mapped("test-array")
    assert os.listdir("/proc/self/fd") == before


def test_nothing_appears_in_dev_shm_and_nobody_tracks() -> None:
    program = (
        "import os, sys\n"
        "from streamserve.ipc import board, broadcast, doorbell, ring, segment\n"
        "kept = [segment.Segment.create('test-nameless', 1 << 16), board.StatusBoard.create()]\n"
        "print([name for name in os.listdir('/dev/shm') if 'nameless' in name or 'board' in name])\n"
        "print('multiprocessing' in sys.modules)"
    )
    assert run_python(program).split("\n") == ["[]", "False"]


def run_python(program: str) -> str:
    """What `program` prints in a fresh interpreter."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
