"""Graphs under the real scheduler: prefix cache, memory that runs out, and steps that overlap."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import engine_harness
import pytest
from engine_harness import EngineHarness, EngineSettings
from tiny_model import VOCAB_SIZE

from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec

pytestmark = pytest.mark.torch

NUM_REQUESTS = 24


def serve(folder: Path, overlaps: bool) -> EngineHarness:
    """Requests that come two by two, many with the same beginning, in memory for a few of them."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(64)]
    settings = EngineSettings(
        max_num_seqs=8, max_num_batched_tokens=48, num_blocks=36, max_model_len=256, overlaps=overlaps
    )
    with EngineHarness(folder, settings) as engine:
        for stream in range(NUM_REQUESTS):
            own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
            prompt = [*common, *own] if rng.random() < 0.5 else own
            engine.add(stream, prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
            if stream % 2:
                engine.step()
        engine.run_until_idle()
        engine.scheduler.check_integrity()
        statistics = engine.statistics()
        assert statistics["preemptions"] > 0
        assert statistics["prefix_hits"] > 0
    return engine


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("overlaps", "lazy"), [(False, False), (True, True)])
def test_the_engine_says_the_same(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, mode: str, overlaps: bool, lazy: bool
) -> None:
    truth = serve(tiny_model, overlaps=False)
    assert len(truth.tokens) == NUM_REQUESTS
    asked = partial(
        WorkerSpec, cudagraph_mode=mode, cudagraph_capture_sizes=(1, 4, 8, 16, 48), lazy_graphs=lazy
    )
    monkeypatch.setattr(engine_harness, "WorkerSpec", asked)
    assert serve(tiny_model, overlaps).tokens == truth.tokens
