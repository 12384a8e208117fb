"""Matrix products of bfloat16 weights on a CPU, with the weights in the form it multiplies fastest.

torch hands such a product to oneDNN, which wants weights in blocks. Given a plain matrix it either puts them
into blocks at every call or takes a slower way. `torch.compile` packs them once with the two operators that
are used here. A product too small to be worth oneDNN's set-up is done in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

Product = Callable[[torch.Tensor], torch.Tensor]

# Numbers in a matrix below which float32 is ahead for any count of rows.
_SMALL = 1 << 16
# The count of rows that the blocks are laid out for. Blocks for many rows serve few as well; not so the other
# way round.
_ROWS = 512


def cpu_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """x [t, in_size] → x @ weight.T + bias, with a copy of its own of the weight.

    Args:
        weight: [out_size, in_size].
        bias: [out_size].

    Returns:
        None where nothing is faster than the plain product: another device or dtype, or a build of torch
        without oneDNN.
    """
    if not _is_for_here(weight):
        return None
    if weight.numel() <= _SMALL:
        return _in_float32(weight.float(), None if bias is None else bias.float())
    return _packed(weight, bias)


def product_bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> int | None:
    """Bytes of the copies that `cpu_product` would make; None where it would make none."""
    if not _is_for_here(weight):
        return None
    if weight.numel() <= _SMALL:
        return 4 * (int(weight.numel()) + (0 if bias is None else int(bias.numel())))
    return int(weight.nbytes) if _packs() else None


def packs_weights(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of `dtype` on `device` are multiplied in a form of their own."""
    return device.type == "cpu" and dtype is torch.bfloat16 and _packs()


def _is_for_here(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16


def _packs() -> bool:
    """Whether this build of torch and this processor multiply packed weights."""
    operators: Any = torch.ops.mkldnn
    try:
        is_supported: bool = operators._is_mkldnn_bf16_supported()
        return is_supported and hasattr(operators, "_reorder_linear_weight")
    except (AttributeError, NotImplementedError):
        return False


def _in_float32(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    def product(x: torch.Tensor) -> torch.Tensor:
        return linear(x.float(), weight, bias).to(x.dtype)

    return product


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    if not _packs():
        return None
    operators: Any = torch.ops.mkldnn
    try:
        packed = operators._reorder_linear_weight(weight, _ROWS)
        multiply = operators._linear_pointwise
    except (AttributeError, NotImplementedError):
        return None

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
