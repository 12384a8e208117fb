"""Greedy and seeded outputs that must not depend on how the engine came to them; run on two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_harness import EngineHarness, EngineSettings

from streamserve.messages import Finish
from streamserve.sampling import SamplingParams

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


@dataclass(frozen=True)
class Golden:
    """A model, prompts as token ids, and the tokens that transformers' greedy `generate` gives for them."""

    model_path: Path
    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]


def make_expected(model, prompts, eos_token_ids):
    """Greedy ids by transformers in float32, one prompt at a time, up to and with the end token."""
    import torch

    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=list(eos_token_ids),
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    return expected


class GoldenCases:
    """The tests; a subclass gives the `golden` fixture."""

    def test_one_at_a_time(self, golden: Golden) -> None:
        with EngineHarness(golden.model_path) as engine:
            got = [engine.generate([prompt], GREEDY)[0] for prompt in golden.prompts]
        assert got == golden.expected

    def test_sixteen_at_once(self, golden: Golden) -> None:
        with EngineHarness(golden.model_path, EngineSettings(max_num_seqs=16)) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected

    def test_prompts_in_chunks(self, golden: Golden) -> None:
        settings = EngineSettings(max_num_batched_tokens=64)
        with EngineHarness(golden.model_path, settings) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
        assert max(len(prompt) for prompt in golden.prompts) > 2 * 64

    def test_a_fifth_of_the_cache(self, golden: Golden) -> None:
        blocks = [math.ceil((len(prompt) + NUM_TOKENS) / 16) for prompt in golden.prompts]
        num_blocks = sum(blocks) // 5
        assert num_blocks >= max(blocks)
        with EngineHarness(
            golden.model_path, EngineSettings(num_blocks=num_blocks, max_num_seqs=20)
        ) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.statistics()["preemptions"] > 0
            assert engine.statistics()["free_blocks"] == num_blocks

    def test_two_steps_in_flight(self, golden: Golden) -> None:
        blocks = [math.ceil((len(prompt) + NUM_TOKENS) / 16) for prompt in golden.prompts]
        with EngineHarness(golden.model_path, EngineSettings(overlaps=True)) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.statistics()["prefix_hits"] > 0
        tight = EngineSettings(overlaps=True, num_blocks=sum(blocks) // 5, max_num_seqs=20)
        with EngineHarness(golden.model_path, tight) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.statistics()["preemptions"] > 0

    def test_without_prefix_caching(self, golden: Golden) -> None:
        with EngineHarness(golden.model_path, EngineSettings(enable_prefix_caching=False)) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.statistics()["prefix_hits"] == 0

    def test_second_run_from_the_cache(self, golden: Golden) -> None:
        with EngineHarness(golden.model_path) as engine:
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.generate(golden.prompts, GREEDY) == golden.expected
            assert engine.statistics()["prefix_hits"] > 0
            assert max(engine.cached.values()) > 0

    def test_seeded_tokens_do_not_depend_on_company(self, golden: Golden) -> None:
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, top_k=50, seed=-42, ignore_eos=True
        )
        prompts = golden.prompts[:8]
        with EngineHarness(golden.model_path) as engine:
            alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        with EngineHarness(golden.model_path) as engine:
            together = engine.generate(prompts, params)
        blocks = [math.ceil((len(prompt) + NUM_TOKENS) / 16) for prompt in prompts]
        tight = EngineSettings(num_blocks=max(*blocks, sum(blocks) // 3))
        with EngineHarness(golden.model_path, tight) as engine:
            preempted = engine.generate(prompts, params)
            assert engine.statistics()["preemptions"] > 0
        assert together == alone
        assert preempted == alone
        assert len({tuple(tokens) for tokens in alone}) > 1

    def test_every_stream_ends_once(self, golden: Golden) -> None:
        with EngineHarness(golden.model_path) as engine:
            engine.generate(golden.prompts, GREEDY)
            eos = set(engine.facts.eos_token_ids)
            for stream, tokens in enumerate(golden.expected):
                stopped = tokens[-1] in eos
                assert engine.finish[stream] == (Finish.STOP if stopped else Finish.LENGTH)
