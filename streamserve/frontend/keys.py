"""API keys: which there are, whose they are, and whether one is among them, in constant time."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamserve.config import AuthConfig
from streamserve.errors import ConfigError

# What stands before the first colon of NAME:KEY. A key with a colon in it needs a name.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a request comes from.

    Attributes:
        name: of the key; "" where the server has none.
        is_admin: whether it may do what concerns all users.
    """

    name: str
    is_admin: bool = False


ANYBODY = Identity("")


class KeyRing:
    """The keys of a server. Holds digests only: comparing those tells nothing of a key by the time it takes.

    Args:
        api_keys: `KEY` or `NAME:KEY` each; several may share a name, while one replaces another.
        admin_keys: the same for administrators.

    Raises:
        ConfigError: a key is empty or is there twice, or one without a name would get another one's.
    """

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self.needs_key = bool(api_keys)
        self.has_admin = bool(admin_keys)
        self._digests: list[tuple[bytes, Identity]] = []
        written = [(_split(text), False, f"key-{number}") for number, text in enumerate(api_keys, 1)]
        written += [
            (_split(text), True, "admin" if number == 1 else f"admin-{number}")
            for number, text in enumerate(admin_keys, 1)
        ]
        given = {name for (name, _), _, _ in written}
        for (name, key), is_admin, default in written:
            if name is None and default in given:
                # Whoever has a name sees and ends what was asked under it.
                raise ConfigError(
                    f"--api-key: a key without a name would be called {default!r}, as another one is; "
                    "give it a name."
                )
            self._add(key, Identity(default if name is None else name, is_admin))

    def _add(self, key: str, identity: Identity) -> None:
        if not key:
            raise ConfigError(f"--api-key: the key of {identity.name!r} is empty.")
        digest = _digest(key.encode())
        if any(known == digest for known, _ in self._digests):
            raise ConfigError(f"--api-key: the key of {identity.name!r} is given twice.")
        self._digests.append((digest, identity))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys, and "" where requests may come without one."""
        named = [identity.name for _, identity in self._digests]
        return tuple(dict.fromkeys(named if self.needs_key else ["", *named]))

    def find(self, key: bytes) -> Identity | None:
        """Whose `key` is. Takes as long for a wrong one as for any right one."""
        digest = _digest(key)
        found = None
        for known, identity in self._digests:
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    @classmethod
    def of(cls, config: AuthConfig) -> KeyRing:
        """The keys in a configuration whose files have been read (`with_key_files`)."""
        return cls(config.api_key, config.admin_key)


def with_key_files(config: AuthConfig) -> AuthConfig:
    """`config` with the keys of its files among its keys, so that all processes go by the same.

    Raises:
        ConfigError: a file cannot be read, or the keys are not as they must be.
    """
    read = dataclasses.replace(
        config,
        api_key=(*config.api_key, *_read(config.api_key_file, "--api-key-file")),
        admin_key=(*config.admin_key, *_read(config.admin_key_file, "--admin-key-file")),
        api_key_file=None,
        admin_key_file=None,
    )
    KeyRing.of(read)
    return read


def _read(path: str | None, option: str) -> Iterable[str]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not text in UTF-8.") from error
    keys = [text for line in lines if (text := line.strip()) and not text.startswith("#")]
    if not keys:
        # An empty file must not open the server to everybody.
        raise ConfigError(f"{option}: {path} holds no key.")
    return keys


def _split(text: str) -> tuple[str | None, str]:
    """The name, if there is one, and the key."""
    name, colon, key = text.partition(":")
    return (name, key) if colon and _NAME.fullmatch(name) else (None, text)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
