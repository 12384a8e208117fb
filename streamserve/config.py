"""Every option of the server, each defined once.

A section is a frozen dataclass; a field made by `option()` is at the same time the command-line flag
(`--max-num-seqs`), the environment variable (`STREAMSERVE_MAX_NUM_SEQS`), the YAML key (`max_num_seqs`) and
the row of the table in docs/configuration.md. Later sources win: default < YAML < environment < flag.
This is the only module that reads the environment. Each room is handed its own section, never the whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from streamserve.errors import ConfigError

ENV_PREFIX = "STREAMSERVE_"

_BYTE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2}


def parse_bytes(text: str) -> int:
    """Bytes from `4G`, `512MiB` or a plain number (units are powers of 1024).

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512M or 4G")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def parse_count(text: str) -> int:
    """A whole number, with `k` and `m` for thousands and millions.

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number such as 4096 or 8k")
    return int(float(match[1]) * _COUNT_UNITS[match[2]])


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is not true or false")


def _parse_int(text: str) -> int:
    if re.fullmatch(r"[+-]?\d+", text.strip()) is None:
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


_PARSERS: dict[str, Any] = {
    "str": str,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "bytes": parse_bytes,
    "count": parse_count,
}


def option(
    default: Any,
    help: str,
    *,
    kind: str,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    positional: bool = False,
) -> Any:
    """A dataclass field that is also a flag, a variable, a YAML key and a line of documentation.

    Args:
        default: the value when nobody sets it; None means "worked out at start-up".
        help: one sentence for `--help` and the documentation, with the unit.
        kind: how text becomes a value: str, int, float, bool, bytes or count.
        choices: the only values allowed, if any.
        minimum: the least value allowed, if any.
        positional: a bare argument instead of a flag.
    """
    metadata = {
        "help": help,
        "kind": kind,
        "choices": choices,
        "minimum": minimum,
        "positional": positional,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served, and how it is held."""

    model: str | None = option(
        None,
        "Local Hugging Face folder, GGUF file, hub id or alias; the default is SmolLM2-135M-Instruct.",
        kind="str",
        positional=True,
    )
    served_model_name: str | None = option(
        None, "Model name in the API; the default is the last part of MODEL.", kind="str"
    )
    load_format: str = option(
        "auto",
        "auto reads the weights; dummy fills them with random numbers (for tests and benchmarks).",
        kind="str",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "Number format of weights and KV cache; auto is bfloat16 where the processor computes in it, "
        "else float32.",
        kind="str",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of prompt and answer together; the default is what the model was made for.",
        kind="count",
        minimum=1,
    )
    device: str = option("auto", "Where the model runs.", kind="str", choices=("auto", "cpu", "cuda"))
    seed: int | None = option(
        None,
        "Seed for requests that bring none, and for dummy weights; the default is a fresh one a start.",
        kind="int",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens in a KV cache block.", kind="int", minimum=1)
    kv_cache_memory: int | None = option(
        None,
        "Bytes for the KV cache (512M, 4G …); the default is a quarter of the free memory, at most 4G.",
        kind="bytes",
        minimum=1,
    )
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of KV cache blocks, whatever the memory.", kind="count", minimum=1
    )
    enable_prefix_caching: bool = option(
        True, "Reuse the KV blocks of prompts that begin alike.", kind="bool"
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many requests and tokens share a step."""

    max_num_seqs: int | None = option(
        None, "Most requests in a step; the default is 64 on a CPU.", kind="count", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of a step, prefill and decode together; the default is 512 on a CPU.",
        kind="count",
        minimum=1,
    )
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens of one request in a step; 0 is no limit but the budget.", kind="count"
    )
    scheduling_policy: str = option(
        "fcfs",
        "Whose turn it is: first come first served, by the request's priority, or in fair shares between "
        "API keys.",
        kind="str",
        choices=("fcfs", "priority", "fair"),
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How the model is computed."""

    cpu_threads: int = option(
        0, "Threads for the model on a CPU; 0 is one for each core.", kind="int", minimum=0
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the outside sees: the socket and its limits."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.", kind="str")
    port: int = option(8000, "TCP port; 0 takes a free one.", kind="int", minimum=0)
    max_waiting: int = option(
        1024, "Most requests waiting for the engine; more are answered 429.", kind="count", minimum=1
    )
    max_body_bytes: int = option(
        32 * 2**20, "Largest HTTP body; larger ones are answered 413.", kind="bytes", minimum=1024
    )
    log_level: str = option(
        "info", "Least severe line to log.", kind="str", choices=("debug", "info", "warning", "error")
    )
    sse_ping_interval: float = option(
        15.0, "Seconds of silence after which a stream carries a comment line.", kind="float", minimum=0.1
    )


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """What requests may ask for."""

    max_n: int = option(128, "Most choices of a request.", kind="count", minimum=1)
    max_logprobs: int = option(
        20,
        "Most likeliest tokens that a request may have reported at each position.",
        kind="count",
        minimum=0,
    )
    max_queue_time: float = option(
        0.0,
        "Seconds that a request may wait for its turn before it is answered 503; 0 is no limit. A request "
        "may ask for less.",
        kind="float",
        minimum=0,
    )
    stream_write_timeout: float = option(
        120.0,
        "Seconds that a stream waits for its client to read before the client is dropped.",
        kind="float",
        minimum=0.1,
    )
    chat_template: str | None = option(
        None, "File of a Jinja chat template to use instead of the model's own.", kind="str"
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own.", kind="bool"
    )


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How the processes are watched."""

    startup_timeout: float = option(
        600.0, "Seconds until a start that is not ready counts as failed.", kind="float", minimum=1
    )
    heartbeat_timeout: float = option(
        30.0, "Seconds of silence from the engine until /health says 503.", kind="float", minimum=0.1
    )
    drain_timeout: float = option(
        30.0, "Seconds that open streams may take to finish after SIGTERM.", kind="float", minimum=0
    )
    engine_failure_grace: float = option(
        5.0,
        "Seconds that the server goes on answering 503 after its engine died, before it exits with 1.",
        kind="float",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. Only the supervisor and the command line see it whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, for the hand-over to child processes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> Config:
        """The inverse of `to_dict`."""
        return cls(**{name: section(**data[name]) for name, section in _sections()})


def _sections() -> list[tuple[str, Any]]:
    return [
        ("model", ModelConfig),
        ("cache", CacheConfig),
        ("scheduler", SchedulerConfig),
        ("worker", WorkerConfig),
        ("server", ServerConfig),
        ("api", ApiConfig),
        ("supervisor", SupervisorConfig),
    ]


def _options() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for name, section in _sections():
        for item in fields(section):
            yield name, item


def _flag(item: dataclasses.Field[Any]) -> str:
    return "--" + item.name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and one argument for each option to `parser`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of options, keyed by name.")
    for section_name, section in _sections():
        group = parser.add_argument_group(section_name, section.__doc__)
        for item in fields(section):
            _add_argument(group, item)


def _add_argument(group: Any, item: dataclasses.Field[Any]) -> None:
    meta = item.metadata
    text = meta["help"] if item.default is None else f"{meta['help']} (default: {item.default})"
    text = text.replace("%", "%%")
    if meta["positional"]:
        group.add_argument(item.name, nargs="?", default=None, metavar=item.name.upper(), help=text)
    elif meta["kind"] == "bool":
        group.add_argument(_flag(item), action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else meta["kind"].upper()
        group.add_argument(_flag(item), default=None, metavar=metavar, help=text)


def load(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Config:
    """Merges defaults, YAML file, environment and flags into a checked `Config`.

    Raises:
        ConfigError: a value has the wrong form or range, or a YAML key is unknown; names the source.
    """
    environ = os.environ if environ is None else environ
    from_file = _read_yaml(arguments.config or environ.get(ENV_PREFIX + "CONFIG"))
    values: dict[str, dict[str, Any]] = {name: {} for name, _ in _sections()}
    for section, item in _options():
        variable = ENV_PREFIX + item.name.upper()
        given = getattr(arguments, item.name, None)
        if given is not None:
            source = item.name.upper() if item.metadata["positional"] else _flag(item)
            values[section][item.name] = _parse(item, given, source)
        elif variable in environ:
            values[section][item.name] = _parse(item, environ[variable], variable)
        elif item.name in from_file:
            source = f"{item.name} in the configuration file"
            values[section][item.name] = _parse(item, from_file[item.name], source)
    return Config(**{name: section(**values[name]) for name, section in _sections()})


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
    data = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = sorted(set(data) - {item.name for _, item in _options()})
    if unknown:
        raise ConfigError(f"--config: {path} has unknown options: {', '.join(unknown)}.")
    return data


def _parse(item: dataclasses.Field[Any], given: Any, source: str) -> Any:
    meta = item.metadata
    if given is None:
        return item.default
    if isinstance(given, list | dict):
        raise ConfigError(f"{source}: one value is expected, not {given!r}.")
    try:
        value = _PARSERS[meta["kind"]](given if isinstance(given, str) else str(given))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: {error}.") from error
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(meta['choices'])}.")
    if meta["minimum"] is not None and value < meta["minimum"]:
        raise ConfigError(f"{source}: {value} is below the minimum of {meta['minimum']}.")
    return value


def documentation() -> str:
    """The Markdown table of every option, as it stands in docs/configuration.md."""
    lines = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for _, item in _options():
        meta = item.metadata
        flag = item.name.upper() if meta["positional"] else _flag(item)
        text = meta["help"]
        if meta["choices"]:
            text += f" One of {', '.join(meta['choices'])}."
        default = "" if item.default is None else f"`{item.default}`"
        lines.append(f"| `{flag}` | `{ENV_PREFIX}{item.name.upper()}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


_PAGE = """\
# Configuration

Every option of `streamserve serve` can be given in four places. Where several give it, the later one in this
list wins:

1. the default,
2. a YAML file named by `--config FILE` or `STREAMSERVE_CONFIG`, whose keys are the names of the flags
   (`max_num_seqs: 32` or `max-num-seqs: 32`),
3. the environment variable,
4. the flag.

Sizes take the units `K`, `M`, `G` and `T` (powers of 1024); counts take `k` and `m` (thousands, millions).
A switch such as `--enable-prefix-caching` has an opposite, `--no-enable-prefix-caching`; as a variable or in
YAML it is `true` or `false`. An empty default means that the value is worked out at start-up.

"""


def page() -> str:
    """The whole of docs/configuration.md; `python -m streamserve.config` prints it."""
    return _PAGE + documentation()


if __name__ == "__main__":
    sys.stdout.write(page())
