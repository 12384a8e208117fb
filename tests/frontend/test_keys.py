"""Which keys there are, whose they are, and what is refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamserve.config import AuthConfig
from streamserve.errors import ConfigError
from streamserve.frontend.keys import Identity, KeyRing, with_key_files


def test_a_server_without_keys_needs_none() -> None:
    ring = KeyRing()
    assert not ring.needs_key
    assert ring.names == ("",)
    assert ring.find(b"anything") is None


def test_keys_have_the_names_they_are_given_or_numbers() -> None:
    ring = KeyRing(["sk-one", "alice:sk-two", "sk-three"], ["sk-four", "root:sk-five"])
    assert ring.find(b"sk-one") == Identity("key-1")
    assert ring.find(b"sk-two") == Identity("alice")
    assert ring.find(b"sk-three") == Identity("key-3")
    assert ring.find(b"sk-four") == Identity("admin", is_admin=True)
    assert ring.find(b"sk-five") == Identity("root", is_admin=True)
    assert ring.names == ("key-1", "alice", "key-3", "admin", "root")


def test_two_keys_may_share_a_name_while_one_replaces_the_other() -> None:
    ring = KeyRing(["alice:old", "alice:new"])
    assert ring.find(b"old") == ring.find(b"new") == Identity("alice")
    assert ring.names == ("alice",)


@pytest.mark.parametrize(
    "key", [b"", b"old ", b"OLD", b"alice:old", b"\xff\xfe", "schlüssel".encode(), b"x" * 10**6]
)
def test_anything_else_is_nobodys(key: bytes) -> None:
    assert KeyRing(["alice:old"]).find(key) is None


def test_a_key_may_hold_any_character_but_needs_a_name_for_a_colon() -> None:
    ring = KeyRing(["bob:a:b", "schlüssel", "not a name:x"])
    assert ring.find(b"a:b") == Identity("bob")
    assert ring.find("schlüssel".encode()) == Identity("key-2")
    assert ring.find(b"not a name:x") == Identity("key-3")


@pytest.mark.parametrize(
    ("api", "admin", "words"),
    [(["alice:"], [], "empty"), (["a", "x:a"], [], "twice"), (["a"], ["a"], "twice")],
)
def test_keys_that_cannot_be_meant_are_refused(api: list[str], admin: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KeyRing(api, admin)


@pytest.mark.parametrize(
    ("api", "admin", "name"),
    [
        (["key-2:A", "B"], [], "key-2"),
        (["B", "key-1:A"], [], "key-1"),
        (["admin:A"], ["B"], "admin"),
        (["A"], ["key-1:B"], "key-1"),
        ([], ["admin-2:A", "B"], "admin-2"),
    ],
)
def test_nobody_gets_the_name_of_somebody_else_by_chance(api: list[str], admin: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        KeyRing(api, admin)


def test_an_administrator_may_have_an_ordinary_key_too() -> None:
    ring = KeyRing(["root:A"], ["root:B"])
    assert (ring.find(b"A"), ring.find(b"B")) == (Identity("root"), Identity("root", is_admin=True))


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    ring = KeyRing([], ["root:x"])
    assert not ring.needs_key
    assert ring.has_admin
    assert ring.names == ("", "root")


def test_files_add_to_the_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team\n\nalice:one\n  two  \n")
    config = with_key_files(AuthConfig(api_key=("zero",), api_key_file=str(keys)))
    assert config.api_key == ("zero", "alice:one", "two")
    assert config.api_key_file is None
    assert with_key_files(config) == config


@pytest.mark.parametrize(("text", "words"), [(b"", "no key"), (b"# none\n", "no key"), (b"\xff", "UTF-8")])
def test_a_file_without_a_key_does_not_open_the_server(tmp_path: Path, text: bytes, words: str) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        with_key_files(AuthConfig(api_key_file=str(keys)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--admin-key-file: cannot read"):
        with_key_files(AuthConfig(admin_key_file=str(tmp_path / "none")))


def test_keys_are_not_in_what_is_logged_of_a_configuration() -> None:
    assert "sk-secret" not in repr(AuthConfig(api_key=("sk-secret",), admin_key=("sk-secret-2",)))
