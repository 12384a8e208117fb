from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import safe_open

from streamserve.artifacts.safetensors_file import TensorSource, to_bfloat16, write_safetensors


def source(name: str, values: np.ndarray, rows: int) -> TensorSource:
    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, len(values), rows):
            yield values[start : start + rows]

    return TensorSource(name, values.shape, pieces)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", np.float32), ("float16", np.float16)])
def test_the_library_reads_back_what_was_written(tmp_path: Path, dtype: str, stored: type) -> None:
    rng = np.random.default_rng(0)
    tensors = {"a.weight": rng.standard_normal((7, 5)), "b": rng.standard_normal(3), "é": np.ones((2, 1, 4))}
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    shares: list[float] = []
    path = tmp_path / "model.safetensors"
    write_safetensors(path, dtype, [source(n, v, 2) for n, v in tensors.items()], shares.append)
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
        for name, values in tensors.items():
            np.testing.assert_array_equal(file.get_tensor(name), values.astype(stored))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_bfloat16_is_declared_and_stored_in_two_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = np.array([[1.0, -2.5], [3.0e38, 1e-40]], dtype=np.float32)
    write_safetensors(path, "bfloat16", [source("w", values, 1)], lambda _: None)
    with safe_open(path, "np") as file:
        assert file.get_slice("w").get_dtype() == "BF16"
    assert path.read_bytes()[-8:] == to_bfloat16(values).tobytes()


def test_a_source_that_yields_too_little_is_a_bug(tmp_path: Path) -> None:
    short = TensorSource("w", (4,), lambda: iter([np.zeros(3, np.float32)]))
    with pytest.raises(AssertionError, match="w"):
        write_safetensors(tmp_path / "m", "float32", [short], lambda _: None)


@given(arrays(np.uint32, st.integers(1, 16)))
def test_bfloat16_rounds_to_nearest_even(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    result = to_bfloat16(values)
    for exact, got in zip(values, result, strict=True):
        back = np.array([int(got) << 16], dtype=np.uint32).view(np.float32)[0]
        if np.isnan(exact):
            assert np.isnan(back)
            continue
        assert np.signbit(back) == np.signbit(exact)
        low = int(np.array([exact]).view(np.uint32)[0]) >> 16
        # Distances in float64 are exact. Infinity stands where the next value would be.
        below, above = (_widen(low), _widen(low + 1))
        distance = abs(float(exact)) - below, above - abs(float(exact))
        if distance[0] == distance[1]:
            assert int(got) % 2 == 0
        else:
            assert int(got) == (low if distance[0] < distance[1] else low + 1)


def _widen(bits: int) -> float:
    """The magnitude of a bfloat16, with infinity read as the next power of two."""
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    return mantissa * 2.0**-133 if exponent == 0 else (128 + mantissa) * 2.0 ** (exponent - 134)
