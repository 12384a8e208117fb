"""Long documents are read at a pace that others set; short prompts and lone documents are not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.scheduler.sharing import Pace, pace_documents

SIZES = limits(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=1024, max_model_len=2048, block_size=16)
assert SIZES.document_tokens == 256


def document(seed):
    return [*prompt(500, seed), *prompt(500, 100 + seed)]


def ran(harness, stream):
    """Tokens that `stream` ran in the last step."""
    plan = dict(zip(harness.worker._slots, harness.worker._counts, strict=True))
    requests = harness.scheduler._table.requests
    (slot,) = (slot for slot, request in enumerate(requests) if request and request.stream == stream)
    return plan.get(slot, 0)


def beside_decodes(num_decodes=3):
    harness = Harness(SIZES)
    for seed in range(num_decodes):
        harness.add(prompt(4, seed), max_tokens=1000, ignore_eos=True)
    harness.step()
    return harness


def test_a_document_beside_decodes_reads_as_much_as_it_may():
    harness = beside_decodes()
    long = harness.add(document(1), max_tokens=2, ignore_eos=True)
    for most in (5, 0, 20, 1, 0):
        harness.pace = Pace(document_tokens=most)
        harness.step()
        # It comes in all the same, or it would hold up the queue.
        assert ran(harness, long) == max(most, 1 if len(harness.diffs) == 2 else 0)
        assert harness.scheduler.mix.num_document_tokens == ran(harness, long)
        assert harness.scheduler.mix.num_prompt_tokens == 0
    harness.pace = Pace(document_tokens=None)
    harness.step()
    assert ran(harness, long) == 64 - 3


def test_a_lone_document_is_not_paced():
    harness = Harness(SIZES)
    long = harness.add(document(1), max_tokens=2, ignore_eos=True)
    harness.pace = Pace(document_tokens=0)
    harness.step()
    assert ran(harness, long) == 64
    assert harness.scheduler.mix.num_document_tokens == harness.scheduler.mix.num_tokens


def test_a_short_prompt_is_not_paced():
    harness = beside_decodes()
    short = harness.add(document(1)[:200], max_tokens=2, ignore_eos=True)
    harness.pace = Pace(document_tokens=0)
    harness.step()
    assert ran(harness, short) == 64 - 3
    assert harness.scheduler.mix.num_prompt_tokens == 64 - 3


def test_once_read_a_document_decodes_like_anybody():
    harness = beside_decodes()
    long = harness.add(document(1), max_tokens=50, ignore_eos=True)
    while not harness.streams[long].tokens:
        harness.step()
    harness.pace = Pace(document_tokens=0)
    for _ in range(5):
        harness.step()
    assert len(harness.streams[long].tokens) == 6
    assert harness.scheduler.mix.num_document_tokens == 0


def test_when_those_beside_a_paced_document_give_way_it_goes_on():
    """Nothing would run in that step otherwise, and nobody would ask for another one."""
    harness = Harness(limits(num_blocks=20, block_size=4, max_model_len=80, max_num_batched_tokens=8))
    read = harness.add(prompt(60, 1), max_tokens=2, ignore_eos=True)
    harness.step()
    harness.pace = Pace(document_tokens=0)
    harness.add(prompt(4, 2), max_tokens=70, ignore_eos=True)
    while not harness.scheduler.statistics().preemptions:
        assert harness.step() is not None
    assert ran(harness, read) > 0
    harness.run()
    harness.check()


def test_a_paced_document_gives_way_when_memory_is_short():
    small = limits(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=24, max_model_len=96, block_size=4)
    harness = Harness(small)
    for seed in range(2):
        harness.add(prompt(4, seed), max_tokens=60, ignore_eos=True)
    harness.step()
    harness.pace = Pace(document_tokens=0)
    harness.add(prompt(70, 9), max_tokens=10, ignore_eos=True)
    harness.run()
    harness.check()


@given(
    counts=st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12),
    most=st.integers(0, 80),
)
def test_documents_have_the_allowance_in_order(counts, most):
    wanted = np.array([count for count, _ in counts], dtype=np.int64)
    documents = np.array([is_document for _, is_document in counts])
    paced = pace_documents(wanted, documents, most)
    assert (paced[~documents] == wanted[~documents]).all()
    if documents.all():
        assert (paced == wanted).all()
        return
    left = most
    for row in np.flatnonzero(documents).tolist():
        assert paced[row] == min(wanted[row], left)
        left -= paced[row]
