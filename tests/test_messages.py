"""Frames that carry requests: all that goes in comes out, and what many share is there once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamserve.messages import AddRequest, decode_add, encode_add
from streamserve.sampling import SamplingParams, TokenSet

NUM_TOKENS = 150_000
token_ids = st.integers(0, NUM_TOKENS - 1)


def through(request: AddRequest) -> AddRequest:
    return decode_add(memoryview(b"".join(encode_add(7, request))))


def request_of(params: SamplingParams, **fields: Any) -> AddRequest:
    return AddRequest(5, np.array([1, 2, 3], dtype=np.int32), 3, params, [b"h" * 16], **fields)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "stop_token_ids": st.lists(token_ids, max_size=3).map(tuple),
            "logit_bias": st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=3).map(tuple),
            "bad_words": st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(
                tuple
            ),
            "allowed_token_ids": st.sets(token_ids, min_size=1).map(sorted).map(TokenSet.of),
            "presence_penalty": st.floats(-2, 2),
            "logprobs": st.integers(0, 20),
        },
    ),
    st.sampled_from(["", "team"]),
)
def test_a_request_comes_out_as_it_went_in(params: dict[str, Any], tenant: str) -> None:
    sent = request_of(SamplingParams(9, **params), tenant=tenant)
    found = through(sent)
    assert found.params == sent.params
    assert (found.tenant, found.cache_salt, list(found.block_hashes)) == (tenant, "", [b"h" * 16])
    assert found.tokens.tolist() == [1, 2, 3]


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_what_engines_before_did_of_it_goes_along(
    ignores_eos: bool, has_run: bool, is_suspect: bool, num_prompt: int
) -> None:
    params = SamplingParams(9, ignore_eos=ignores_eos)
    sent = request_of(params, has_run=has_run, is_suspect=is_suspect)
    found = through(replace(sent, num_prompt=num_prompt, block_hashes=()))
    assert (found.has_run, found.is_suspect, found.params.ignore_eos) == (has_run, is_suspect, ignores_eos)
    assert (found.tokens.tolist(), found.num_prompt) == ([1, 2, 3], num_prompt)


@given(st.lists(token_ids))
def test_a_set_of_tokens_is_its_tokens(ids: list[int]) -> None:
    tokens = TokenSet.of(ids)
    assert tokens.ids().tolist() == sorted(set(ids))
    assert bool(tokens) == bool(ids)


def test_a_request_that_allows_nearly_everything_is_small() -> None:
    everything = TokenSet.of(range(NUM_TOKENS))
    frame = b"".join(encode_add(7, request_of(SamplingParams(9, allowed_token_ids=everything))))
    assert len(frame) < NUM_TOKENS / 7


def test_requests_with_the_same_lists_share_them() -> None:
    lists = {
        "logit_bias": ((5, 1.0), (6, 2.0)),
        "bad_words": ((1, 2),),
        "allowed_token_ids": TokenSet.of([1, 9]),
    }
    one, other = (through(request_of(SamplingParams(9, seed=seed, **lists))).params for seed in (1, 2))
    assert (one.seed, other.seed) == (1, 2)
    for name, sent in lists.items():
        assert getattr(one, name) is getattr(other, name)
        assert getattr(one, name) == sent
