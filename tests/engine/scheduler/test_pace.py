"""What is read beside those who decode is limited by the pace; nothing is where nobody decodes."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness, limits, prompt

from streamserve.engine.scheduler.sharing import Pace

BUDGET = 64
SIZES = limits(max_num_seqs=8, max_num_batched_tokens=BUDGET, num_blocks=1024, max_model_len=2048)


def text(seed):
    """A prompt of two hundred tokens: more than three budgets, and no document."""
    return prompt(200, 100 + seed)


def last_step(harness):
    """Tokens of each request in the last step."""
    return harness.worker._counts


def beside_decodes(num_decodes=3, policy="fcfs"):
    harness = Harness(SIZES, policy)
    for seed in range(num_decodes):
        harness.add(prompt(4, seed), max_tokens=1000, ignore_eos=True)
    harness.step()
    return harness


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("num_prompts", [1, 2, 4])
def test_prompts_together_have_what_the_pace_gives_them(policy, num_prompts):
    harness = beside_decodes(policy=policy)
    harness.pace = Pace(prompt_tokens=20)
    for seed in range(num_prompts):
        harness.add(text(seed), max_tokens=1, ignore_eos=True)
    for _ in range(5):
        harness.step()
        assert sum(last_step(harness)) <= 3 + 20
        assert harness.scheduler.mix.num_decodes == 3
    assert harness.scheduler.mix.num_prompt_tokens == 20
    harness.pace = Pace()
    harness.step()
    assert sum(last_step(harness)) >= BUDGET - 1


def test_where_nobody_decodes_there_is_no_limit():
    harness = Harness(SIZES)
    harness.pace = Pace(prompt_tokens=20)
    for seed in range(3):
        harness.add(text(seed), max_tokens=2, ignore_eos=True)
    harness.step()
    assert sum(last_step(harness)) >= BUDGET - 1
    harness.step()
    assert sum(last_step(harness)) >= BUDGET - 1


def test_a_short_prompt_beside_a_paced_long_one_begins_at_once():
    harness = beside_decodes()
    harness.pace = Pace(prompt_tokens=20)
    harness.add(text(0), max_tokens=1, ignore_eos=True)
    harness.step()
    short = harness.add(prompt(8, 50), max_tokens=1, ignore_eos=True)
    harness.step()
    assert len(harness.streams[short].tokens) == 1


def test_the_least_pace_still_brings_everybody_to_their_end():
    harness = beside_decodes()
    harness.pace = Pace(prompt_tokens=1, document_tokens=0)
    for seed in range(3):
        harness.add(prompt(30, 60 + seed), max_tokens=3)
    harness.run()
    harness.check()


def test_a_document_leaves_prompts_what_it_may_not_read():
    harness = beside_decodes()
    harness.pace = Pace(prompt_tokens=40, document_tokens=2)
    document = [*prompt(500, 5), *prompt(500, 6)]
    assert len(document) > SIZES.document_tokens
    harness.add(document, max_tokens=1, ignore_eos=True)
    harness.step()
    harness.add(text(0), max_tokens=1, ignore_eos=True)
    harness.add(text(1), max_tokens=1, ignore_eos=True)
    for _ in range(3):
        harness.step()
    mix = harness.scheduler.mix
    assert (mix.num_decodes, mix.num_document_tokens, mix.num_prompt_tokens) == (3, 2, 38)


def test_a_step_can_be_for_those_who_decode_alone():
    harness = beside_decodes()
    reading = harness.add(text(0), max_tokens=1, ignore_eos=True)
    harness.step()
    waiting = harness.add(text(1), max_tokens=1, ignore_eos=True)
    harness.pace = Pace(prompt_tokens=0)
    harness.step()
    assert last_step(harness) == [1, 1, 1]
    assert waiting not in harness.started
    harness.pace = Pace()
    harness.run()
    assert harness.streams[reading].tokens
    assert harness.streams[waiting].tokens
    harness.check()


def test_a_step_for_those_who_decode_has_no_documents_either():
    harness = beside_decodes()
    documents = [[*prompt(500, seed), *prompt(500, 10 + seed)] for seed in (5, 6)]
    for document in documents:
        harness.add(document, max_tokens=1, ignore_eos=True)
    harness.step()
    harness.pace = Pace(prompt_tokens=0, document_tokens=16)
    harness.step()
    assert last_step(harness) == [1, 1, 1]
