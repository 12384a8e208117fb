"""Masks, bias and penalties against a float64 reference that goes through the tokens one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_driver import logprobs_of

from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.logit_rules import LogitRules
from streamserve.worker.penalties import OccurrenceCounter
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
VOCAB = 40
EOS = (2, 0)


class Request:
    """Known tokens and how to sample the next one."""

    def __init__(
        self,
        tokens: list[int],
        num_prompt: int,
        allowed_token_ids: tuple[int, ...] | None = None,
        **params: Any,
    ) -> None:
        self.tokens, self.num_prompt, self.allowed = tokens, num_prompt, allowed_token_ids
        allowed = None if allowed_token_ids is None else TokenSet.of(allowed_token_ids)
        settings = {"temperature": 0.0, **params}
        self.params = SamplingParams(max_tokens=1000, allowed_token_ids=allowed, **settings)


def reference(raw: np.ndarray, request: Request, eos: tuple[int, ...] = EOS) -> Any:
    """float64[v] after allowed ids, bad words, min_tokens, bias, repetition, frequency and presence."""
    params, tokens = request.params, request.tokens
    vocab = len(raw)
    logits = raw.astype(np.float64)
    if request.allowed is not None:
        for token in range(vocab):
            if token not in request.allowed:
                logits[token] = -np.inf
    for word in params.bad_words:
        begin = list(word[:-1])
        if word[-1] < vocab and (not begin or tokens[-len(begin) :] == begin):
            logits[word[-1]] = -np.inf
    output = tokens[request.num_prompt :]
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            if token < vocab:
                logits[token] = -np.inf
    if (logits == -np.inf).all():
        logits[eos[0] if eos else raw.argmax()] = 0.0
    for token, bias in params.logit_bias:
        if token < vocab:
            logits[token] += bias
    for token in set(tokens):
        positive = logits[token] > 0
        logits[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


class Rig:
    """Requests in slots of their own, in a mixed-up order."""

    def __init__(
        self, requests: list[Request], vocab: int = VOCAB, eos: tuple[int, ...] = EOS, seed: int = 0
    ) -> None:
        self.requests, self.vocab = requests, vocab
        num_slots = len(requests) + 2
        self.slots = np.random.default_rng(seed).permutation(num_slots)[: len(requests)].astype(np.int32)
        self.columns = SamplingColumns(num_slots, vocab, eos)
        self.pool = TokenPool(num_slots, 256, CPU)
        self.rules = LogitRules(self.columns, self.pool, vocab)
        self.sampler = Sampler(self.columns, self.pool, vocab, CPU)
        for slot in range(num_slots):
            # What a slot held before must not matter.
            self.pool.write(slot, np.arange(200, dtype=np.int32) % vocab)
        for slot, request in zip(self.slots.tolist(), requests, strict=True):
            self.put(slot, request)

    def put(self, slot: int, request: Request) -> None:
        self.columns.put(slot, request.params, request.num_prompt)
        self.pool.write(slot, np.array(request.tokens, dtype=np.int32))

    @property
    def positions(self) -> Any:
        return np.array([len(request.tokens) for request in self.requests], dtype=np.int32)

    def apply(self, raw: np.ndarray) -> Any:
        logits = torch.tensor(raw, dtype=torch.float32)
        self.rules.apply(logits, self.slots, self.positions)
        return logits.numpy()

    def sample(self, raw: np.ndarray) -> Any:
        logits = torch.tensor(raw, dtype=torch.float32)
        return self.sampler.sample(logits, self.slots, self.positions)

    def check(self, raw: np.ndarray) -> None:
        result = self.apply(raw)
        eos = self.columns.eos_token_ids
        expected = np.stack(
            [reference(row, request, eos) for row, request in zip(raw, self.requests, strict=True)]
        )
        np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-5)


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


TOKENS = [5, 6, 7, 8, 6, 7, 5, 9, 9, 9, 6, 7]
SETTINGS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 0.4, "frequency_penalty": -0.2, "repetition_penalty": 1.1},
    {"logit_bias": ((5, 100.0), (11, -100.0), (6, 0.5))},
    {"bad_words": ((3,), (6, 7, 8), (7, 5), (9, 7, 5), (6, 7, 30), (8, 31))},
    {"allowed_token_ids": (4, 5, 6, 39)},
    {"min_tokens": 7, "stop_token_ids": (11, 12)},
    {"min_tokens": 6, "stop_token_ids": (11, 12)},
    {
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": ((5, -3.0), (8, 4.0), (20, 1.0)),
        "bad_words": ((6, 7, 8), (21,)),
        "allowed_token_ids": (2, 5, 6, 7, 8, 20, 21),
        "min_tokens": 20,
    },
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("num_prompt", [12, 6])
def test_one_request(params: dict[str, Any], num_prompt: int) -> None:
    Rig([Request(TOKENS, num_prompt, **params)]).check(logits_of(1))


def test_all_in_one_batch_with_plain_rows_untouched() -> None:
    requests = [Request(TOKENS, 6, **params) for params in SETTINGS]
    for index in (0, 3, 8, len(requests)):
        requests.insert(index, Request(TOKENS[: index + 1], 1, temperature=0.5))
    raw = logits_of(len(requests))
    rig = Rig(requests)
    rig.check(raw)
    result = rig.apply(raw)
    for row, request in enumerate(requests):
        if rig.columns.is_plain[rig.slots[row]]:
            assert request.params.temperature == 0.5
            assert result[row].tobytes() == raw[row].tobytes()


token_ids = st.integers(0, VOCAB - 1)
few_ids = st.integers(3, 9)
rule_sets = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 5),
        "logit_bias": st.lists(
            st.tuples(st.integers(0, VOCAB + 5), st.floats(-100, 100)), max_size=5, unique_by=lambda b: b[0]
        ).map(tuple),
        "bad_words": st.lists(
            st.lists(few_ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6
        ).map(tuple),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB + 5), min_size=1, max_size=8).map(tuple),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.integers(0, VOCAB + 5), max_size=3).map(tuple),
    },
)


@st.composite
def any_requests(draw: st.DrawFn) -> list[Request]:
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.one_of(few_ids, token_ids), min_size=1, max_size=25))
        num_prompt = draw(st.integers(1, len(tokens)))
        requests.append(Request(tokens, num_prompt, **draw(rule_sets)))
    return requests


@given(requests=any_requests(), seed=st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_any_mixture(requests: list[Request], seed: int) -> None:
    Rig(requests, seed=seed).check(logits_of(len(requests), seed=seed))


@given(requests=any_requests(), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_kept_bindings_follow_growth_and_reuse(requests: list[Request], seed: int) -> None:
    """The same rows again with a token more each, then with one slot in other hands."""
    rig = Rig(requests, seed=seed)
    for step in range(3):
        rig.check(logits_of(len(requests), seed=step))
        for slot, request in zip(rig.slots.tolist(), requests, strict=True):
            request.tokens.append(3 + step)
            rig.pool.write(slot, np.array(request.tokens, dtype=np.int32))
    requests[0] = Request([7, 7, 8], 1, frequency_penalty=0.25, bad_words=((8, 4),))
    rig.put(int(rig.slots[0]), requests[0])
    rig.check(logits_of(len(requests), seed=4))
    requests[0] = Request([7, 7, 8], 1)
    rig.put(int(rig.slots[0]), requests[0])
    rig.check(logits_of(len(requests), seed=5))
    rig.slots, rig.requests = rig.slots[::-1].copy(), requests[::-1]
    rig.check(logits_of(len(requests), seed=6))


def test_bad_words_that_share_their_last_token() -> None:
    """A word that is not hit must not free what another one masks, in either order."""
    hit, missed = (6, 7, 30), (7, 6, 30)
    for words in ((hit, missed), (missed, hit), (missed, (30,)), ((30,), missed)):
        result = Rig([Request(TOKENS, 12, bad_words=words)]).apply(logits_of(1))
        assert (result[0] == -np.inf).nonzero()[0].tolist() == [30]


def test_a_bad_word_longer_than_the_request() -> None:
    """Its beginning would reach over the start of the row, where another slot's tokens are."""
    word = (39, 0, 1, 5, 6, 7)
    rig = Rig([Request([5, 6], 2, bad_words=(word, (5, 6, 8)))])
    assert (rig.apply(logits_of(1))[0] == -np.inf).nonzero()[0].tolist() == [8]


