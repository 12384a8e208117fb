"""Log probabilities through the whole engine on a tiny random Llama."""

from __future__ import annotations

import numpy as np
import pytest

from streamserve.messages import Logprobs
from streamserve.sampling import SamplingParams

pytestmark = pytest.mark.torch

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
PLAIN = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
# Sums in another order differ by this much.
TOLERANCE = 2e-4


def prompts() -> list[list[int]]:
    """Of lengths around those of blocks and chunks; two of them begin alike."""
    lengths = [1, 2, 15, 16, 17, 33, 70, 70]
    texts = [
        [(7 * n * (i + 1) + i * i + index) % 400 + 4 for i in range(n)] for index, n in enumerate(lengths)
    ]
    texts[-1][:48] = texts[-2][:48]
    return texts


def run(tiny_model, **settings):
    """Tokens and log probabilities of all prompts, with as many others that do not ask among them."""
    from engine_harness import EngineHarness, EngineSettings

    with EngineHarness(tiny_model, EngineSettings(**settings)) as engine:
        texts = prompts()
        for stream, text in enumerate(texts):
            engine.add(stream, text, PARAMS)
            engine.add(stream + 100, text[::-1], PLAIN)
        engine.run_until_idle()
        engine.scheduler.check_integrity()
        assert set(engine.logprobs) == set(range(len(texts)))
        answers = [Logprobs.join(engine.logprobs[stream]) for stream in range(len(texts))]
        asked = [engine.prompt_logprobs.get(stream) for stream in range(len(texts))]
        tokens = [engine.tokens[stream] for stream in range(len(texts))]
        return tokens, answers, asked, engine.statistics()


@pytest.fixture(scope="module")
def roomy(tiny_model):
    return run(tiny_model, enable_prefix_caching=False)


def test_every_token_has_its_rows(roomy):
    tokens, answers, asked, _ = roomy
    for text, generated, answer, prompt in zip(prompts(), tokens, answers, asked, strict=True):
        assert answer.top.shape == answer.top_ids.shape == (len(generated), 3)
        # Greedy: the token is the likeliest one.
        assert answer.top_ids[:, 0].tolist() == generated
        np.testing.assert_array_equal(answer.top[:, 0], answer.chosen)
        assert (np.diff(answer.top, axis=1) <= 0).all()
        if len(text) == 1:
            assert prompt is None
        else:
            assert Logprobs.join(prompt).top.shape == (len(text) - 1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 24},
        {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 40, "max_model_len": 96},
        {"enable_prefix_caching": True},
    ],
    ids=["chunks", "preemption", "prefix caching"],
)
def test_however_it_was_computed_it_is_the_same(tiny_model, roomy, settings):
    tokens, answers, asked, _ = roomy
    other_tokens, other_answers, other_asked, statistics = run(tiny_model, **settings)
    assert other_tokens == tokens
    if "num_blocks" in settings:
        assert statistics["preemptions"] > 0
    for mine, others in zip(answers, other_answers, strict=True):
        np.testing.assert_allclose(mine.chosen, others.chosen, atol=TOLERANCE)
        np.testing.assert_allclose(mine.top, others.top, atol=TOLERANCE)
    for mine, others in zip(asked, other_asked, strict=True):
        assert (mine is None) == (others is None)
        if mine is not None:
            np.testing.assert_allclose(
                Logprobs.join(mine).chosen, Logprobs.join(others).chosen, atol=TOLERANCE
            )
