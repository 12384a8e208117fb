"""The sampling kernels in Triton's interpreter, against the CPU sampler and each filter's definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker import gumbel
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool

pytest.importorskip("triton")

import triton
import triton.language as tl

from streamserve.worker import triton_sampler
from streamserve.worker.sampler_kernels import NUM_COLUMNS, cut_kernel, gumbel_noise, noise_bits
from streamserve.worker.triton_sampler import TritonSampler

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@triton.jit
def noise_kernel(keys_ptr, token_ids_ptr, bits_ptr, noise_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    row, index = tl.program_id(0), tl.arange(0, BLOCK)
    token_ids = tl.load(token_ids_ptr + index, index < count)
    bits = noise_bits(tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1), token_ids)
    tl.store(bits_ptr + row * count + index, bits.to(tl.int32, bitcast=True), index < count)
    tl.store(noise_ptr + row * count + index, gumbel_noise(bits), index < count)


@triton.jit
def ends_kernel(bits_ptr, noise_ptr, BLOCK: tl.constexpr):  # noqa: N803
    index = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + index).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + index, gumbel_noise(bits))


def columns_of(params: list[SamplingParams], vocab_size: int) -> SamplingColumns:
    columns = SamplingColumns(len(params), vocab_size, ())
    for slot, one in enumerate(params):
        columns.put(slot, one, 0)
    return columns


def draw(logits: np.ndarray, params: list[SamplingParams], positions: np.ndarray | None = None) -> Any:
    """One token for each row of `logits` [r, v], by the kernels."""
    slots = np.arange(len(params), dtype=np.int32)
    places = slots * 0 if positions is None else positions.astype(np.int32)
    chooser = TritonSampler(columns_of(params, logits.shape[1]), logits.shape[1], CPU)
    return chooser.choose(torch.tensor(logits), slots, places).numpy()


def draw_on_cpu(logits: np.ndarray, params: list[SamplingParams], positions: np.ndarray) -> Any:
    """The same by the CPU sampler."""
    vocab_size = logits.shape[1]
    sampler = Sampler(columns_of(params, vocab_size), TokenPool(len(params), 8, CPU), vocab_size, CPU)
    slots = np.arange(len(params), dtype=np.int32)
    return sampler.sample(torch.tensor(logits), slots, positions.astype(np.int32)).token_ids.numpy()


def random_rows(
    count: int, vocab_size: int, seed: int
) -> tuple[np.ndarray, list[SamplingParams], np.ndarray]:
    """Logits from sharp to flat, and every mix of settings."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (count, vocab_size)) * rng.choice([0.1, 1.0, 3.0, 8.0], (count, 1))
    params = [
        SamplingParams(
            max_tokens=9,
            seed=int(rng.integers(-(2**63), 2**63)),
            temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 2.0], p=[0.1, 0.1, 0.2, 0.4, 0.2])),
            top_k=int(rng.choice([0, 1, 2, 40, vocab_size - 1], p=[0.4, 0.1, 0.1, 0.3, 0.1])),
            top_p=float(rng.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999], p=[0.3, 0.1, 0.1, 0.1, 0.2, 0.2])),
            min_p=float(rng.choice([0.0, 0.01, 0.3], p=[0.7, 0.2, 0.1])),
        )
        for _ in range(count)
    ]
    return logits.astype(np.float32), params, rng.integers(0, 100_000, count)


def test_noise_is_the_definition_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    seeds = [0, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63, 12).tolist()]
    positions = np.array([0, 2**31 - 1, *rng.integers(0, 2**31, 14)])
    keys = gumbel.row_keys(np.stack([gumbel.seed_key(seed) for seed in seeds]), positions)
    token_ids = np.concatenate((np.arange(500), rng.integers(0, 2**31, 523), [2**31 - 1])).astype(np.int32)
    bits = torch.zeros(len(keys), len(token_ids), dtype=torch.int32)
    noise = torch.zeros(len(keys), len(token_ids))
    noise_kernel[(len(keys),)](
        torch.from_numpy(keys.view(np.int32)),
        torch.from_numpy(token_ids),
        bits,
        noise,
        len(token_ids),
        BLOCK=1024,
    )
    assert (bits.numpy().view(np.uint32) == gumbel.noise_bits_reference(keys, token_ids)).all()
    torch.testing.assert_close(noise, gumbel.gumbel_noise(bits), rtol=1e-6, atol=1e-6)


