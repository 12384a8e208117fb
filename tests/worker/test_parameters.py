"""Penalties, masks and log probabilities through the whole worker: golden, and however requests are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_model import VOCAB_SIZE
from worker_driver import Driver, Running

from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.spec import WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

NUM_NEW = 24
LENGTHS = (1, 2, 15, 16, 17, 40, 64, 100, 130)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Few different tokens, so that penalties find something."""
    rng = np.random.default_rng((seed, length))
    return [int(i) for i in rng.integers(3, 60, length)]


def make_driver(worker: Worker, budget: int = 512) -> Driver:
    return Driver(worker.execute, num_slots=32, num_blocks=400, block_size=16, budget=budget)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_NEW, "temperature": 0.0, "ignore_eos": True, **params})


class Golden:
    """transformers' model in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(self, prompt: list[int], **kwargs: Any) -> Any:
        ids = torch.tensor([prompt])
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            return_dict_in_generate=True,
            output_logits=True,
            **kwargs,
        )

    def output(self, prompt: list[int], **kwargs: Any) -> list[int]:
        tokens: list[int] = self.generate(prompt, **kwargs).sequences[0, len(prompt) :].tolist()
        return tokens

    def logprobs(self, tokens: list[int]) -> Any:
        """log_softmax of a forward over `tokens`, [n, v]: row i predicts token i + 1."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> Golden:
    return Golden(tiny_model)


def run_all(worker: Worker, prompts: list[list[int]], params: SamplingParams, budget: int = 512) -> Any:
    driver = make_driver(worker, budget)
    requests = [driver.add(prompt, params) for prompt in prompts]
    driver.run()
    return requests


def test_repetition_penalty_equals_transformers(tiny_worker: Worker, golden: Golden) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [golden.output(prompt, repetition_penalty=1.3) for prompt in prompts]
    assert expected != [golden.output(prompt) for prompt in prompts]
    for budget in (512, 50):
        requests = run_all(tiny_worker, prompts, greedy(repetition_penalty=1.3), budget)
        assert [request.output for request in requests] == expected


def test_bad_words_equal_transformers(tiny_worker: Worker, golden: Golden) -> None:
    """Each round forbids what came out of the one before: a token, then pairs and longer words."""
    prompts = [prompt_of(length) for length in (16, 40, 100)]
    words: list[tuple[int, ...]] = []
    for _ in range(3):
        kwargs = {"bad_words_ids": [list(word) for word in words]} if words else {}
        expected = [golden.output(prompt, **kwargs) for prompt in prompts]
        requests = run_all(tiny_worker, prompts, greedy(bad_words=tuple(words)))
        assert [request.output for request in requests] == expected
        for prompt, output in zip(prompts, expected, strict=True):
            # The second reaches back into the prompt.
            words += [(output[9],), (*prompt[-2:], output[0]), (output[2], output[3]), tuple(output[4:9])]
    assert not {word[0] for word in words if len(word) == 1} <= set(expected[0])


def test_bad_words_may_reach_back_into_the_prompt(tiny_worker: Worker) -> None:
    prompt = prompt_of(40)
    first = run_all(tiny_worker, [prompt], greedy())[0].output[0]
    other = run_all(tiny_worker, [prompt], greedy(bad_words=((*prompt[-3:], first),)))[0].output[0]
    assert other != first


def test_logprobs_equal_the_scores_of_transformers(tiny_worker: Worker, golden: Golden) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    requests = run_all(tiny_worker, prompts, greedy(logprobs=20, repetition_penalty=1.3), 60)
    for prompt, request in zip(prompts, requests, strict=True):
        answer = golden.generate(prompt, repetition_penalty=1.3)
        assert answer.sequences[0, len(prompt) :].tolist() == request.output
        for logits, token, (chosen, top_ids, top) in zip(
            answer.logits, request.output, request.logprobs, strict=True
        ):
            expected = logits[0].log_softmax(-1).numpy()
            np.testing.assert_allclose(chosen, expected[token], atol=1e-4)
            np.testing.assert_allclose(top, expected[top_ids], atol=1e-4)
            np.testing.assert_allclose(top, -np.sort(-expected)[:20], atol=1e-4)
            assert top == sorted(top, reverse=True)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "frequency_penalty": 1.5, "logprobs": 3, "logit_bias": ((9, 25.0), (50, 25.0))},
    {"temperature": 0.0, "frequency_penalty": 2.0, "prompt_logprobs": 2},
    {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.8, "frequency_penalty": -0.4},
    {"temperature": 0.0, "logit_bias": ((7, 9.0), (8, 9.0)), "presence_penalty": 2.0},
    {
        "temperature": 1.0,
        "allowed_token_ids": TokenSet.of(range(3, 40)),
        "bad_words": ((5,), (6, 7), (8, 9, 10)),
    },
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9, "min_tokens": 20, "stop_token_ids": tuple(range(3, 200))},
]
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 30, "min_p": 0.01},
]


