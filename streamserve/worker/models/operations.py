"""What a decoder layer does between its matrix products: in plain torch, or by native kernels for a CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import rms_norm, silu

from streamserve.worker.models.rope import rotate
from streamserve.worker.native.operators import Operators

Turned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LayerOperations(Protocol):
    """Hot: each once a layer and step."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMS norm over the last dimension of `x`."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Adds `delta` to `hidden` and returns the norm of that."""

    def turn(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        epsilon: float,
    ) -> Turned:
        """Q, K (both turned) and V.

        Args:
            heads: [t, num_heads + 2 * num_kv_heads, head_dim], q, k and v; may be overwritten.
            cos, signed_sin: [t, 1, head_dim] from `RotaryEmbedding.at`.
            norms: weights of the norms of q's and k's heads that come before, each [head_dim]; None without.
            num_heads, num_kv_heads: of q, and of k and v.
            epsilon: of the norms.
        """

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [t, 2 * inner], gate and up side by side."""


class TorchOperations:
    """On any device; see `LayerOperations`."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """See `LayerOperations.norm`."""
        return rms_norm(x, weight.shape, weight, epsilon)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """See `LayerOperations.add_norm`."""
        return self.norm(hidden.add_(delta), weight, epsilon)

    def turn(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        epsilon: float,
    ) -> Turned:
        """See `LayerOperations.turn`."""
        num_qk = num_heads + num_kv_heads
        turned, v = heads[:, :num_qk], heads[:, num_qk:]
        if norms is not None:
            q = self.norm(turned[:, :num_heads], norms[0], epsilon)
            k = self.norm(turned[:, num_heads:], norms[1], epsilon)
            turned = torch.cat((q, k), 1)
        turned = rotate(turned, cos, signed_sin)
        return turned[:, :num_heads], turned[:, num_heads:], v

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOperations.gate`."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)


class NativeOperations:
    """On a CPU, in float32 or bfloat16; see `LayerOperations`.

    Args:
        operators: the native kernels.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.norm = operators.rms_norm
        self.add_norm = operators.add_rms_norm
        self.gate = operators.silu_mul

    def turn(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        epsilon: float,
    ) -> Turned:
        """See `LayerOperations.turn`; in place."""
        q_norm, k_norm = norms or (None, None)
        self._operators.turn(heads, cos, signed_sin, q_norm, k_norm, num_heads, num_kv_heads, epsilon)
        return heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)  # type: ignore[no-any-return]
