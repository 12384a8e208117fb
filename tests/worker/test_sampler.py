"""The sampler against a float64 reference, by what it lets through and how often it takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamserve.sampling import SamplingParams
from streamserve.worker.sampler import CANDIDATES, Sampler, cut_candidates
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def reference_distribution(
    logits: np.ndarray, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Any:
    """float64 probabilities after temperature, min_p, top_k, top_p, in this order."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0.0
    sorted_weights = weights[order] / weights.sum()
    before = np.cumsum(sorted_weights) - sorted_weights
    cut = before >= top_p
    cut[0] = False
    weights[order[cut]] = 0.0
    return weights / weights.sum()


def draw(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    positions: list[int] | None = None,
    num_prompt: int = 0,
    eos: tuple[int, ...] = (),
) -> Any:
    """One token for each row: row i of `logits` [r, v] under params[i]."""
    columns = SamplingColumns(len(params), logits.shape[1], eos)
    for slot, one in enumerate(params):
        columns.put(slot, one, num_prompt)
    sampler = Sampler(columns, TokenPool(len(params), 8, CPU), logits.shape[1], CPU)
    slots = np.arange(len(params), dtype=np.int32)
    places = np.array(positions or [num_prompt] * len(params), dtype=np.int32)
    return sampler.sample(torch.tensor(logits, dtype=torch.float32), slots, places).token_ids.numpy()


def many(count: int, **settings: float) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=9, seed=seed, **settings) for seed in range(count)]  # type: ignore[arg-type]


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Pearson's statistic within five standard deviations of its mean, over cells that are expected ≥ 5."""
    expected = probabilities * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], max(expected[~big].sum(), 1e-9))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return bool(statistic < freedom + 5 * np.sqrt(2 * freedom) + 5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
        {"top_k": 10_000, "top_p": 0.9},
        {"temperature": 0.8, "min_p": 0.05, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_reference(settings: dict[str, float]) -> None:
    count = 20_000
    logits = np.random.default_rng(7).normal(0.0, 1.5, 64).astype(np.float32)
    expected = reference_distribution(logits, **settings)  # type: ignore[arg-type]
    tokens = draw(np.tile(logits, (count, 1)), many(count, **settings))
    counts = np.bincount(tokens, minlength=64)
    assert (counts[expected == 0.0] == 0).all()
    assert chi_square_is_plausible(counts, expected)


def test_candidates_equal_the_reference_set() -> None:
    """Values and ids of the kept tokens, over settings from sharp to flat, at a size with ties to round."""
    rng = np.random.default_rng(3)
    rows, vocab = 60, 5_000
    logits = (rng.normal(0, 1, (rows, vocab)) * rng.uniform(0.5, 6, (rows, 1))).astype(np.float32)
    top_k = rng.choice([1, 2, 40, 900, vocab], rows)
    top_p = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999], rows).astype(np.float32)
    values, token_ids, complete = cut_candidates(
        torch.tensor(logits), torch.tensor(top_k), torch.tensor(top_p), vocab, True
    )
    # The whole vocabulary cannot be too narrow, but for rounding where top_p is next to 1.
    assert complete[torch.tensor(top_p < 0.99)].all()
    for row in range(rows):
        kept = set(token_ids[row][values[row] > -torch.inf].tolist())
        loose, tight = (
            set(
                np.flatnonzero(
                    reference_distribution(logits[row], 1.0, 0.0, int(top_k[row]), top_p[row] * slack)
                ).tolist()
            )
            for slack in (1 + 1e-5, 1 - 1e-5)
        )
        assert tight <= kept <= loose
        assert len(kept) >= 1


def test_nucleus_wider_than_the_short_list() -> None:
    count, vocab = 3_000, 6_000
    logits = np.random.default_rng(1).normal(0.0, 0.05, vocab).astype(np.float32)
    expected = reference_distribution(logits, top_p=0.9)
    ranks = np.argsort(np.argsort(-logits))
    tokens = draw(np.tile(logits, (count, 1)), many(count, top_p=0.9))
    assert (expected[tokens] > 0).all()
    share = expected[ranks >= CANDIDATES[0]].sum()
    assert abs((ranks[tokens] >= CANDIDATES[0]).mean() - share) < 5 * np.sqrt(share * (1 - share) / count)


def test_top_k_wider_than_the_short_list() -> None:
    count, vocab = 500, 6_000
    logits = np.random.default_rng(2).normal(0.0, 0.05, vocab).astype(np.float32)
    ranks = np.argsort(np.argsort(-logits))
    tokens = draw(np.tile(logits, (count, 1)), many(count, top_k=2_000))
    assert ranks[tokens].max() < 2_000
    assert (ranks[tokens] >= CANDIDATES[0]).any()


