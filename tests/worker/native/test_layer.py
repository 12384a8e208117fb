"""What lies between a layer's products, by native kernels and by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import WIDTHS, kernels

from streamserve.worker.models.operations import NativeOperations, TorchOperations

pytestmark = pytest.mark.torch

CASES = given(
    target=st.sampled_from(WIDTHS),
    count=st.sampled_from([1, 2, 33, 200]),
    size=st.sampled_from([2, 6, 16, 37, 64, 576, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 3),
)
FEW = settings(max_examples=25, deadline=None)
EPSILON = 1e-5


def close(got: torch.Tensor, truth: torch.Tensor) -> None:
    """As near as rounding the truth once, or a few of torch's steps, gets."""
    tolerance = 2e-6 if got.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got.double(), truth, rtol=tolerance, atol=tolerance)


def tensors(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [(3 * torch.randn(shape, generator=random)).to(dtype) for shape in shapes]


@FEW
@CASES
def test_norms(target: tuple[str, ...], count: int, size: int, dtype: torch.dtype, seed: int) -> None:
    native = NativeOperations(kernels(target))
    x, delta, weight = tensors(seed, dtype, (count, size), (count, size), (size,))
    exact = TorchOperations()
    close(native.norm(x, weight, EPSILON), exact.norm(x.double(), weight.double(), EPSILON))
    summed = x + delta
    normed = native.add_norm(x, delta, weight, EPSILON)
    assert torch.equal(x, summed)
    close(normed, exact.norm(summed.double(), weight.double(), EPSILON))


@FEW
@CASES
def test_gate(target: tuple[str, ...], count: int, size: int, dtype: torch.dtype, seed: int) -> None:
    (gate_up,) = tensors(seed, dtype, (count, 2 * size))
    gate_up[0, 0], gate_up[-1, 1] = -200, 200
    truth = TorchOperations().gate(gate_up.double())
    close(NativeOperations(kernels(target)).gate(gate_up), truth)


@FEW
@CASES
def test_turn(target: tuple[str, ...], count: int, size: int, dtype: torch.dtype, seed: int) -> None:
    size += size % 2
    heads, cos, sin, q_norm, k_norm = tensors(
        seed, dtype, (count, 9, size), (count, 1, size), (count, 1, size), (size,), (size,)
    )
    counts = {"num_heads": 5, "num_kv_heads": 2, "epsilon": EPSILON}
    for norms in (None, (q_norm, k_norm)):
        exact = None if norms is None else (q_norm.double(), k_norm.double())
        truth = TorchOperations().turn(heads.double(), cos.double(), sin.double(), exact, **counts)
        got = NativeOperations(kernels(target)).turn(heads.clone(), cos, sin, norms, **counts)
        for part, expected in zip(got, truth, strict=True):
            # Sums of two products that may cancel each other.
            tolerance = 1e-4 if dtype == torch.float32 else 2e-1
            torch.testing.assert_close(part.double(), expected, rtol=1e-2, atol=tolerance)
