"""What a model asks of attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The same in all layers.

    Attributes:
        num_heads: query heads; a multiple of the cache's KV heads.
        sliding_window: how many keys a query sees, its own the last of them; 0 is all.
        soft_cap: scores are squeezed into (-soft_cap, soft_cap) before the softmax; 0 is off.
    """

    num_heads: int
    sliding_window: int = 0
    soft_cap: float = 0.0
