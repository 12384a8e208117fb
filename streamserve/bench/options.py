"""The command line of `streamserve bench serve`: the options of `vllm bench serve` that make sense here."""

from __future__ import annotations

import argparse
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.bench.names import DATASET_NAMES, GOODPUT_METRICS, METRICS
from streamserve.errors import ConfigError

_ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
_SAMPLING: dict[str, type] = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "frequency-penalty": float,
    "presence-penalty": float,
    "repetition-penalty": float,
}


@dataclass(frozen=True, slots=True)
class Options:
    """A checked command line.

    Attributes:
        raw: values that need no check, by the name of the option.
        base_url, endpoint: of the server.
        headers: of each request.
        body: fields of each request.
        goodput: most milliseconds by name of the metric.
        percentile_metrics: what to describe.
        percentiles: percents.
        metadata: what to write into the result.
    """

    raw: argparse.Namespace
    base_url: str
    endpoint: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    goodput: Mapping[str, float]
    percentile_metrics: Sequence[str]
    percentiles: Sequence[float]
    metadata: Mapping[str, str]

    @property
    def is_chat(self) -> bool:
        """Prompts are messages."""
        return bool(self.raw.backend == "openai-chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all options to `parser`."""
    _add_target(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_report(parser.add_argument_group("report"))


def _add_target(group: Any) -> None:
    group.add_argument(
        "--backend", choices=list(_ENDPOINTS), default="openai", help="form of the requests (default: openai)"
    )
    group.add_argument("--base-url", metavar="URL", help="of the server, instead of host and port")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="(default: %(default)s)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    group.add_argument(
        "--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="of each request"
    )
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument("--model", metavar="NAME", help="(default: the server's first model)")
    group.add_argument("--served-model-name", metavar="NAME", help="to ask for, if it is not that of --model")
    group.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json to measure prompts with (default: the server's)"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="wait so long for a first answer",
    )


def _add_dataset(group: Any) -> None:
    def number(name: str, default: int | None, text: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(name, type=int, default=default, metavar="N", help=text + shown)

    group.add_argument(
        "--dataset-name",
        choices=DATASET_NAMES,
        default="random",
        help="kind of prompts (default: %(default)s)",
    )
    number("--num-prompts", 1000, "requests")
    number("--seed", 0, "of prompts and arrival times")
    number("--input-len", None, "tokens of a prompt, for any dataset that asks for them")
    number("--output-len", None, "tokens of an answer, for any dataset")
    number("--random-input-len", 1024, "tokens of a prompt, without the prefix")
    number("--random-output-len", 128, "tokens of an answer")
    number("--random-prefix-len", 0, "tokens that all prompts begin with")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary by so large a share, 0 to 1",
    )
    number("--sharegpt-output-len", None, "tokens of each answer instead of lengths that are drawn")
    number("--prefix-repetition-prefix-len", 256, "tokens of a prefix")
    number("--prefix-repetition-suffix-len", 256, "tokens of a prompt after it")
    number("--prefix-repetition-num-prefixes", 10, "prefixes")
    number("--prefix-repetition-output-len", 128, "tokens of an answer")


def _add_traffic(group: Any) -> None:
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests/s (default: all at once)"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: more bursty; inf: even"
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most open requests (default: any number)"
    )
    group.add_argument("--ramp-up-strategy", choices=["linear", "exponential"], help="let the rate grow")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="requests/s of the first one")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="requests/s of the last one")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before, not measured"
    )


def _add_sampling(group: Any) -> None:
    for name, kind in _SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, metavar="X", help="(default: the server's)")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers have all the tokens asked for; always so with the dataset random",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help="further fields of each request, as a JSON object"
    )
    group.add_argument(
        "--request-id-prefix",
        metavar="TEXT",
        default=f"bench-{uuid.uuid4().hex[:8]}-",
        help="of the X-Request-Id (default: a random one)",
    )


