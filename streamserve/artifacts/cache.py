"""A folder of converted models, shared by every server of this user.

    <root>/models/<entry>/            complete; never changed again
    <root>/models/.<entry>.partial/   being written, or left by a process that died
    <root>/models/.<entry>.lock       held by whoever writes; the kernel lets go of it when that process dies

An entry appears by one rename, so it is whole or absent. The lock makes a second process wait for the first
instead of doing the same work twice, and tells a `.partial` that is being written from one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamserve.errors import ConfigError


class ModelCache:
    """Entries are made once, by whoever needs them first.

    Args:
        root: folder that holds `models/`; made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self._models = root / "models"

    def find(self, name: str) -> Path | None:
        """The folder of entry `name`, if it is there. Costs one stat."""
        folder = self._models / name
        return folder if folder.is_dir() else None

    def add(self, name: str, make: Callable[[Path], None], waiting: Callable[[], None]) -> Path:
        """Makes entry `name`, unless another process has by now, and returns its folder.

        Args:
            name: names the content; other content must have another name.
            make: fills the empty folder it is given. When it raises, the entry stays absent.
            waiting: called once if another process is making the entry.

        Raises:
            ConfigError: the cache cannot be written to, or the disk is full.
        """
        folder = self._models / name
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with _locked(self._models / f".{name}.lock", waiting):
                if not folder.is_dir():
                    self._make(folder, make)
        except OSError as error:
            raise ConfigError(_explain(error, self._models)) from error
        return folder

    def _make(self, folder: Path, make: Callable[[Path], None]) -> None:
        partial = self._models / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            _flush(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    # Without this, a power cut soon after the rename could leave an entry with empty files.
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _explain(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"The model cache {folder} is on a full disk; free some space or set STREAMSERVE_CACHE."
    return f"The model cache {folder} cannot be used ({error.strerror}); set STREAMSERVE_CACHE."
