"""Penalties and log probabilities of the real SmolLM2 in float32 equal transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from worker_driver import Driver

from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = [pytest.mark.torch, pytest.mark.smollm2]

NUM_NEW = 24
TEXTS = (
    "The capital of France is",
    "One, two, three, one, two, three, one, two, three,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


def test_repetition_penalty_and_logprobs(smollm2_float32: Path, spec_for: Callable[..., WorkerSpec]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_float32)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    worker = Worker(spec_for(smollm2_float32, max_model_len=1024))
    worker.start(lambda what, share: None)
    driver = Driver(worker.execute, num_slots=32, num_blocks=400, block_size=16, budget=7)
    params = SamplingParams(
        max_tokens=NUM_NEW,
        temperature=0.0,
        ignore_eos=True,
        repetition_penalty=1.3,
        logprobs=20,
        prompt_logprobs=5,
    )
    requests = [driver.add(prompt, params) for prompt in prompts]
    driver.run()
    worker.close()

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_float32, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    for prompt, request in zip(prompts, requests, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        full = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, repetition_penalty=1.3)
        assert request.tokens == full[0].tolist()
        with torch.no_grad():
            expected = model(full).logits[0].log_softmax(-1).numpy()
        rows = [request.prompt_logprobs[position] for position in range(1, len(prompt))] + request.logprobs
        for row, token, (chosen, top_ids, top) in zip(expected[:-1], request.tokens[1:], rows, strict=True):
            np.testing.assert_allclose(chosen, row[token], atol=2e-3)
            np.testing.assert_allclose(top, row[top_ids], atol=2e-3)
            np.testing.assert_allclose(top, -np.sort(-row)[: len(top)], atol=2e-3)