def _add_report(group: Any) -> None:
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="LIST",
        help=f"what to describe, of {','.join(METRICS)} (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST", help="percents (default: %(default)s)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"objectives, of {', '.join(GOODPUT_METRICS)}",
    )
    group.add_argument("--save-result", action="store_true", help="write the figures to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with those of each request")
    group.add_argument("--append-result", action="store_true", help="add them to the file as one more line")
    group.add_argument("--result-dir", metavar="FOLDER", help="of the file")
    group.add_argument(
        "--result-filename", metavar="FILE", help="(default: made of label, rate, model and date)"
    )
    group.add_argument("--label", metavar="TEXT", help="of the result (default: the backend)")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="to write into the file"
    )


def check(arguments: argparse.Namespace, api_key: str | None) -> Options:
    """Checks a command line.

    Args:
        arguments: as parsed.
        api_key: to send, unless a header says otherwise.

    Raises:
        ConfigError: an option is wrong; names it.
    """
    _check_numbers(arguments)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    names = [name.strip() for name in arguments.percentile_metrics.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics: there is no {name}; choose of {', '.join(METRICS)}.")
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return Options(
        raw=arguments,
        base_url=(arguments.base_url or f"http://{host}:{arguments.port}").rstrip("/"),
        endpoint=arguments.endpoint or _ENDPOINTS[arguments.backend],
        headers=key | _pairs(arguments.header, "--header"),
        body=_body(arguments),
        goodput=_goodput(arguments.goodput),
        percentile_metrics=names,
        percentiles=_percentiles(arguments.metric_percentiles),
        metadata=_pairs(arguments.metadata, "--metadata"),
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    least = {"num_prompts": 1, "max_concurrency": 1, "num_warmups": 0, "prefix_repetition_num_prefixes": 1}
    lengths = [name for name in vars(arguments) if name.endswith("_len")]
    for name, bound in {**least, **dict.fromkeys(lengths, 0)}.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise ConfigError(f"{_flag(name)} must be at least {bound}.")
    for name in ("request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps"):
        value = getattr(arguments, name)
        if value is not None and not value > 0.0:
            raise ConfigError(f"{_flag(name)} must be more than 0.")
    if not 0.0 <= arguments.random_range_ratio < 1.0:
        raise ConfigError("--random-range-ratio must be at least 0 and less than 1.")
    if arguments.ramp_up_strategy is not None:
        if arguments.ramp_up_start_rps is None or arguments.ramp_up_end_rps is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        if not math.isinf(arguments.request_rate):
            raise ConfigError("--ramp-up-strategy and --request-rate exclude each other.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pairs(values: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, content = value.partition("=")
        if not equals or "\r" in value or "\n" in value:
            raise ConfigError(f"{option}: {name!r} has to be of the form NAME=VALUE, on one line.")
        pairs[name.strip()] = content.strip()
    return pairs


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [name.replace("-", "_") for name in _SAMPLING]
    body = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    for name, value in body.items():
        if not math.isfinite(value):
            raise ConfigError(f"{_flag(name)}: {value} is not a number to send.")
    # Random prompts are there to make work of a known size.
    if arguments.ignore_eos or arguments.dataset_name == "random":
        body["ignore_eos"] = True
    try:
        extra = json.loads(arguments.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}.") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body has to be a JSON object.")
    return body | extra


def _goodput(values: Sequence[str]) -> dict[str, float]:
    objectives = {}
    for value in values:
        name, _, most = value.partition(":")
        try:
            objectives[name] = float(most)
        except ValueError:
            raise ConfigError(f"--goodput: {value!r} has to be of the form NAME:MILLISECONDS.") from None
        if name not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput: there is no {name}; choose of {', '.join(GOODPUT_METRICS)}.")
        if not objectives[name] >= 0.0:
            raise ConfigError(f"--goodput: {name} must be at least 0.")
    return objectives


def _percentiles(text: str) -> list[float]:
    try:
        percents = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--metric-percentiles: {text!r} is no list of numbers.") from None
    if not all(0.0 <= percent <= 100.0 for percent in percents):
        raise ConfigError("--metric-percentiles: percents are between 0 and 100.")
    return percents
