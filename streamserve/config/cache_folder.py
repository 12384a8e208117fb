"""Where this user's cache is."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from streamserve.errors import ConfigError


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's cache is: `STREAMSERVE_CACHE`, or `streamserve` in the XDG cache folder.

    Args:
        environ: None is this process's environment; nothing else is looked at but the user database.

    Raises:
        ConfigError: no variable says where, and the user has no home folder.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("STREAMSERVE_CACHE"):
        first, _, rest = own.partition("/")
        return _home(environ) / rest if first == "~" else Path(own).absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else _home(environ) / ".cache") / "streamserve"


def _home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        raise ConfigError("This user has no home folder for the cache; set STREAMSERVE_CACHE.") from error
