"""A projection: the one place where a matrix meets the residual stream."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from streamserve.worker.models.cpu_product import Product, cpu_product, product_bytes


class Linear:
    """x @ weight.T + bias.

    Args:
        out_size, in_size: shape of the weight.
        has_bias: whether there is a bias.
        dtype, device: of the parameters, which start uninitialised.
    """

    def __init__(
        self, out_size: int, in_size: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty((out_size, in_size), dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
        self._product: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[t, in_size] → [t, out_size]. Hot: four times a layer and step."""
        if self._product is not None:
            return self._product(x)
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Puts the loaded weight into the form that the processor multiplies fastest.

        Where there is a better form, `weight` is given up for it: nothing can be loaded after this.
        """
        self._product = cpu_product(self.weight, self.bias)
        if self._product is not None:
            del self.weight

    def num_bytes(self, *, packed: bool) -> int:
        """Bytes that it takes, as it is loaded or as it will be packed; to be asked before that."""
        bias = 0 if self.bias is None else int(self.bias.nbytes)
        copies = product_bytes(self.weight, self.bias) if packed else None
        return bias + (int(self.weight.nbytes) if copies is None else copies)

    def destinations(self, parts: dict[str, int]) -> dict[str, torch.Tensor]:
        """Where the tensors of the merged projections in `parts` (name → rows, in order) go."""
        sizes = list(parts.values())
        named = {f"{name}.weight": rows for name, rows in zip(parts, self.weight.split(sizes), strict=True)}
        if self.bias is not None:
            named |= {f"{name}.bias": rows for name, rows in zip(parts, self.bias.split(sizes), strict=True)}
        return named
