"""Writes a safetensors file front to back, in pieces, so that memory does not grow with the model.

Layout: u64 length of the header, the header (JSON, padded with spaces to 8 bytes), then the tensors back to
back in the order of the header. All tensors here have one number format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

_FORMATS = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that is read when its turn has come.

    Attributes:
        name: its name in the file.
        shape: its shape.
        pieces: yields its values in C order, float32, in arrays of any shape.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Float32Array]]


def write_safetensors(
    path: Path, dtype: str, tensors: Sequence[TensorSource], progress: Callable[[float], None]
) -> None:
    """Writes `tensors` as `dtype` (float32, float16 or bfloat16), telling `progress` the share done."""
    code, width = _FORMATS[dtype]
    encode = _ENCODERS[dtype]
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    done = 0
    with path.open("wb") as file:
        file.write(_header(code, width, tensors))
        for tensor in tensors:
            expected = done + math.prod(tensor.shape)
            for piece in tensor.pieces():
                file.write(encode(piece).data)
                done += piece.size
            assert done == expected, (tensor.name, tensor.shape, done, expected)
            progress(done / total)


def to_bfloat16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """The bits of `values` as bfloat16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    # Rounding can carry a NaN's payload over into the exponent and sign.
    nan = np.isnan(values)
    if nan.any():
        result[nan] = 0x7FC0
    return result


def _to_float16(values: Float32Array) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(values, dtype=np.float16)


def _as_float32(values: Float32Array) -> Float32Array:
    return np.ascontiguousarray(values)


_ENCODERS: Mapping[str, Callable[[Float32Array], npt.NDArray[Any]]] = {
    "float32": _as_float32,
    "float16": _to_float16,
    "bfloat16": to_bfloat16,
}


def _header(code: str, width: int, tensors: Iterable[TensorSource]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + math.prod(tensor.shape) * width
        entries[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
