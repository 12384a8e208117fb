from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from streamserve.artifacts.cache import ModelCache
from streamserve.errors import ConfigError

SPAWN = multiprocessing.get_context("spawn")


def unexpected() -> None:
    raise AssertionError("nobody else is at work")


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    assert cache.find("m") is None
    made = cache.add("m", write_model, unexpected)
    assert (made / "config.json").read_text() == "{}"
    assert cache.find("m") == made
    assert cache.add("m", lambda _: pytest.fail("made twice"), unexpected) == made
    assert cache.find("other") is None


def test_a_failed_entry_stays_absent_and_can_be_made_later(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)

    def fail(folder: Path) -> None:
        write_model(folder)
        raise ConfigError("the file is damaged")

    with pytest.raises(ConfigError, match="damaged"):
        cache.add("m", fail, unexpected)
    assert cache.find("m") is None
    assert not list((tmp_path / "models").glob("*.partial"))
    assert cache.add("m", write_model, unexpected).is_dir()


def test_what_a_dead_process_left_is_never_used(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    started = SPAWN.Event()
    writer = SPAWN.Process(target=_write_for_ever, args=(tmp_path, started))
    writer.start()
    assert started.wait(60)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    assert list((tmp_path / "models").glob(".m.partial/half"))
    assert cache.find("m") is None
    folder = cache.add("m", write_model, unexpected)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_second_process_waits_and_takes_what_the_first_made(tmp_path: Path) -> None:
    started, go_on = SPAWN.Event(), SPAWN.Event()
    writer = SPAWN.Process(target=_write_when_told, args=(tmp_path, started, go_on))
    writer.start()
    assert started.wait(60)
    cache = ModelCache(tmp_path)
    assert cache.find("m") is None
    folder = cache.add("m", lambda _: pytest.fail("made twice"), waiting=go_on.set)
    assert (folder / "config.json").read_text() == "{}"
    writer.join(60)
    assert writer.exitcode == 0


def _write_for_ever(root: Path, started: Event) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("")
        started.set()
        signal.pause()

    ModelCache(root).add("m", make, unexpected)


def _write_when_told(root: Path, started: Event, go_on: Event) -> None:
    def make(folder: Path) -> None:
        started.set()
        assert go_on.wait(60)
        write_model(folder)

    ModelCache(root).add("m", make, unexpected)


def test_an_unusable_cache_is_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="STREAMSERVE_CACHE"):
        ModelCache(tmp_path / "file").add("m", write_model, unexpected)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match="full disk"):
        ModelCache(tmp_path).add("m", fill, unexpected)
    assert not list((tmp_path / "models").glob("*.partial"))
