"""StepPacer against a machine whose speed is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.pacing import MIN_CHUNK, UNNOTICED_S, StepPacer
from streamserve.engine.scheduler.output import StepMix
from streamserve.engine.scheduler.sharing import UNPACED


def mix(decodes=0, prompt=0, document=0):
    return StepMix(decodes + prompt + document, decodes, prompt, document)


def read_document(pacer, decode_s, token_s, num_steps):
    """Runs steps of a machine where these are the costs; how many seconds in all, and tokens of each step."""
    chunks, total = [], 0.0
    for _ in range(num_steps):
        chunk = pacer.pace().document_tokens
        seconds = decode_s + chunk * token_s
        pacer.record(seconds, mix(1, 0, chunk))
        chunks.append(chunk)
        total += seconds
    return total, chunks


@given(
    decode_s=st.floats(1e-4, 1.0),
    cost=st.floats(1e-3, 10.0),
    share=st.floats(0.1, 0.9),
)
def test_documents_take_their_share_of_the_time(decode_s, cost, share):
    pacer = StepPacer(share)
    pacer.record(decode_s, mix(1))
    token_s = cost * decode_s
    total, _ = read_document(pacer, decode_s, token_s, 2000)
    # From some state on, so that the first measurements and the last chunk do not count.
    total, chunks = read_document(pacer, decode_s, token_s, 4000)
    spent = sum(chunks) * token_s
    most = max(chunks) * token_s
    assert spent <= share * total + most
    longest_s = max(decode_s, UNNOTICED_S)
    if token_s * MIN_CHUNK <= longest_s:
        # A chunk takes no longer than the step would without it, or than anybody notices.
        assert most <= longest_s * 1.01
    assert spent >= 0.5 * min(share * total, 4000 * decode_s) - most


def test_the_share_is_met_where_a_chunk_is_dear():
    pacer = StepPacer(0.4)
    pacer.record(1.0, mix(1))
    total, chunks = read_document(pacer, 1.0, 1.0, 10_000)
    # A decode step a second alone; 60 % of that beside the document.
    assert 10_000 / total == pytest.approx(0.6, rel=0.05)
    assert set(chunks) == {0, MIN_CHUNK}


def test_without_limits_there_is_no_pace():
    pacer = StepPacer(1.0, 0.0)
    pacer.record(1.0, mix(1))
    pacer.record(9.0, mix(1, 100, 100))
    assert pacer.pace() == UNPACED


def test_a_document_among_short_prompts_goes_on():
    pacer = StepPacer(0.4)
    num_tokens = 0
    for _ in range(1000):
        chunk = pacer.pace().document_tokens
        # Somebody always reads a prompt, so no step shows what decoding costs.
        pacer.record(1.0 + chunk * 0.01, mix(1, 5, chunk))
        num_tokens += chunk
    assert num_tokens >= 1000 * MIN_CHUNK


def test_credit_does_not_pile_up():
    pacer = StepPacer(0.4)
    pacer.record(1.0, mix(1, 0, MIN_CHUNK))
    for _ in range(1000):
        pacer.record(1.0, mix(1))
    pacer.record(1.0 + MIN_CHUNK * 0.5, mix(1, 0, MIN_CHUNK))
    assert pacer.pace().document_tokens == 0


def test_documents_alone_cost_nobody_anything():
    pacer = StepPacer(0.4)
    pacer.record(1.0, mix(1))
    pacer.record(1.0, mix(1, 0, MIN_CHUNK))
    before = pacer.pace()
    pacer.record(100.0, mix(0, 0, 500))
    assert pacer.pace() == before


def read_prompts(pacer, decode_s, token_s, num_steps=40):
    """Steps with as much of prompts as may be; the last one's seconds."""
    for _ in range(num_steps):
        # A step that is to measure decoding has no prompts in it.
        while (chunk := pacer.pace().prompt_tokens) == 0:
            pacer.record(decode_s, mix(4))
        seconds = decode_s + chunk * token_s
        pacer.record(seconds, mix(4, chunk))
    return seconds


