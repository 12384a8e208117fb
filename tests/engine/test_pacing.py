"""DocumentPacer against a machine whose speed is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.pacing import MIN_CHUNK, UNNOTICED_S, DocumentPacer


def read(pacer, decode_s, token_s, num_steps):
    """Runs steps of a machine where these are the costs; how many seconds in all, and tokens of each step."""
    chunks, total = [], 0.0
    for _ in range(num_steps):
        chunk = pacer.allowance()
        seconds = decode_s + chunk * token_s
        pacer.record(seconds, chunk, others_decode=True)
        chunks.append(chunk)
        total += seconds
    return total, chunks


@given(
    decode_s=st.floats(1e-4, 1.0),
    cost=st.floats(1e-3, 10.0),
    share=st.floats(0.1, 0.9),
)
def test_documents_take_their_share_of_the_time(decode_s, cost, share):
    pacer = DocumentPacer(share)
    pacer.record(decode_s, 0, others_decode=True)
    token_s = cost * decode_s
    total, _ = read(pacer, decode_s, token_s, 2000)
    # From some state on, so that the first measurements and the last chunk do not count.
    total, chunks = read(pacer, decode_s, token_s, 4000)
    spent = sum(chunks) * token_s
    most = max(chunks) * token_s
    assert spent <= share * total + most
    longest_s = max(decode_s, UNNOTICED_S)
    if token_s * MIN_CHUNK <= longest_s:
        # A chunk takes no longer than the step would without it, or than anybody notices.
        assert most <= longest_s * 1.01
    assert spent >= 0.5 * min(share * total, 4000 * decode_s) - most


def test_the_share_is_met_where_a_chunk_is_dear():
    pacer = DocumentPacer(0.4)
    pacer.record(1.0, 0, others_decode=True)
    total, chunks = read(pacer, 1.0, 1.0, 10_000)
    # A decode step a second alone; 60 % of that beside the document.
    assert 10_000 / total == pytest.approx(0.6, rel=0.05)
    assert set(chunks) == {0, MIN_CHUNK}


def test_without_a_limit_there_is_no_allowance():
    pacer = DocumentPacer(1.0)
    pacer.record(1.0, 100, others_decode=True)
    assert pacer.allowance() is None


def test_a_document_among_short_prompts_goes_on():
    pacer = DocumentPacer(0.4)
    num_tokens = 0
    for _ in range(1000):
        chunk = pacer.allowance()
        # Somebody always reads a prompt, so no step shows what decoding costs.
        pacer.record(1.0 + chunk * 0.01, chunk, others_decode=False)
        num_tokens += chunk
    assert num_tokens >= 1000 * MIN_CHUNK


def test_credit_does_not_pile_up():
    pacer = DocumentPacer(0.4)
    pacer.record(1.0, MIN_CHUNK, others_decode=True)
    for _ in range(1000):
        pacer.record(1.0, 0, others_decode=True)
    pacer.record(1.0 + MIN_CHUNK * 0.5, MIN_CHUNK, others_decode=True)
    assert pacer.allowance() == 0