def requests_of(kinds: list[dict[str, Any]]) -> list[tuple[list[int], SamplingParams]]:
    return [
        (prompt_of(5 + 17 * index, seed=3), greedy(**{"seed": 70 + index, **kind}))
        for index, kind in enumerate(kinds)
    ]


def alone(worker: Worker, kinds: list[dict[str, Any]]) -> list[Running]:
    done = []
    for prompt, params in requests_of(kinds):
        driver = make_driver(worker)
        done.append(driver.add(prompt, params))
        driver.run()
    return done


@pytest.fixture(scope="module")
def ruled_alone(tiny_worker: Worker) -> list[Running]:
    return alone(tiny_worker, SETTINGS)


def check_same(requests: list[Running], expected: list[Running]) -> None:
    for request, other in zip(requests, expected, strict=True):
        assert request.output == other.output, request.params
        assert request.prompt_logprobs.keys() == other.prompt_logprobs.keys()
        rows = zip(request.logprobs, other.logprobs, strict=True)
        parts = ((request.prompt_logprobs[at], other.prompt_logprobs[at]) for at in other.prompt_logprobs)
        for own, wanted in [*rows, *parts]:
            np.testing.assert_allclose(own[0], wanted[0], atol=1e-4)
            assert own[1] == wanted[1]
            np.testing.assert_allclose(own[2], wanted[2], atol=1e-4)


def test_rules_change_the_text(tiny_worker: Worker, ruled_alone: list[Running]) -> None:
    """Or the tests below would show nothing."""
    kept = ("temperature", "top_k", "top_p")
    plain = [{name: value for name, value in kind.items() if name in kept} for kind in SETTINGS]
    changed = [
        request.output != other.output
        for request, other in zip(ruled_alone, alone(tiny_worker, plain), strict=True)
    ]
    assert changed == [set(kind) - {*kept, "logprobs", "prompt_logprobs"} != set() for kind in SETTINGS]


@pytest.mark.parametrize("budget", [512, 64, 23])
def test_the_same_beside_plain_requests(tiny_worker: Worker, ruled_alone: list[Running], budget: int) -> None:
    """And the plain ones get the tokens that they get alone."""
    driver = make_driver(tiny_worker, budget)
    wanted = requests_of(SETTINGS) + requests_of(PLAIN)
    order = random.Random(budget).sample(range(len(wanted)), len(wanted))
    running = {index: driver.add(*wanted[index]) for index in order}
    driver.run()
    expected = ruled_alone + alone(tiny_worker, PLAIN)
    check_same([running[index] for index in range(len(wanted))], expected)


@pytest.mark.parametrize("seed", range(2))
def test_the_same_after_preemption(tiny_worker: Worker, ruled_alone: list[Running], seed: int) -> None:
    rng = random.Random(seed)
    driver = make_driver(tiny_worker, budget=64)
    running = [driver.add(prompt, params) for prompt, params in requests_of(SETTINGS)]
    num_left = 0

    def preempt() -> None:
        nonlocal num_left
        for request in running:
            if request.slot is not None and rng.random() < 0.1:
                driver.leave(request)
                num_left += 1

    driver.run(preempt)
    assert num_left > 10
    check_same(running, ruled_alone)