@given(
    decode_s=st.floats(1e-4, 1.0),
    token_s=st.floats(1e-6, 5e-3),
    slowness=st.floats(0.5, 100.0),
    limit_s=st.floats(0.05, 1.0),
)
def test_prompts_keep_a_step_within_its_limit(decode_s, token_s, slowness, limit_s):
    pacer = StepPacer(1.0, limit_s)
    # The first prompt of a start is slower than any later one.
    pacer.record(slowness * token_s * 20, mix(0, 20))
    pacer.record(decode_s, mix(4))
    longest_s = max(limit_s, 3 * decode_s)
    last_s = read_prompts(pacer, decode_s, token_s)
    assert last_s <= max(longest_s, decode_s + MIN_CHUNK * token_s) * 1.01
    # And it is used.
    assert last_s >= 0.8 * longest_s - 2 * token_s


def test_a_machine_that_has_become_slower_is_noticed():
    pacer = StepPacer(1.0, 0.25)
    pacer.record(0.02, mix(0, 20))
    pacer.record(0.02, mix(4))
    assert read_prompts(pacer, 0.02, 0.001) == pytest.approx(0.25, rel=0.02)
    assert read_prompts(pacer, 0.02, 0.010, 10) == pytest.approx(0.25, rel=0.15)
    # That decoding takes longer is not known until it is measured again; the limit is held all the same.
    assert read_prompts(pacer, 0.10, 0.005, 15) == pytest.approx(0.25, rel=0.15)
    assert read_prompts(pacer, 0.10, 0.005) == pytest.approx(0.30, rel=0.05)


def test_one_step_that_was_measured_too_short_brings_no_long_one():
    pacer = StepPacer(1.0, 0.25)
    pacer.record(0.05, mix(4))
    read_prompts(pacer, 0.05, 0.002)
    chunk = pacer.pace().prompt_tokens
    pacer.record(0.0, mix(4, chunk))
    assert pacer.pace().prompt_tokens <= 2 * chunk


def test_prompts_that_seem_to_cost_nothing_do_for_ever():
    pacer = StepPacer(1.0, 0.25)
    pacer.record(0.5, mix(4))
    # A step that took less than decoding alone is thought to.
    pacer.record(0.1, mix(4, MIN_CHUNK))
    for _ in range(2000):
        pacer.record(0.5, mix(4))
    assert pacer.pace().prompt_tokens < 2**62


def test_a_few_tokens_do_not_stand_for_many():
    pacer = StepPacer(1.0, 0.25)
    pacer.record(0.05, mix(4))
    read_prompts(pacer, 0.05, 0.001)
    before = pacer.pace()
    for _ in range(20):
        # As after a prefix hit: most of what they cost, any prompt would.
        pacer.record(0.07, mix(4, 3))
    assert pacer.pace() == before


def test_before_anything_is_measured_little_is_read():
    pacer = StepPacer(1.0, 0.25)
    assert pacer.pace().prompt_tokens == MIN_CHUNK
    pacer.record(0.05, mix(4))
    assert pacer.pace().prompt_tokens == MIN_CHUNK


@pytest.mark.parametrize("decode_s", [0.01, 0.1, 1.0])
def test_where_prompts_never_end_decoding_is_measured_now_and_then(decode_s):
    """Or nobody would know that the answers alone take longer than the limit, and hardly anything be read."""
    pacer = StepPacer(1.0, 0.25)
    pacer.record(1.0, mix(0, 100))
    num_tokens, num_probes = 0, 0
    for _ in range(1000):
        chunk = pacer.pace().prompt_tokens
        num_tokens += chunk
        num_probes += chunk == 0
        pacer.record(decode_s + 0.001 * chunk, mix(4, chunk))
    assert 20 <= num_probes <= 40
    assert num_tokens >= 0.8 * 1000 * max(0.25 - decode_s, 2 * decode_s) / 0.001
