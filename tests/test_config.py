from __future__ import annotations

import argparse
import json
import os
import pwd
from dataclasses import fields
from pathlib import Path

import pytest

from streamserve import config
from streamserve.config import Config, cache_root, parse_bytes, parse_count
from streamserve.errors import ConfigError

ROOT = Path(__file__).parents[1]


def load(flags: str = "", environ: dict[str, str] | None = None) -> Config:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.load(parser.parse_args(flags.split()), environ or {})


def test_nothing_given_is_the_defaults() -> None:
    assert load() == Config()


@pytest.mark.parametrize(
    ("in_file", "in_environment", "as_flag", "expected"),
    [
        (False, False, False, 8000),
        (True, False, False, 1),
        (True, True, False, 2),
        (True, True, True, 3),
        (False, True, False, 2),
        (True, False, True, 3),
    ],
)
def test_the_flag_wins_over_the_variable_over_the_file(
    tmp_path: Path, in_file: bool, in_environment: bool, as_flag: bool, expected: int
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: 1\n" if in_file else "")
    environ = {"STREAMSERVE_PORT": "2"} if in_environment else {}
    flags = f"--config {path}" + (" --port 3" if as_flag else "")
    assert load(flags, environ).server.port == expected


def test_a_flag_of_false_or_zero_wins_too() -> None:
    environ = {"STREAMSERVE_ENABLE_PREFIX_CACHING": "true", "STREAMSERVE_PORT": "9"}
    loaded = load("--no-enable-prefix-caching --port 0", environ)
    assert not loaded.cache.enable_prefix_caching
    assert loaded.server.port == 0


def test_the_file_can_be_named_by_a_variable_and_its_keys_written_like_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max-num-seqs: 8\nkv_cache_memory: 2G\nenable_prefix_caching: off\nseed:\nmodel: tiny\n")
    loaded = load("", {"STREAMSERVE_CONFIG": str(path)})
    assert loaded.scheduler.max_num_seqs == 8
    assert loaded.cache.kv_cache_memory == 2 * 2**30
    assert not loaded.cache.enable_prefix_caching
    assert loaded.model.seed is None
    assert loaded.model.model == "tiny"


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ("--port x", {}, ("--port", "'x'")),
        ("--port -1", {}, ("--port", "minimum of 0")),
        ("--dtype int3", {}, ("--dtype", "int3", "bfloat16")),
        ("--kv-cache-memory 4X", {}, ("--kv-cache-memory", "4X")),
        ("--gpu-memory-utilization 1.5", {}, ("--gpu-memory-utilization", "above 1")),
        ("--max-num-seqs 0", {}, ("--max-num-seqs", "minimum of 1")),
        ("--drain-timeout nan", {}, ("--drain-timeout", "'nan'")),
        ("--startup-timeout inf", {}, ("--startup-timeout", "'inf'")),
        (f"--kv-cache-memory {'9' * 400}", {}, ("--kv-cache-memory",)),
        ("", {"STREAMSERVE_PORT": ""}, ("STREAMSERVE_PORT", "whole number")),
        ("", {"STREAMSERVE_ENABLE_PREFIX_CACHING": "maybe"}, ("STREAMSERVE_ENABLE_PREFIX_CACHING", "maybe")),
        ("", {"STREAMSERVE_DEVICE": "abacus"}, ("STREAMSERVE_DEVICE", "abacus", "cpu")),
    ],
)
def test_a_bad_value_is_refused_by_the_name_it_was_given_under(
    flags: str, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: many", ("port in the configuration file", "many")),
        ("port: [1, 2]", ("port in the configuration file", "one value")),
        ("prot: 1\nhots: x", ("unknown options", "hots, prot")),
        ("- port", ("mapping",)),
        ("port: {", ("not valid YAML",)),
        ("max_num_seqs: 1\nmax-num-seqs: 2", ("twice", "max_num_seqs")),
        ("api_key: 0123", ("api_key", "quotes")),
        ("api_key: [a, 1]", ("api_key", "quotes")),
        ("api_key: ''", ("api_key", "no key")),
        ("admin_key: []", ("admin_key", "no key")),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(f"--config {path}")
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(f"--config {tmp_path / 'none.yaml'}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("17", 17), ("4G", 4 * 2**30), ("512MiB", 512 * 2**20), ("1.5k", 1536), ("2 tb", 2 * 2**40)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("4096", 4096), ("8k", 8000), ("1.5M", 1_500_000)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "-1", "G", "4 apples", "1e3", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
    with pytest.raises(ValueError):
        parse_count(text)


def test_it_survives_the_way_to_a_child_process() -> None:
    loaded = load("some/model --port 0 --kv-cache-memory 1G --no-enable-prefix-caching")
    assert Config.from_dict(loaded.to_dict()) == loaded


def test_it_survives_the_way_through_json() -> None:
    loaded = load("--allowed-origins a,b --api-key x:y")
    assert Config.from_dict(json.loads(json.dumps(loaded.to_dict()))) == loaded


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ("--allowed-origins a --allowed-origins b,c", {}, ""),
        ("", {"STREAMSERVE_ALLOWED_ORIGINS": " a, b ,,c "}, ""),
        ("", {}, "allowed_origins: [a, b, c]"),
        ("", {}, "allowed-origins: a,b,c"),
    ],
)
def test_lists_are_written_in_several_ways(
    tmp_path: Path, flags: str, environ: dict[str, str], text: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert load(f"--config {path} {flags}", environ).server.allowed_origins == ("a", "b", "c")


def test_an_empty_list_is_a_value_too() -> None:
    assert load("", {"STREAMSERVE_FORWARDED_ALLOW_IPS": ""}).server.forwarded_allow_ips == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ssl-keyfile k", "--ssl-certfile"),
        ("--ssl-certfile c --ssl-cert-reqs required", "--ssl-ca-certs"),
        ("--allowed-origins * --allow-credentials", "--allow-credentials"),
        ("--root-path llm", "--root-path"),
        ("--root-path /llm/", "--root-path"),
    ],
)
def test_values_that_contradict_each_other_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(flags)


