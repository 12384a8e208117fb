"""The counter-based noise: its integers are exact, its distribution is Gumbel's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.worker.gumbel import gumbel_noise, noise_bits, noise_bits_reference, row_keys, seed_key

pytestmark = pytest.mark.torch

KNOWN_BITS = [
    [4227956201, 2705111766, 974043349],
    [2538571587, 530293149, 749589181],
    [795955836, 3995515692, 1897700992],
]


def keys_of(seeds: list[int], positions: list[int]) -> np.ndarray:
    return row_keys(np.stack([seed_key(seed) for seed in seeds]), np.array(positions, dtype=np.int32))


def torch_bits(keys: np.ndarray, token_ids: np.ndarray) -> Any:
    bits = noise_bits(torch.from_numpy(keys.view(np.int32)), torch.from_numpy(token_ids.astype(np.int32)))
    return bits.numpy().view(np.uint32)


@given(
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=5
    ),
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_torch_equals_the_definition_bit_for_bit(rows: list[tuple[int, int]], token_ids: list[int]) -> None:
    keys = keys_of([seed for seed, _ in rows], [position for _, position in rows])
    ids = np.array(token_ids)
    assert (torch_bits(keys, ids) == noise_bits_reference(keys, ids)).all()


def test_a_whole_vocabulary_is_equal_too() -> None:
    keys = keys_of([0, -1, 12345678901234567, 7], [0, 1, 99, 65535])
    ids = np.arange(151_936)
    assert (torch_bits(keys, ids) == noise_bits_reference(keys, ids)).all()


def test_known_values_never_change() -> None:
    """Seeded text must be the same in every release: these are what the first one computed."""
    keys = keys_of([0, 42, -1], [0, 17, 100_000])
    bits = noise_bits_reference(keys, np.array([0, 1, 49_151]))
    assert bits.tolist() == KNOWN_BITS


def test_ids_of_a_row_may_be_given_in_any_order() -> None:
    keys = keys_of([3, 4], [5, 5])
    ids = np.array([[9, 2, 7], [7, 9, 2]])
    every = noise_bits_reference(keys, np.arange(10))
    assert (torch_bits(keys, ids) == np.take_along_axis(every, ids, axis=1)).all()


def test_bits_are_balanced_and_independent_between_rows() -> None:
    """Neighbouring seeds, positions and token ids: each of the 32 bits is fair and rows do not correlate."""
    keys = keys_of([1, 1, 2, 2, 2**32, 1 + 2**32], [10, 11, 10, 11, 10, 10])
    bits = noise_bits_reference(keys, np.arange(100_000))
    planes = (bits[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.abs(planes.mean(axis=1) - 0.5).max() < 5 * 0.5 / np.sqrt(100_000)
    signs = planes.astype(np.float32) * 2 - 1
    for left in range(len(keys)):
        for right in range(left + 1, len(keys)):
            assert np.abs((signs[left] * signs[right]).mean(axis=0)).max() < 5 / np.sqrt(100_000)
    neighbours = (signs[:, 1:] * signs[:, :-1]).mean(axis=1)
    assert np.abs(neighbours).max() < 5 / np.sqrt(100_000)


def test_noise_follows_the_gumbel_distribution() -> None:
    keys = keys_of(list(range(8)), [3] * 8)
    ids = torch.arange(50_000, dtype=torch.int32)
    noise = np.sort(gumbel_noise(noise_bits(torch.from_numpy(keys.view(np.int32)), ids)).flatten().numpy())
    expected = np.exp(-np.exp(-noise.astype(np.float64)))
    observed = (np.arange(len(noise)) + 0.5) / len(noise)
    # Kolmogorov-Smirnov at about one in a million.
    assert np.abs(expected - observed).max() < 2.7 / np.sqrt(len(noise))


def test_noise_is_finite_at_the_ends() -> None:
    extremes = torch.tensor([0, -1, 2**31 - 1, -(2**31), 1, 2**31 - 2], dtype=torch.int32)
    noise = gumbel_noise(extremes)
    assert noise.isfinite().all()
    assert noise.min() > -3.0
    assert noise.max() < 22.5