RANDOM_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.5, "top_k": 30, "top_p": 0.5},
]
FORBIDDING: list[dict[str, Any]] = [
    {"allowed_token_ids": (7,), "bad_words": ((7,),)},
    {"allowed_token_ids": (VOCAB, VOCAB + 1)},
    {"allowed_token_ids": (2,), "min_tokens": 50},
    {"min_tokens": 50, "stop_token_ids": tuple(range(VOCAB))},
    {"bad_words": tuple((token,) for token in range(VOCAB))},
    {"allowed_token_ids": (9,), "bad_words": ((6, 7, 9),), "logit_bias": ((9, 100.0),)},
]


@pytest.mark.parametrize("randomness", RANDOM_SETTINGS, ids=str)
@pytest.mark.parametrize("rules", FORBIDDING, ids=" ".join)
def test_masks_that_leave_nothing(rules: dict[str, Any], randomness: dict[str, Any]) -> None:
    """End of sequence, else the likeliest token; the rows beside it are as they would be without it."""
    requests = [
        Request(TOKENS, 12, seed=1, **rules, **randomness),
        Request(TOKENS, 12, seed=2, **randomness),
        Request(TOKENS, 12, seed=3, presence_penalty=1.0, logprobs=3, **randomness),
    ]
    raw = logits_of(3)
    sampled = Rig(requests).sample(raw)
    assert sampled.token_ids[0] == EOS[0]
    assert np.isfinite(logprobs_of(sampled).top[2]).all()
    assert sampled.token_ids[1:].tolist() == Rig(requests[1:]).sample(raw[1:]).token_ids.tolist()
    if "min_tokens" not in rules:
        assert Rig(requests, eos=()).sample(raw).token_ids[0] == raw[0].argmax()


