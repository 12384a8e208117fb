"""A seeded request draws the same tokens alone, in company and after a preemption."""

from __future__ import annotations

import random

import numpy as np
import pytest
from worker_driver import Driver

from streamserve.sampling import SamplingParams
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

SETTINGS = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
    {"temperature": 2.0, "min_tokens": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.5, "seed": -1},
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(2)
    return [
        (
            [int(i) for i in rng.integers(3, 512, 10 + 9 * index)],
            SamplingParams(max_tokens=24, **{"seed": 1000 + index, **settings}),  # type: ignore[arg-type]
        )
        for index, settings in enumerate(SETTINGS)
    ]


def make_driver(worker: Worker, budget: int = 512) -> Driver:
    return Driver(worker.execute, num_slots=32, num_blocks=400, block_size=16, budget=budget)


@pytest.fixture(scope="module")
def alone(tiny_worker: Worker) -> list[list[int]]:
    outputs = []
    for prompt, params in requests():
        driver = make_driver(tiny_worker)
        request = driver.add(prompt, params)
        driver.run()
        outputs.append(request.output)
    return outputs


def test_outputs_differ_by_seed(tiny_worker: Worker, alone: list[list[int]]) -> None:
    prompt, params = requests()[0]
    driver = make_driver(tiny_worker)
    other = driver.add(prompt, SamplingParams(max_tokens=24, temperature=0.8, seed=params.seed + 1))
    driver.run()
    assert other.output != alone[0]


def test_batch_of_eight(tiny_worker: Worker, alone: list[list[int]]) -> None:
    driver = make_driver(tiny_worker, budget=64)
    running = [driver.add(prompt, params) for prompt, params in requests()]
    driver.run()
    assert [request.output for request in running] == alone


def test_after_rejoining(tiny_worker: Worker, alone: list[list[int]]) -> None:
    rng = random.Random(0)
    driver = make_driver(tiny_worker, budget=64)
    running = [driver.add(prompt, params) for prompt, params in requests()]

    def preempt() -> None:
        for request in running:
            if request.slot is not None and rng.random() < 0.1:
                driver.leave(request)

    driver.run(preempt)
    assert [request.output for request in running] == alone


def test_no_end_before_min_tokens(tiny_worker: Worker) -> None:
    """Half the vocabulary are stop ids; none of them comes up before its time."""
    stops = tuple(range(3, 256))
    params = SamplingParams(max_tokens=40, min_tokens=30, temperature=1.5, seed=1, stop_token_ids=stops)
    driver = make_driver(tiny_worker)
    request = driver.add([300, 301], params)
    driver.run()
    assert min(request.output[:30]) > 255
    assert min(request.output[30:]) < 256
