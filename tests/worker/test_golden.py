"""Greedy text equals transformers' token for token, however the requests are cut, mixed and moved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_model import VOCAB_SIZE, make_tiny_model
from worker_driver import Driver

from streamserve.engine.step import StepDiff
from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

NUM_NEW = 24
# Around block and tile boundaries, and a few long ones.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 60, 63, 64, 65, 100, 127, 128, 130, 200, 333)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = np.random.default_rng((seed, length))
    return [int(i) for i in rng.integers(3, VOCAB_SIZE, length)]


def reference(folder: Path, prompts: list[list[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    """What transformers generates greedily in float32, one prompt at a time."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new)
        outputs.append(full[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts with their right continuations."""
    prompts = [prompt_of(length) for length in LENGTHS]
    return list(zip(prompts, reference(tiny_model, prompts), strict=True))


def make_driver(worker: Worker, budget: int = 512) -> Driver:
    return Driver(worker.execute, num_slots=32, num_blocks=400, block_size=16, budget=budget)


def greedy(num_new: int = NUM_NEW) -> SamplingParams:
    return SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)


def test_reference_outputs_vary(golden: list[tuple[list[int], list[int]]]) -> None:
    assert all(len(set(output)) > NUM_NEW // 2 for _, output in golden)


def test_one_at_a_time(tiny_worker: Worker, golden: list[tuple[list[int], list[int]]]) -> None:
    driver = make_driver(tiny_worker)
    for prompt, expected in golden:
        request = driver.add(prompt, greedy())
        driver.run()
        assert request.output == expected, len(prompt)


@pytest.mark.parametrize("budget", [512, 64, 37])
def test_all_at_once_in_chunks(
    tiny_worker: Worker, golden: list[tuple[list[int], list[int]]], budget: int
) -> None:
    driver = make_driver(tiny_worker, budget)
    requests = [driver.add(prompt, greedy()) for prompt, _ in golden[-16:]]
    driver.run()
    assert [request.output for request in requests] == [expected for _, expected in golden[-16:]]


def test_late_arrivals_mix_prefill_and_decode(
    tiny_worker: Worker, golden: list[tuple[list[int], list[int]]]
) -> None:
    driver = make_driver(tiny_worker, budget=50)
    waiting = list(golden)
    requests = []

    def admit() -> None:
        if waiting:
            requests.append(driver.add(waiting.pop()[0], greedy()))

    admit()
    driver.run(admit)
    assert [request.output for request in requests] == [expected for _, expected in reversed(golden)]


@pytest.mark.parametrize("seed", range(3))
def test_leave_and_rejoin(tiny_worker: Worker, golden: list[tuple[list[int], list[int]]], seed: int) -> None:
    rng = random.Random(seed)
    driver = make_driver(tiny_worker, budget=96)
    requests = [driver.add(prompt, greedy()) for prompt, _ in golden]

    def preempt() -> None:
        for request in requests:
            if request.slot is not None and rng.random() < 0.04:
                driver.leave(request)

    driver.run(preempt)
    assert [request.output for request in requests] == [expected for _, expected in golden]


def test_shared_prefix(tiny_worker: Worker, tiny_model: Path) -> None:
    head = prompt_of(70, seed=5)
    prompts = [head + prompt_of(length, seed=6) for length in (1, 10, 26, 58)] + [head[:64], head[:65]]
    expected = reference(tiny_model, prompts)
    driver = make_driver(tiny_worker, budget=40)
    first = driver.add(prompts[0], greedy())
    while len(first.output) < 5:
        driver.step()
    requests = [driver.add(prompt, greedy(), shared_with=first) for prompt in prompts[1:]]
    assert [request.num_computed for request in requests] == [64, 64, 64, 48, 64]
    driver.run()
    assert [request.output for request in [first, *requests]] == expected


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("mistral", {}),
        # Served up to the window, within which it is full attention.
        ("mistral", {"sliding_window": 128, "head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "head_dim": 24}),
        ("llama", {"head_dim": 80, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
    ids=[
        *("mistral", "mistral-window", "qwen2-tied", "qwen2-window", "qwen3", "qwen3-biases-tied"),
        *("llama-tied", "llama-wide-heads", "llama-biases", "rope-linear", "rope-llama3"),
    ],
)
def test_other_models(
    tmp_path: Path, spec_for: Callable[..., WorkerSpec], architecture: str, overrides: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture, seed=3, **overrides)
    prompts = [prompt_of(length, seed=9) for length in (3, 40, 90)]
    worker = Worker(spec_for(folder, max_model_len=None))
    worker.start(lambda what, share: None)
    driver = make_driver(worker, budget=48)
    requests = [driver.add(prompt, greedy()) for prompt in prompts]
    driver.run()
    worker.close()
    assert [request.output for request in requests] == reference(folder, prompts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_float32_for_most_tokens(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    golden: list[tuple[list[int], list[int]]],
    dtype: str,
) -> None:
    worker = Worker(spec_for(tiny_model, dtype=dtype))
    facts = worker.start(lambda what, share: None)
    assert facts.dtype == dtype
    driver = make_driver(worker)
    requests = [driver.add(prompt, greedy(1)) for prompt, _ in golden]
    driver.run()
    hits = sum(
        request.output[0] == expected[0] for request, (_, expected) in zip(requests, golden, strict=True)
    )
    assert hits >= len(golden) * 0.7
    worker.close()


def test_long_prompt_in_chunks_equals_one_chunk(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec]
) -> None:
    prompt = prompt_of(3000, seed=4)
    worker = Worker(spec_for(tiny_model, max_num_batched_tokens=3000))
    worker.start(lambda what, share: None)
    outputs = []
    for budget in (3000, 700, 512):
        driver = make_driver(worker, budget)
        request = driver.add(prompt, greedy(8))
        driver.run()
        outputs.append(request.output)
    worker.close()
    assert outputs[1:] == [outputs[0]] * 2


def test_a_step_that_only_takes_leave(tiny_worker: Worker) -> None:
    driver = make_driver(tiny_worker)
    request = driver.add(prompt_of(20), greedy())
    driver.step()
    driver.leave(request, forget=True)
    empty = np.zeros(0, dtype=np.int32)
    slots = np.array([31], dtype=np.int32)
    result = tiny_worker.execute(StepDiff(step=99, leaves=slots, slots=empty, num_tokens=empty))
    assert (result.step, len(result.slots), len(result.token_ids)) == (99, 0, 0)