@pytest.mark.parametrize("randomness", RANDOM_SETTINGS, ids=str)
def test_a_single_allowed_token_is_always_taken(randomness: dict[str, Any]) -> None:
    request = Request(TOKENS, 12, allowed_token_ids=(33, 33, VOCAB), repetition_penalty=9.0, **randomness)
    for seed in range(10):
        assert Rig([request]).sample(logits_of(1, seed=seed)).token_ids.tolist() == [33]


@pytest.mark.parametrize("randomness", RANDOM_SETTINGS, ids=str)
@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 1e-38, 1e38, 1e300])
def test_the_oddest_penalties_give_no_nan(repetition: float, randomness: dict[str, Any]) -> None:
    raw = logits_of(2)
    raw[1] = 0.0
    rules = {"repetition_penalty": repetition, "presence_penalty": 2.0, "frequency_penalty": -2.0}
    rig = Rig([Request(TOKENS, 6, **rules, **randomness)] * 2)
    assert np.isfinite(rig.apply(raw)).all()
    assert ((rig.sample(raw).token_ids >= 0) & (rig.sample(raw).token_ids < VOCAB)).all()


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    """Admission refuses them; were one to come through all the same, no other row may feel it."""
    params: dict[str, Any] = {
        "logit_bias": ((VOCAB, 5.0), (VOCAB + 3, -5.0), (-1, 5.0)),
        "bad_words": ((VOCAB,), (6, 7, VOCAB + 3), (2**31 - 1, 8), (-5, 9), (-1,)),
        "stop_token_ids": (VOCAB, -3),
    }
    raw = logits_of(3)
    rig = Rig([Request(TOKENS, 6, **params), Request(TOKENS, 6), Request(TOKENS, 6)])
    assert rig.apply(raw).tobytes() == raw.tobytes()


def test_penalised_rows_among_draws_of_every_kind() -> None:
    """Adding rules to some rows changes no token of the others."""
    kinds = [dict(one) for one in RANDOM_SETTINGS]
    plain = [Request(TOKENS, 6, seed=seed, **kinds[seed % len(kinds)]) for seed in range(15)]
    ruled = [
        Request(TOKENS, 6, seed=50 + i, **{**rules, **kinds[i % len(kinds)]})
        for i, rules in enumerate(SETTINGS)
    ]
    raw = logits_of(len(plain) + len(ruled))
    alone = Rig(plain).sample(raw[: len(plain)]).token_ids.tolist()
    assert Rig(plain + ruled).sample(raw).token_ids.tolist()[: len(plain)] == alone


def test_rules_ask_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a GPU would wait until all it has been given is done."""
    rig = Rig([Request(TOKENS, 6, **params) for params in SETTINGS])
    logits = torch.tensor(logits_of(len(SETTINGS)))

    def forbidden(*_: object) -> None:
        raise AssertionError("synchronised")

    # numpy() is none: it refuses what is not on the host.
    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    for _ in range(2):
        rig.rules.apply(logits, rig.slots, rig.positions)
    rig.sampler.sample(logits, rig.slots, rig.positions)


def test_counter_forgets() -> None:
    counter = OccurrenceCounter(CPU)
    assert counter.count(torch.tensor([3, 1, 3, 3, 0]), 4).tolist() == [3, 1, 3, 3, 1]
    assert counter.count(torch.tensor([3, 9, 9]), 10).tolist() == [1, 2, 2]
    assert counter.count(torch.tensor([9, 0]), 10).tolist() == [1, 1]
    assert counter.count(torch.tensor([], dtype=torch.int64), 10).tolist() == []
