"""What is sent and when: arrival times, lengths and prompts."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean
from typing import Any

import httpx
import numpy as np
import pytest

from streamserve.bench.arrivals import RampUp, arrival_times
from streamserve.bench.datasets import (
    DATASETS,
    SHAREGPT_MOST_TOKENS,
    Dataset,
    PrefixRepetition,
    RandomLengths,
    make_samples,
    sharegpt_lengths,
)
from streamserve.bench.names import DATASET_NAMES
from streamserve.bench.server import special_tokens
from streamserve.bench.words import WORDS, TextMaker, costs_by


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def gaps(times: list[float]) -> np.ndarray:
    return np.diff([0.0, *times])


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, rng()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_the_last_one_comes_when_the_rate_says(burstiness: float) -> None:
    times = arrival_times(2000, 10.0, burstiness, rng())
    assert times[-1] == pytest.approx(200.0)
    assert times == sorted(times)
    # A gamma distribution's coefficient of variation.
    varied = gaps(times)
    assert varied.std() / varied.mean() == pytest.approx(1 / math.sqrt(burstiness), abs=0.1)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10.0))])
def test_a_rate_that_grows(strategy: str, middle: float) -> None:
    ramp_up = RampUp(strategy, 1.0, 10.0)
    rates = 1.0 / gaps(arrival_times(101, math.inf, math.inf, rng(), ramp_up))
    assert rates[0] == pytest.approx(1.0)
    assert rates[50] == pytest.approx(middle)
    assert rates[100] == pytest.approx(10.0)


def count(text: str) -> int:
    """A tokenizer that knows a word by its first three letters and the rest by letter."""
    return sum(1 + max(len(word) - 3, 0) for word in text.split())


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 1000])
def test_text_has_the_tokens_asked_for(num_tokens: int) -> None:
    text = TextMaker(costs_by(count)).make(num_tokens, random.Random(0))
    assert count(text) == num_tokens
    assert set(text.split()) <= set(WORDS)


def test_text_is_never_longer_than_asked_for() -> None:
    assert TextMaker(dict.fromkeys(WORDS, 3)).make(8, random.Random(0)).count(" ") == 2
    assert TextMaker(dict.fromkeys(WORDS, 3)).make(2, random.Random(0)) == ""


@pytest.mark.parametrize(
    ("answer", "num_special"),
    [
        (lambda body: {"tokens": [1] * (3 if body["add_special_tokens"] else 2)}, 1),
        (lambda body: {"tokens": [7, 8]}, 0),
        (lambda body: {"error": "no"}, 0),
    ],
)
def test_what_the_server_adds_to_a_prompt(answer: Any, num_special: int) -> None:
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, json=answer(json.loads(request.content)))
    )
    with httpx.Client(base_url="http://x", transport=transport) as client:
        assert special_tokens(client, "m") == num_special


def samples_of(name: str, **more: object) -> list[tuple[str, int, int]]:
    dataset = Dataset(name, num_prompts=200, seed=3, **more)
    samples = make_samples(dataset, TextMaker(costs_by(count)))
    assert samples == make_samples(dataset, TextMaker(costs_by(count)))
    assert [count(sample.prompt) for sample in samples] == [sample.prompt_len for sample in samples]
    return [(sample.prompt, sample.prompt_len, sample.output_len) for sample in samples]


def test_the_command_line_offers_the_datasets_there_are() -> None:
    assert set(DATASETS) == set(DATASET_NAMES)


def test_random_lengths_vary_evenly_about_the_mean() -> None:
    lengths = RandomLengths(input_len=100, output_len=10, range_ratio=0.5, prefix_len=20)
    samples = samples_of("random", random=lengths)
    prompts = [length for _, length, _ in samples]
    assert min(prompts) >= 70
    assert max(prompts) <= 170
    assert fmean(prompts) == pytest.approx(120, abs=6)
    assert {length for _, _, length in samples} == set(range(5, 16))
    assert len({prompt[:30] for prompt, _, _ in samples}) == 1


def test_fixed_lengths_are_exact() -> None:
    samples = samples_of("random", random=RandomLengths(input_len=64, output_len=8))
    assert {(length, output) for _, length, output in samples} == {(64, 8)}


def test_lengths_are_like_sharegpts() -> None:
    source = random.Random(5)
    lengths = [sharegpt_lengths(source) for _ in range(5000)]
    # What is cut off at the long end lowers the means by about a tenth.
    assert fmean(prompt for prompt, _ in lengths) == pytest.approx(145, rel=0.1)
    assert fmean(output for _, output in lengths) == pytest.approx(320, rel=0.1)
    assert max(prompt + output for prompt, output in lengths) <= SHAREGPT_MOST_TOKENS


def test_answers_of_a_fixed_length() -> None:
    assert {output for _, _, output in samples_of("sharegpt-like", sharegpt_output_len=5)} == {5}


def test_prefixes_are_repeated() -> None:
    lengths = PrefixRepetition(prefix_len=100, suffix_len=20, num_prefixes=4, output_len=7)
    samples = samples_of("prefix_repetition", prefixes=lengths)
    assert len({prompt[:60] for prompt, _, _ in samples}) == 4
    assert len({prompt for prompt, _, _ in samples}) == 200
    assert {(length, output) for _, length, output in samples} == {(120, 7)}