def mixed_params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=1.0, seed=1),
        SamplingParams(max_tokens=9, temperature=1.3, top_k=3, seed=-(2**63)),
        SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=2**63 - 1),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.99, seed=4),
        SamplingParams(max_tokens=9, temperature=2.0, top_k=3_000, top_p=0.9, seed=5),
        SamplingParams(max_tokens=9, temperature=1.0, min_p=0.3, seed=6),
        SamplingParams(max_tokens=9, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=7),
    ]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    rng = np.random.default_rng(11)
    params = mixed_params()
    for trial in range(20):
        logits = rng.normal(0, 2.0 if trial % 2 else 0.1, (len(params), 4_096)).astype(np.float32)
        positions = [int(p) for p in rng.integers(1, 1000, len(params))]
        together = draw(logits, params, positions=positions)
        alone = [
            draw(logits[i : i + 1], params[i : i + 1], positions=positions[i : i + 1])[0]
            for i in range(len(params))
        ]
        assert together.tolist() == alone
        backwards = draw(logits[::-1].copy(), params[::-1], positions=positions[::-1])
        assert together.tolist() == backwards[::-1].tolist()


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((200, 1_000), dtype=np.float32)
    by_seed = draw(logits, many(200), positions=[5] * 200)
    same_seed = [SamplingParams(max_tokens=9, seed=3)] * 200
    by_position = draw(logits, same_seed, positions=list(range(200)))
    assert len(set(by_seed.tolist())) > 150
    assert len(set(by_position.tolist())) > 150


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-45, 5e-324, 0.0, 0.0099])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_tiny_temperatures_are_greedy(temperature: float, scale: float) -> None:
    logits = (np.random.default_rng(5).normal(0, 1, (4, 300)) * scale).astype(np.float32)
    tokens = draw(logits, many(4, temperature=temperature, top_p=0.5, min_p=0.1))
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings", [{"top_p": 1e-9}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 1}], ids=str
)
def test_the_tightest_filters_are_greedy(settings: dict[str, float]) -> None:
    logits = np.random.default_rng(6).normal(0, 1, (50, 3_000)).astype(np.float32)
    tokens = draw(logits, many(50, temperature=1.0, **settings))
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.01, 0.5, 2.0])
def test_large_logits_give_no_nan(temperature: float) -> None:
    logits = np.array([[3e38, -3e38, 0.0, 2.9e38], [1e5, 1e5 - 1, -1e5, 0.0]], dtype=np.float32)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}):
        tokens = draw(logits, many(2, temperature=temperature, **settings))
        assert set(tokens.tolist()) <= {0, 1, 3}
        assert tokens[0] in (0, 3)


def test_broken_logits_give_valid_ids() -> None:
    """A model that overflowed must not take the process down with an index out of range."""
    logits = np.array([[np.nan] * 5, [np.inf, np.inf, 0, 0, 0], [-np.inf] * 5], dtype=np.float32)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"temperature": 0.0}):
        tokens = draw(logits, many(3, **settings))
        assert ((tokens >= 0) & (tokens < 5)).all()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_min_tokens_hold_back_eos_and_stop_ids(settings: dict[str, float]) -> None:
    logits = np.zeros((1, 6), dtype=np.float32)
    logits[0, [1, 2, 4]] = 50.0
    # 4 comes first among the rest once 1, 2 and the request's own 4 are held back only by the last row.
    params = [
        SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(4, 99), **settings),  # type: ignore[arg-type]
        SamplingParams(max_tokens=9, min_tokens=3, **settings),  # type: ignore[arg-type]
        SamplingParams(max_tokens=9, **settings),  # type: ignore[arg-type]
    ]
    rows = np.tile(logits, (3, 1))
    for position in (10, 11, 12):
        tokens = draw(rows, params, positions=[position] * 3, num_prompt=10, eos=(1, 2))
        assert tokens[0] in (0, 3, 5)
        assert tokens[1] == 4
        assert tokens[2] in (1, 2, 4)
    freed = draw(rows, params, positions=[13] * 3, num_prompt=10, eos=(1, 2))
    assert set(freed.tolist()) <= {1, 2, 4}


def test_a_slot_forgets_its_predecessor() -> None:
    columns = SamplingColumns(1, 8, (1,))
    columns.put(0, SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(2, 3), seed=4), 5)
    columns.put(0, SamplingParams(max_tokens=9, temperature=0.0), 2)
    logits = torch.zeros(1, 8)
    logits[0, 2] = 1.0
    sampler = Sampler(columns, TokenPool(1, 8, CPU), 8, CPU)
    sampled = sampler.sample(logits, np.zeros(1, dtype=np.int32), np.array([3], dtype=np.int32))
    assert sampled.token_ids.tolist() == [2]


def test_greedy_steps_ask_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path is one argmax: no draw and no question that would wait for a GPU."""
    columns = SamplingColumns(4, 32, ())
    for slot in range(4):
        columns.put(slot, SamplingParams(max_tokens=9, temperature=0.0), 1)
    sampler = Sampler(columns, TokenPool(4, 8, CPU), 32, CPU)

    def forbidden(*_: object) -> None:
        raise AssertionError("synchronised")

    # numpy() is none: it refuses what is not on the host.
    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    logits = torch.zeros(4, 32)
    slots = np.arange(4, dtype=np.int32)
    result = sampler.sample(logits, slots, slots)
    monkeypatch.undo()
    assert result.token_ids.tolist() == [0, 0, 0, 0]
    assert result.report is None
