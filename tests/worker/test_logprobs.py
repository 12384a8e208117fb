"""Log probabilities by the sampler's own account against float64, and which tokens come first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_driver import logprobs_of

from streamserve.messages import Logprobs
from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.logprobs import read_logprobs, top_tokens
from streamserve.worker.sampler import Sampled, Sampler
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def log_softmax(logits: np.ndarray) -> Any:
    """In float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def in_order(row: np.ndarray) -> list[int]:
    """Ids from the likeliest on, the smaller of equals first."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


@given(
    vocab=st.sampled_from([1, 2, 63, 64, 65, 128, 200, 1000, 4096, 5001]),
    count=st.sampled_from([0, 1, 2, 5, 20, 70, 5001]),
    num_values=st.sampled_from([1, 3, 50, 10**6]),
    seed=st.integers(0, 100),
)
@settings(max_examples=120, deadline=None)
def test_likeliest_tokens_in_order(vocab: int, count: int, num_values: int, seed: int) -> None:
    """Few different values make many ties; zeros come with either sign."""
    count = min(count, vocab)
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-num_values, num_values + 1, (3, vocab)) / 7).astype(np.float32)
    logits[0] *= rng.choice([-1, 1], vocab)
    logits[1, rng.random(vocab) < 0.5] = -np.inf
    ids = top_tokens(torch.tensor(logits), count)
    assert ids.tolist() == [in_order(row)[:count] for row in logits]


def test_broken_logits_give_valid_ids() -> None:
    for fill in (np.nan, -np.nan, np.inf, -np.inf):
        ids = top_tokens(torch.full((2, 3000), fill, dtype=torch.float32), 20)
        assert ((ids >= 0) & (ids < 3000)).all()
        assert len(set(ids[0].tolist())) == 20


@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 700), (70, 20_000), (4, 150_000)])
def test_values_are_log_softmax_in_float32(rows: int, vocab: int) -> None:
    rng = np.random.default_rng(rows)
    logits = rng.normal(0, 4, (rows, vocab)).astype(np.float32)
    token_ids = rng.integers(0, vocab, rows)
    on_device = read_logprobs(torch.tensor(logits), torch.tensor(token_ids), min(20, vocab))
    read = Logprobs(*(part.numpy() for part in on_device.tensors()))
    expected = log_softmax(logits)
    np.testing.assert_allclose(read.chosen, expected[np.arange(rows), token_ids], atol=3e-5)
    np.testing.assert_allclose(read.top, np.take_along_axis(expected, read.top_ids, 1), atol=3e-5)
    np.testing.assert_allclose(read.top, -np.sort(-expected)[:, :20], atol=3e-5)
    assert (np.diff(read.top) <= 0).all()
    assert [column.dtype for column in (read.chosen, read.top_ids, read.top)] == ["f4", "i4", "f4"]


def sample(logits: np.ndarray, params: list[SamplingParams]) -> Sampled:
    rows, vocab = logits.shape
    columns, pool = SamplingColumns(rows, vocab, (0,)), TokenPool(rows, 8, CPU)
    for slot, one in enumerate(params):
        columns.put(slot, one, 3)
        pool.write(slot, np.array([1, 2, 3, 4], dtype=np.int32))
    slots = np.arange(rows, dtype=np.int32)
    positions = np.full(rows, 4, dtype=np.int32)
    return Sampler(columns, pool, vocab, CPU).sample(torch.tensor(logits), slots, positions)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.7, "top_p": 0.3},
    {"temperature": 0.5, "repetition_penalty": 2.0, "logit_bias": ((8, 100.0),)},
    {"temperature": 0.0, "allowed_token_ids": TokenSet.of((5, 6)), "min_tokens": 9, "presence_penalty": 2.0},
]


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[1:2], KINDS[2:]], ids=len)
def test_they_are_those_before_rules_and_temperature(kinds: list[dict[str, Any]]) -> None:
    wanted = [0, None, 5, 2, 20, None]
    params = [
        SamplingParams(max_tokens=99, seed=i, logprobs=num_top, **kind)
        for i, (num_top, kind) in enumerate((n, kind) for n in wanted for kind in kinds)
    ]
    logits = np.random.default_rng(0).normal(0, 2, (len(params), 900)).astype(np.float32)
    without = [SamplingParams(max_tokens=99, seed=i, **kinds[i % len(kinds)]) for i in range(len(params))]
    sampled = sample(logits, params)
    assert sampled.token_ids.tolist() == sample(logits, without).token_ids.tolist()
    logprobs = logprobs_of(sampled)
    assert logprobs is not None
    assert logprobs.top.shape == logprobs.top_ids.shape == (len(params), 20)
    expected = log_softmax(logits)
    for row, one in enumerate(params):
        if one.logprobs is not None:
            top_ids = logprobs.top_ids[row, : one.logprobs]
            assert top_ids.tolist() == in_order(logits[row])[: one.logprobs]
            chosen = expected[row, sampled.token_ids[row]]
            np.testing.assert_allclose(logprobs.chosen[row], chosen, atol=1e-5)
            np.testing.assert_allclose(logprobs.top[row, : one.logprobs], expected[row, top_ids], atol=1e-5)


def test_nobody_asks_nobody_is_told() -> None:
    logits = np.zeros((2, 30), dtype=np.float32)
    params = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, repetition_penalty=2.0)]
    assert logprobs_of(sample(logits, params)) is None


def test_no_top_tokens_and_more_than_there_are() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (2, 30)).astype(np.float32)
    for asked, width in ((0, 0), (30, 30), (1000, 30)):
        params = [SamplingParams(max_tokens=9, temperature=0.0, logprobs=asked)] * 2
        logprobs = logprobs_of(sample(logits, params))
        assert logprobs is not None
        assert logprobs.top.shape == logprobs.top_ids.shape == (2, width)
        np.testing.assert_allclose(logprobs.chosen, log_softmax(logits).max(-1), atol=1e-5)


def test_a_greedy_token_is_the_first_of_equals() -> None:
    """As half-precision logits often are."""
    logits = np.random.default_rng(0).integers(0, 3, (40, 2000)).astype(np.float32)
    sampled = sample(logits, [SamplingParams(max_tokens=9, temperature=0.0, logprobs=4)] * 40)
    logprobs = logprobs_of(sampled)
    assert logprobs is not None
    assert logprobs.top_ids[:, 0].tolist() == sampled.token_ids.tolist()
