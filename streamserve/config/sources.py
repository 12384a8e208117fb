"""Where values come from: the command line, the environment and a YAML file."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from streamserve.config.options import PARSERS, flag
from streamserve.config.sections import Config, options, sections
from streamserve.errors import ConfigError

ENV_PREFIX = "STREAMSERVE_"
# Read before there is a configuration, or by scripts/setup_env.py for `make serve`.
_OTHER_VARIABLES = ("CACHE", "CONFIG", "TORCH", "VENV_HOME")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and one argument for each option to `parser`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options, keyed by name.")
    for section_name, section in sections():
        group = parser.add_argument_group(section_name, section.__doc__)
        for item in fields(section):
            _add_argument(group, item)


def _add_argument(group: Any, item: Field[Any]) -> None:
    meta = item.metadata
    shown = shown_default(item)
    text = f"{meta['help']} (default: {shown})" if shown else meta["help"]
    text = text.replace("%", "%%")
    if meta["positional"]:
        group.add_argument(item.name, nargs="?", default=None, metavar=item.name.upper(), help=text)
    elif meta["kind"] == "bool":
        group.add_argument(flag(item), action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else meta["kind"].upper()
        action = "append" if meta["kind"] == "list" else "store"
        group.add_argument(flag(item), action=action, default=None, metavar=metavar, help=text)


def shown_default(item: Field[Any]) -> str:
    """The default of an option as it is shown; "" where there is none to show."""
    default: Any = item.default
    if item.metadata["kind"] == "list":
        return ",".join(default)
    return "" if default is None else str(default)


def load(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Config:
    """Merges defaults, YAML file, environment and flags into a checked `Config`.

    Raises:
        ConfigError: a value has the wrong form or range, values contradict each other, or a YAML key is
            unknown; names the source.
    """
    environ = os.environ if environ is None else environ
    from_file = _read_yaml(arguments.config or environ.get(ENV_PREFIX + "CONFIG"))
    values: dict[str, dict[str, Any]] = {name: {} for name, _ in sections()}
    for section, item in options():
        variable = ENV_PREFIX + item.name.upper()
        given = getattr(arguments, item.name, None)
        if given is not None:
            source = item.name.upper() if item.metadata["positional"] else flag(item)
            values[section][item.name] = _parse(item, given, source)
        elif variable in environ and not (item.metadata["secret"] and not environ[variable].strip()):
            # A variable without a key is one that compose.yaml or a shell passes on unset. It must not put
            # aside the keys of the file.
            values[section][item.name] = _parse(item, environ[variable], variable)
        elif item.name in from_file:
            source = f"{item.name} in the configuration file"
            values[section][item.name] = _parse(item, from_file[item.name], source)
    config = Config(**{name: section(**values[name]) for name, section in sections()})
    for problem in _contradictions(config):
        raise ConfigError(problem)
    return config


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable that looks like an option of the server and is none.

    They are no errors: a container engine makes variables of the names of services.
    """
    environ = os.environ if environ is None else environ
    known = [ENV_PREFIX + name for name in _OTHER_VARIABLES]
    known += [ENV_PREFIX + item.name.upper() for _, item in options()]
    sentences = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.9)
            hint = f"; is {close[0]} meant?" if close else ""
            sentences.append(f"the variable {name} is ignored: there is no such option{hint}")
    return sentences


def _contradictions(config: Config) -> list[str]:
    """What is wrong with values that are each right by themselves."""
    problems = []
    server, tls = config.server, config.tls
    if tls.ssl_certfile is None and (tls.ssl_keyfile or tls.ssl_ca_certs or tls.ssl_cert_reqs != "none"):
        problems.append("--ssl-certfile: HTTPS needs a certificate.")
    if tls.ssl_cert_reqs != "none" and tls.ssl_ca_certs is None:
        problems.append("--ssl-ca-certs: client certificates can only be checked against an authority.")
    if server.allow_credentials and "*" in server.allowed_origins:
        problems.append("--allow-credentials: needs --allowed-origins by name, not *.")
    if server.root_path and (not server.root_path.startswith("/") or server.root_path.endswith("/")):
        problems.append("--root-path: must begin and must not end with a slash.")
    if config.cache.gpu_memory_utilization > 1:
        given = config.cache.gpu_memory_utilization
        problems.append(f"--gpu-memory-utilization: {given:g} is above 1, which is the whole GPU.")
    return problems


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of option names to values.")
    named = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = sorted(set(named) - {item.name for _, item in options()})
    if unknown:
        raise ConfigError(f"--config: {path} has unknown options: {', '.join(unknown)}.")
    if len(named) < len(data):
        twice = sorted(name for name in named if name in data and name.replace("_", "-") in data)
        raise ConfigError(f"--config: {path} has options twice: {', '.join(twice)}.")
    return named


def _parse(item: Field[Any], given: Any, source: str) -> Any:
    meta = item.metadata
    if given is None:
        return item.default
    if meta["secret"] and not all(isinstance(one, str) for one in _each(given)):
        # 0123 is 83 in YAML, and so the key that everybody must guess would not be the one that is written.
        raise ConfigError(f"{source}: a key must be in quotes.")
    if meta["kind"] == "list" and isinstance(given, list):
        given = ",".join(map(str, given))
    if isinstance(given, list | dict):
        raise ConfigError(f"{source}: one value is expected, not {given!r}.")
    try:
        value = PARSERS[meta["kind"]](given if isinstance(given, str) else str(given))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: {error}.") from error
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(meta['choices'])}.")
    if meta["secret"] and not value:
        raise ConfigError(f"{source}: no key is given; leave it out to let everybody use the server.")
    if meta["minimum"] is not None and value < meta["minimum"]:
        raise ConfigError(f"{source}: {value} is below the minimum of {meta['minimum']}.")
    return value


def _each(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]