def test_secrets_are_shown_nowhere() -> None:
    loaded = load("--api-key alice:sk-secret", {"STREAMSERVE_ADMIN_KEY": "sk-secret"})
    assert loaded.auth.api_key == ("alice:sk-secret",)
    assert "sk-secret" not in repr(loaded)


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_flag_without_a_key_does_not_open_the_server(text: str) -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    with pytest.raises(ConfigError, match="--api-key: no key"):
        config.load(parser.parse_args(["--api-key", text]), {})


def test_a_variable_that_is_passed_on_unset_does_not_open_it_either(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("api_key: secret")
    assert load(f"--config {path}", {"STREAMSERVE_API_KEY": ""}).auth.api_key == ("secret",)
    assert load("", {"STREAMSERVE_API_KEY": ""}).auth.api_key == ()
    with pytest.raises(ConfigError, match="STREAMSERVE_API_KEY: no key"):
        load("", {"STREAMSERVE_API_KEY": ","})


def test_variables_that_are_no_option_are_told_of() -> None:
    known = {"STREAMSERVE_PORT": "1", "STREAMSERVE_CONFIG": "x", "STREAMSERVE_CACHE": "x", "PATH": "x"}
    assert config.unknown_variables(known) == []
    typo, foreign = config.unknown_variables(
        {**known, "STREAMSERVE_API_KEYS": "x", "STREAMSERVE_PORT_8000_TCP_ADDR": "x"}
    )
    assert typo.startswith("the variable STREAMSERVE_API_KEYS is ignored")
    assert typo.endswith("is STREAMSERVE_API_KEY meant?")
    assert "STREAMSERVE_PORT_8000_TCP_ADDR" in foreign
    assert "meant" not in foreign


def test_defaults_are_within_their_own_limits() -> None:
    for section in fields(Config):
        for item in fields(type(getattr(Config(), section.name))):
            choices, minimum = item.metadata["choices"], item.metadata["minimum"]
            if item.default is not None and choices:
                assert item.default in choices, item.name
            if item.default is not None and minimum is not None:
                assert item.default >= minimum, item.name


def test_every_option_is_documented_and_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == config.page(), "run: python -m streamserve.config > docs/configuration.md"
    for section in fields(Config):
        for item in fields(type(getattr(Config(), section.name))):
            assert f"`STREAMSERVE_{item.name.upper()}`" in page
            assert item.metadata["help"].rstrip().endswith("."), item.name


def test_where_the_cache_is() -> None:
    assert cache_root({"STREAMSERVE_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}) == Path("/a/b")
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/streamserve")
    assert cache_root({"HOME": "/home/me"}) == Path("/home/me/.cache/streamserve")
    assert cache_root({"HOME": "/home/me", "STREAMSERVE_CACHE": "~/models"}) == Path("/home/me/models")
    assert cache_root({"STREAMSERVE_CACHE": "models"}) == Path.cwd() / "models"
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert cache_root({}) == home / ".cache" / "streamserve"


def test_only_the_mapping_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "STREAMSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/elsewhere")
    assert cache_root({"HOME": "/home/me"}) == Path("/home/me/.cache/streamserve")


@pytest.mark.parametrize("environ", [{}, {"STREAMSERVE_CACHE": "~/models"}])
def test_a_user_without_a_home_has_to_name_the_cache(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match=r"no home folder.*STREAMSERVE_CACHE"):
        cache_root(environ)
