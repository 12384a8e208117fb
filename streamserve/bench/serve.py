"""`streamserve bench serve`, from a checked command line to the exit code."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from tqdm import tqdm

from streamserve.bench import report
from streamserve.bench.arrivals import RampUp, arrival_times
from streamserve.bench.connection import ConnectionPool
from streamserve.bench.datasets import Dataset, PrefixRepetition, RandomLengths, Sample, make_samples
from streamserve.bench.http import Address
from streamserve.bench.metrics import calculate
from streamserve.bench.options import Options
from streamserve.bench.run import Form, Sender, run, wait_ready
from streamserve.bench.server import first_model, special_tokens, word_costs
from streamserve.bench.timing import Clock, Outcome
from streamserve.bench.words import Costs, TextMaker, costs_by
from streamserve.errors import ConfigError, RequestFailed

_SHOWN_ERRORS = 10
_INTERRUPTED = 130


def serve(options: Options, clock: Clock = time.perf_counter) -> int:
    """Measures the server, prints the figures and returns the exit code: 1 if no request succeeded.

    Ctrl-C ends the run; the figures are then of the requests that were answered, and are not written.

    Raises:
        ConfigError: an option is wrong, or a file cannot be read or written.
        RequestFailed: the server cannot be reached, or answers nothing.
    """
    raw = options.raw
    address = Address.of(options.base_url, options.endpoint)
    with httpx.Client(
        base_url=options.base_url,
        headers=options.headers,
        verify=not raw.insecure,
        timeout=30.0,
        trust_env=False,
    ) as client:
        model = raw.model or first_model(client)
        cut = _cut(raw.tokenizer, client, raw.served_model_name or model)
    samples = make_samples(_dataset(options, cut.num_special), TextMaker(cut.costs))
    form = Form(options.is_chat, raw.served_model_name or model, options.body)
    say(f"{len(samples)} requests to {options.base_url}{options.endpoint}, model {model}")
    _allow_connections()
    ended: list[Outcome] = []
    is_whole = True
    try:
        outcomes, duration_s = uvloop.run(_measure(options, address, form, samples, clock, ended=ended))
    except KeyboardInterrupt:
        if not ended:
            raise
        is_whole = False
        outcomes, duration_s = ended, clock() - min(each.start_time - each.queue_time for each in ended)
        say(f"Ended by Ctrl-C: these are the figures of {len(ended)} requests of {len(samples)}.")
    metrics = calculate(outcomes, duration_s, options.percentiles, options.goodput)
    result = report.Result(model, cut.tokenizer, outcomes, duration_s, metrics, datetime.now().astimezone())
    for number, outcome in enumerate([each for each in outcomes if not each.is_success][:_SHOWN_ERRORS]):
        say(f"Error {number}: {outcome.error}")
    print(report.table(options, result), flush=True)
    if not is_whole:
        return _INTERRUPTED
    if path := report.save(options, result):
        say(f"written: {path}")
    return 0 if metrics.completed else 1


def _allow_connections() -> None:
    """Lets this process have as many connections as the system allows: usually 1,024 unless it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A few systems name a limit that they do not grant.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def say(text: str) -> None:
    """Tells on stderr how things go."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How prompts become tokens: what words cost, what is added to each prompt, and who says so."""

    costs: Costs
    num_special: int
    tokenizer: str


def _cut(tokenizer: str | None, client: httpx.Client, model: str) -> _Cut:
    if tokenizer is None:
        costs = word_costs(client, model, lambda text: say(f"{text} (see --tokenizer)"))
        return _Cut(costs, special_tokens(client, model), model)
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded: Any = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # The library raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"--tokenizer: cannot read {path}: {error}") from error
    costs = costs_by(lambda text: len(loaded.encode(text, add_special_tokens=False).ids))
    return _Cut(costs, loaded.num_special_tokens_to_add(False), tokenizer)


def _dataset(options: Options, num_special: int) -> Dataset:
    raw = options.raw

    def first(*values: int | None) -> int:
        return next(value for value in values if value is not None)

    return Dataset(
        name=raw.dataset_name,
        num_prompts=raw.num_prompts,
        seed=raw.seed,
        random=RandomLengths(
            # The length that is asked for is what the server counts.
            max(first(raw.input_len, raw.random_input_len) - num_special, 0),
            first(raw.output_len, raw.random_output_len),
            raw.random_range_ratio,
            raw.random_prefix_len,
        ),
        prefixes=PrefixRepetition(
            raw.prefix_repetition_prefix_len,
            raw.prefix_repetition_suffix_len,
            raw.prefix_repetition_num_prefixes,
            first(raw.output_len, raw.prefix_repetition_output_len),
        ),
        sharegpt_output_len=raw.sharegpt_output_len if raw.output_len is None else raw.output_len,
    )


async def _measure(
    options: Options,
    address: Address,
    form: Form,
    samples: Sequence[Sample],
    clock: Clock,
    *,
    ended: list[Outcome],
) -> tuple[list[Outcome], float]:
    raw = options.raw
    ramp_up = None
    if raw.ramp_up_strategy is not None:
        ramp_up = RampUp(raw.ramp_up_strategy, raw.ramp_up_start_rps, raw.ramp_up_end_rps)
    rng = np.random.default_rng(raw.seed)
    times = arrival_times(len(samples), raw.request_rate, raw.burstiness, rng, ramp_up)
    async with ConnectionPool(address, options.headers, clock, verifies=not raw.insecure) as pool:
        await _warm_up(options, Sender(pool, form, clock), samples)
        # In a log each state of the bar stays.
        interval_s = 0.1 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=len(samples),
            disable=raw.disable_tqdm,
            file=sys.stderr,
            unit="req",
            mininterval=interval_s,
            maxinterval=interval_s,
        ) as bar:

            def on_end(outcome: Outcome) -> None:
                ended.append(outcome)
                bar.update()

            sender = Sender(pool, form, clock, raw.request_id_prefix)
            return await run(sender, samples, times, raw.max_concurrency, on_end=on_end)


async def _warm_up(options: Options, sender: Sender, samples: Sequence[Sample]) -> None:
    raw = options.raw
    if raw.ready_check_timeout_sec > 0.0:
        problem = await wait_ready(sender, samples[0], raw.ready_check_timeout_sec)
        if problem:
            raise RequestFailed(f"{options.base_url}{options.endpoint} gives no answer: {problem}")
    if raw.num_warmups:
        chosen = [samples[0]] * raw.num_warmups
        await run(sender, chosen, [0.0] * len(chosen), raw.max_concurrency, on_end=lambda _: None)
