"""Golden tokens on a tiny random Llama: seconds, in every run of the suite."""

from __future__ import annotations

import pytest
from golden_cases import GREEDY, Golden, GoldenCases, make_expected

pytestmark = pytest.mark.torch


def varied_prompts(vocab_size: int) -> list[list[int]]:
    """20 prompts of 1 to 200 ids, some of which begin alike."""
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 60, 64, 65, 90, 100, 128, 150, 180, 200]
    prompts = [[(7 * n * (i + 1) + i * i + n) % (vocab_size - 8) + 4 for i in range(n)] for n in lengths]
    shared = prompts[-1][:48]
    prompts[12] = shared + prompts[12]
    prompts[15] = shared + prompts[15]
    return prompts


@pytest.fixture(scope="module")
def golden(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()
    prompts = varied_prompts(model.config.vocab_size)
    eos = model.generation_config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [eos]
    return Golden(tiny_model, prompts, make_expected(model, prompts, eos_ids))


class TestTinyLlama(GoldenCases):
    """All cases on the tiny model."""


def test_a_long_prompt_leaves_room_for_others(golden):
    """10,000 tokens are prefilled in chunks, and between them every other stream goes on."""
    from engine_harness import EngineHarness, EngineSettings

    from streamserve.sampling import SamplingParams

    long_prompt = [(i * 31) % 400 + 5 for i in range(10_000)]
    steady = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    settings = EngineSettings(max_num_batched_tokens=512, num_blocks=4096)
    with EngineHarness(golden.model_path, settings) as engine:
        for stream in range(8):
            engine.add(stream, golden.prompts[stream], steady)
        engine.step()
        engine.add(8, long_prompt, GREEDY)
        before = len(engine.events)
        while not engine.tokens[8]:
            assert engine.step()
        during = [stream for stream, _ in engine.events[before:] if stream != 8]
        for stream in range(8):
            assert during.count(stream) >= 10_000 // 512
        engine.abort(*range(8))
        for stream in range(8):
            del engine.tokens[stream]
        engine.run_until_idle()
        assert len(engine.tokens[8]) > 0