def test_noise_at_the_ends() -> None:
    """The least and the greatest uniform, and those where one formula follows the other."""
    bits = torch.tensor([0, -1, 1, 2**30 - 65, 2**30, 2**30 + 64, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = torch.zeros(8)
    ends_kernel[(1,)](bits, noise, BLOCK=8)
    assert noise.isfinite().all()
    torch.testing.assert_close(noise, gumbel.gumbel_noise(bits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "count", [50, pytest.param(4_096, marks=(pytest.mark.heavy, pytest.mark.timeout(3_600)))]
)
def test_takes_the_tokens_of_the_cpu_sampler(count: int) -> None:
    logits, params, positions = random_rows(count, 1_000, seed=count)
    assert draw(logits, params, positions).tolist() == draw_on_cpu(logits, params, positions).tolist()


def test_takes_them_over_several_parts_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "_CUT_BLOCK", 128)
    monkeypatch.setattr(triton_sampler, "_DRAW_BLOCK", 64)
    logits, params, positions = random_rows(16, 500, seed=1)
    assert draw(logits, params, positions).tolist() == draw_on_cpu(logits, params, positions).tolist()


def kept_by(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """By definition, sorted, in float64: tokens that pass, in the order min_p, top_k, top_p."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] >= min_p][: top_k or None]
    before = np.cumsum(weights[order]) - weights[order]
    return set(order[: max(1, int((before < top_p * weights[order].sum()).sum()))].tolist())


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [0, 2, 299])
def test_the_floor_equals_the_sorted_definition(scale: float, top_k: int) -> None:
    """Where rounding could go either way, a millionth more or less of top_p and min_p is allowed."""
    rng = np.random.default_rng(top_k)
    vocab_size = 300
    cases = [(top_p, min_p) for top_p in (1.0, 1e-9, 0.1, 0.5, 0.9, 0.99) for min_p in (0.0, 0.2)]
    logits = (rng.normal(0, scale, (len(cases), vocab_size)) - 3).astype(np.float32)
    params = [SamplingParams(max_tokens=9, top_k=top_k, top_p=top_p, min_p=min_p) for top_p, min_p in cases]
    for row, floor in enumerate(floors_of(logits, params)):
        top_p, min_p = cases[row]
        kept = set(np.flatnonzero(logits[row] >= floor).tolist())
        tight, loose = (
            kept_by(logits[row], top_k, top_p * (1 + slack), min_p * (1 - slack)) for slack in (-1e-6, 1e-6)
        )
        assert tight <= kept <= loose


def floors_of(logits: np.ndarray, params: list[SamplingParams]) -> Any:
    count, vocab_size = logits.shape
    chooser = TritonSampler(columns_of(params, vocab_size), vocab_size, CPU)
    slots = np.arange(count, dtype=np.int32)
    settings, _ = chooser._settings(slots, slots)
    assert settings.shape == (count, NUM_COLUMNS)
    floors = torch.zeros(count)
    cut_kernel[(count,)](torch.tensor(logits), settings, floors, vocab_size, vocab_size, BLOCK=128)
    return floors.numpy()


def test_tokens_as_likely_as_the_last_are_kept_with_it() -> None:
    logits = np.tile(np.array([1.0, 3.0, 2.0, 2.0, 2.0, -0.0, 0.0], dtype=np.float32), (3, 1))
    params = [
        SamplingParams(max_tokens=9, top_k=2),
        SamplingParams(max_tokens=9, top_p=0.6),
        SamplingParams(max_tokens=9, top_k=6),
    ]
    assert floors_of(logits, params).tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2.0},
        *(
            pytest.param(settings, marks=pytest.mark.heavy)
            for settings in (
                {},
                {"top_k": 5},
                {"top_p": 0.7},
                {"temperature": 1.5, "min_p": 0.02, "top_k": 9},
            )
        ),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    """Pearson's chi-square of 400 draws from 16 tokens, within five standard deviations of its mean."""
    count, vocab_size = 400, 16
    logits = np.random.default_rng(7).normal(0.0, 1.5, vocab_size).astype(np.float32)
    scaled = logits / settings.get("temperature", 1.0)
    kept = kept_by(
        scaled, int(settings.get("top_k", 0)), settings.get("top_p", 1.0), settings.get("min_p", 0.0)
    )
    weights = np.exp(scaled.astype(np.float64)) * np.isin(np.arange(vocab_size), list(kept))
    params = [SamplingParams(max_tokens=9, seed=seed, **settings) for seed in range(count)]  # type: ignore[arg-type]
    counts = np.bincount(draw(np.tile(logits, (count, 1)), params), minlength=vocab_size)
    expected = weights / weights.sum() * count
    assert (counts[expected == 0] == 0).all()
    is_big = expected >= 5
    observed = np.append(counts[is_big], counts[~is_big].sum())
    wanted = np.append(expected[is_big], max(expected[~is_big].sum(), 1e-9))
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


# Overflow and inf less inf, which the kernels expect, are worth a warning to the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_logits_give_valid_ids() -> None:
    """A model that overflowed must not take the process down with an index out of range."""
    rows = [[np.nan] * 5, [np.inf, np.inf, 0, 0, np.nan], [-np.inf] * 5, [3e38, -3e38, 0.0, 2.9e38, 1.0]]
    logits = np.array(rows, dtype=np.float32)
    for settings in (
        {},
        {"top_p": 0.9},
        {"top_k": 3},
        {"min_p": 0.5},
        {"temperature": 0.0},
        {"temperature": 0.01},
    ):
        tokens = draw(logits, [SamplingParams(max_tokens=9, seed=1, **settings)] * 4)  # type: ignore[arg-type]
        assert ((tokens >= 0) & (tokens < 5)).all()
        assert tokens[1] in (0, 1)
        assert tokens[3] in (0, 3)


def test_forbidden_tokens_are_never_drawn() -> None:
    """Logits of -inf, which rules leave behind, even where top_k would let them through."""
    logits = np.full((24, 40), -np.inf, dtype=np.float32)
    logits[:, [7, 31]] = 0.5
    for settings in ({}, {"top_k": 20}, {"top_p": 0.99}):
        params = [SamplingParams(max_tokens=9, seed=seed, **settings) for seed in range(24)]  # type: ignore[arg-type]
        assert set(draw(logits, params).tolist()) == {7, 31}


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits, params, positions = random_rows(12, 200, seed=5)
    together = draw(logits, params, positions)
    for row in range(12):
        part = slice(row, row + 1)
        assert draw(logits[part], params[part], positions[part]).tolist() == [together[row]]


def test_the_sampler_uses_them_behind_its_rules() -> None:
    """Greedy, plain and ruled rows of one step, as the sampler alone takes them."""
    logits, params, positions = random_rows(12, 100, seed=3)
    ids = {"allowed_token_ids": TokenSet.of((5, 6, 7, 8))}
    params[:3] = [SamplingParams(max_tokens=9, seed=seed, temperature=0.8, **ids) for seed in range(3)]  # type: ignore[arg-type]
    slots, places = np.arange(12, dtype=np.int32), positions.astype(np.int32)
    tokens = []
    for use_kernels in (True, False):
        pool = TokenPool(12, 8, CPU)
        sampler = Sampler(columns_of(params, 100), pool, 100, CPU, use_kernels=use_kernels)
        tokens.append(sampler.sample(torch.tensor(logits), slots, places).token_ids)
    assert tokens[0].dtype == tokens[1].dtype == torch.int32
    assert tokens[0].tolist() == tokens[1].tolist()
    assert set(tokens[0][:3].tolist()) <= {5, 6, 7, 8}


def test_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels taken out, what is left never waits for the device."""
    for name in ("cut_kernel", "draw_kernel", "pick_kernel"):
        kernel = type(name, (), {"__getitem__": lambda _, grid: lambda *arguments, **constants: None})()
        monkeypatch.setattr(triton_sampler, name, kernel)
    logits, params, positions = random_rows(20, 100, seed=2)
    chooser = TritonSampler(columns_of(params, 100), 100, CPU)

    def forbidden(*_: object) -> None:
        raise AssertionError("synchronised")

    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    chosen = chooser.choose(torch.tensor(logits), np.arange(20, dtype=np.int32), positions.astype(np.int32))
    assert chosen.shape == (20,)
