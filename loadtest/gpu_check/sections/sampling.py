"""The sampling kernels on the device against the sampler on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loadtest.gpu_check.results import Record
from loadtest.gpu_check.setting import Setting
from streamserve.sampling import SamplingParams
from streamserve.worker.gumbel import gumbel_noise, noise_bits, row_keys
from streamserve.worker.sampler import Sampler, cut_candidates
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool
from streamserve.worker.triton_sampler import TritonSampler

_CPU = torch.device("cpu")
# Rows are drawn so many at a time.
_ROWS = 256
# How far below the best a token may be by float64 and still be taken: rounding in float32.
_ROUNDING = 1e-4


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    if importlib.util.find_spec("triton") is None:
        record.skip("Triton is not installed")
        return
    total, vocab_size = setting.sampler_rows, setting.sampler_vocabulary
    num_equal = 0
    wrong: list[int] = []
    for first in range(0, total, _ROWS):
        count = min(_ROWS, total - first)
        logits, params, positions = random_rows(count, vocab_size, seed=first)
        columns = SamplingColumns(count, vocab_size, ())
        for slot, one in enumerate(params):
            columns.put(slot, one, 0)
        slots = np.arange(count, dtype=np.int32)
        kernels = TritonSampler(columns, vocab_size, torch.device(setting.device))
        chosen = kernels.choose(torch.from_numpy(logits).to(setting.device), slots, positions).cpu().numpy()
        pool = TokenPool(count, 8, _CPU)
        sampler = Sampler(columns, pool, vocab_size, _CPU, use_kernels=False)
        expected = sampler.sample(torch.from_numpy(logits.copy()), slots, positions).token_ids.numpy()
        num_equal += int((chosen == expected).sum())
        wrong += [
            first + int(row)
            for row in np.flatnonzero(chosen != expected)
            if not _is_as_good(
                logits[row],
                params[row],
                columns,
                row=int(row),
                position=int(positions[row]),
                chosen=int(chosen[row]),
                expected=int(expected[row]),
            )
        ]
    detail = f"{num_equal} of {total} rows equal, {total - num_equal - len(wrong)} within rounding"
    detail += f"; wrong rows {wrong[:8]}" if wrong else ""
    record.check("kernels draw what the CPU draws", not wrong, detail)
    record.check("and differ in next to no row", num_equal >= 0.995 * total, detail)


def random_rows(
    count: int, vocab_size: int, seed: int
) -> tuple[npt.NDArray[np.float32], list[SamplingParams], npt.NDArray[np.int32]]:
    """Logits from sharp to flat, every mix of settings, and positions."""
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
    return logits.astype(np.float32), params, rng.integers(0, 100_000, count).astype(np.int32)


def _is_as_good(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    columns: SamplingColumns,
    *,
    row: int,
    position: int,
    chosen: int,
    expected: int,
) -> bool:
    """Whether both tokens differ by rounding alone: in their score, or in whether top_p lets one through."""
    scaled = torch.from_numpy(logits.astype(np.float64)) / (params.temperature or 1.0)
    keys = torch.from_numpy(row_keys(columns.seed_keys[row : row + 1], np.array([position])).view(np.int32))
    noise = gumbel_noise(noise_bits(keys, torch.arange(len(logits), dtype=torch.int32)))[0].double()
    scores = scaled + noise
    if abs(float(scores[chosen] - scores[expected])) < _ROUNDING:
        return True
    if params.top_p >= 1.0:
        return False
    # Whichever of them scores higher was cut off by one side only: it must be at the edge of the nucleus.
    better = chosen if scores[chosen] > scores[expected] else expected
    return _is_at_the_edge(scaled, params, better)


def _is_at_the_edge(scaled: torch.Tensor, params: SamplingParams, token: int) -> bool:
    """Whether the weight before `token`, over what is let through, is top_p but for rounding."""
    vocab_size = len(scaled)
    if params.min_p:
        floor = scaled.max() + np.log(params.min_p)
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    verdicts = {
        bool(
            cut_candidates(
                scaled[None],
                torch.tensor([params.top_k or vocab_size]),
                torch.tensor([params.top_p * (1 + shift)], dtype=torch.float64),
                vocab_size,
                True,
            )[0][0][_rank_of(scaled, token)].isinf()
        )
        for shift in (-1e-4, 1e-4)
    }
    return len(verdicts) == 2


def _rank_of(scaled: torch.Tensor, token: int) -> int:
    return int((scaled > scaled[token]).sum())