def test_the_same_in_a_resumed_stream(tiny_worker: Worker, ruled_alone: list[Running]) -> None:
    """The first tokens of the answer come with the request, as after a restart of the engine."""
    driver = make_driver(tiny_worker)
    running = []
    for (prompt, params), other in zip(requests_of(SETTINGS), ruled_alone, strict=True):
        request = driver.add(prompt, params)
        request.tokens += other.output[: NUM_NEW // 2]
        running.append(request)
    driver.run()
    assert [request.output for request in running] == [other.output for other in ruled_alone]


def test_penalties_count_the_answer_alone(tiny_worker: Worker) -> None:
    """The same tokens as prompt are free of presence and frequency penalties, but not of repetition's."""
    prompt = prompt_of(40)
    plain = run_all(tiny_worker, [prompt], greedy())[0].tokens
    free = greedy(max_tokens=1, frequency_penalty=2.0, presence_penalty=2.0)
    for end in range(41, 50):
        assert run_all(tiny_worker, [plain[:end]], free)[0].output == [plain[end]]
    biased = ((9, 40.0),)
    assert set(run_all(tiny_worker, [prompt], greedy(logit_bias=biased))[0].output) == {9}
    output = run_all(tiny_worker, [prompt], greedy(logit_bias=biased, frequency_penalty=2.0))[0].output
    assert 1 < output.count(9) < NUM_NEW


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_prompt_logprobs_equal_a_full_forward(tiny_worker: Worker, golden: Golden, chunk: int) -> None:
    driver = make_driver(tiny_worker, chunk)
    lengths = (1, 2, 16, 65) if chunk == 1 else (1, 2, 7, 8, 16, 64, 65, 130)
    asked = [0, 3, 20]
    requests = [
        driver.add(prompt_of(length, seed=8), greedy(max_tokens=3, prompt_logprobs=asked[index % 3]))
        for index, length in enumerate(lengths)
    ]
    silent = driver.add(prompt_of(30), greedy(max_tokens=3))
    driver.run()
    assert silent.prompt_logprobs == {}
    for request in requests:
        num_top = request.params.prompt_logprobs
        assert sorted(request.prompt_logprobs) == list(range(1, request.num_prompt))
        expected = golden.logprobs(request.tokens[: request.num_prompt])
        for position, (chosen, top_ids, top) in request.prompt_logprobs.items():
            row = expected[position - 1]
            np.testing.assert_allclose(chosen, row[request.tokens[position]], atol=1e-4)
            np.testing.assert_allclose(top, -np.sort(-row)[:num_top], atol=1e-4)
            np.testing.assert_allclose(top, row[top_ids], atol=1e-4)


def test_each_step_tells_of_the_tokens_it_predicts(tiny_worker: Worker) -> None:
    """Tokens c + 1 … c + n for a chunk of n at c, none twice, and none behind the prompt."""
    driver = make_driver(tiny_worker, 16)
    request = driver.add(prompt_of(40), greedy(max_tokens=2, prompt_logprobs=1))
    told = []
    while not request.is_done:
        before = set(request.prompt_logprobs)
        driver.step()
        told.append(sorted(set(request.prompt_logprobs) - before))
    assert told == [list(range(1, 17)), list(range(17, 33)), list(range(33, 40)), []]


def test_prompt_logprobs_after_a_prefix_hit_begin_behind_it(tiny_worker: Worker) -> None:
    driver = make_driver(tiny_worker)
    first = driver.add(prompt_of(40), greedy(max_tokens=20))
    driver.step()
    second = driver.add(prompt_of(40), greedy(max_tokens=1, prompt_logprobs=1), shared_with=first)
    driver.run()
    assert sorted(second.prompt_logprobs) == list(range(33, 40))


def test_prompt_logprobs_of_a_slot_that_changes_hands(tiny_worker: Worker) -> None:
    """Left in the middle of its prompt, it is forgotten; what joins there next is not told of."""
    driver = make_driver(tiny_worker, 16)
    first = driver.add(prompt_of(40), greedy(prompt_logprobs=1))
    driver.step()
    driver.leave(first, forget=True)
    second = driver.add(prompt_of(64), greedy(max_tokens=2))
    driver.run()
    assert second.prompt_logprobs == {}


def test_prompt_logprobs_hold_few_logits_at_a_time(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3000 rows of logits are made 64 at a time, and come to the same."""
    worker = Worker(spec_for(tiny_model, max_num_batched_tokens=3000))
    worker.start(lambda what, share: None)
    prompt = prompt_of(3000, seed=2)
    params = greedy(max_tokens=1, prompt_logprobs=4)
    at_once = run_all(worker, [prompt], params, 3000)[0].prompt_logprobs
    monkeypatch.setattr("streamserve.worker.logprobs._LOGITS_TILE", 64 * VOCAB_SIZE)
    heights: list[int] = []
    model = worker._runner._model  # type: ignore[union-attr]
    logits = model.logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        heights.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(model, "logits", noted)
    in_tiles = run_all(worker, [prompt], params, 3000)[0].prompt_logprobs
    worker.close()
    assert heights == [64] * 46 + [2999 - 46 * 64, 1]
    for position, (chosen, _, top) in at_once.items():
        np.testing.assert_allclose(in_tiles[position][0], chosen, atol=1e-4)
        np.testing.assert_allclose(in_tiles[position][2], top, atol=1e-4)
