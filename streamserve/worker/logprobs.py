"""Log probabilities of tokens that were chosen, and of the likeliest ones they were chosen from.

They are those of the model itself: log_softmax of the logits in float32 before anything changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from streamserve.engine.step import PromptLogprobs
from streamserve.messages import Logprobs
from streamserve.worker.batch import PromptSpan
from streamserve.worker.token_pool import TokenPool

# Elements of logits that are made at a time for prompts: bounds memory however long the chunk is.
_LOGITS_TILE = 1 << 22
# Elements that are read at a time: small enough to stay in the CPU's cache and clear of fresh pages.
_READ_TILE = 1 << 19
# Tokens whose largest logit stands for them while the likeliest are looked for.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """`messages.Logprobs` still on the device."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `Logprobs` is made of, in its number formats."""
        return self.chosen, self.top_ids.to(torch.int32), self.top


def read_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> DeviceLogprobs:
    """What `logits` say of `token_ids`.

    Args:
        logits: float32[t, v], only read.
        token_ids: int64[t].
        num_top: how many of the likeliest tokens to report; at most v.
    """
    parts = []
    num_rows, vocab_size = logits.shape
    for rows in _tiles(num_rows, vocab_size, _READ_TILE):
        logprobs = logits[rows].log_softmax(-1)
        top_ids = top_tokens(logits[rows], num_top)
        chosen = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)
        parts.append(DeviceLogprobs(chosen, top_ids, logprobs.gather(1, top_ids)))
    return _join(parts)


def read_prompt_logprobs(
    spans: Sequence[PromptSpan],
    hidden: torch.Tensor,
    output_logits: Callable[[torch.Tensor], torch.Tensor],
    pool: TokenPool,
    vocab_size: int,
) -> DeviceLogprobs:
    """Log probabilities of the prompt tokens that a step predicts, one of `spans` after the other.

    Args:
        spans: what is wanted; at least one.
        hidden: [t, hidden_size], what the model makes of all tokens of the step.
        output_logits: rows of `hidden` → float32[., vocab_size].
        pool: known tokens of every slot.
        vocab_size: width of the logits.
    """
    num_top = min(max(span.num_top for span in spans), vocab_size)
    counts = np.array([span.count for span in spans])
    first_rows = np.array([span.first_row for span in spans])
    starts = np.array([span.start for span in spans])
    slots = np.array([span.slot for span in spans], dtype=np.int32)
    token_ids, _ = pool.spans(slots, starts, starts + counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = pool.link.upload(np.repeat(first_rows, counts) + within)
    parts = [
        read_logprobs(output_logits(hidden.index_select(0, rows[tile])), token_ids[tile], num_top)
        for tile in _tiles(len(rows), vocab_size, _LOGITS_TILE)
    ]
    return _join(parts)


def top_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` likeliest tokens of each row, int64[t, count]: likeliest first, of equals the smaller id.

    That is argmax's rule, so a greedy token is the first. Only the best `count` blocks of tokens are looked
    into, which hold all of them.

    Args:
        logits: float32[t, v].
        count: at most v.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.arange(vocab_size, device=logits.device)
    num_blocks = vocab_size // _BLOCK
    if count >= num_blocks:
        return _order_keys(logits, ids).topk(count).indices
    in_blocks = num_blocks * _BLOCK
    maxima = logits[:, :in_blocks].unflatten(1, (num_blocks, _BLOCK)).amax(-1)
    blocks = _order_keys(maxima, ids[:num_blocks]).topk(count).indices
    candidates = (blocks.unsqueeze(-1) * _BLOCK + ids[:_BLOCK]).flatten(1)
    behind = ids[in_blocks:].expand(num_rows, -1)
    candidates = torch.cat((candidates, behind), 1)
    best = _order_keys(logits.gather(1, candidates), candidates).topk(count).indices
    return candidates.gather(1, best)


def _order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, no two alike in a row, that sort by value and then by falling id.

    A float's bits sort like the float if all but the sign are flipped in negative ones; -0 counts as 0.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = bits.bitwise_xor(bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF))
    return (ordered.to(torch.int64) << 32) + (0x7FFFFFFF - ids)


def _tiles(num_rows: int, vocab_size: int, num_elements: int) -> Iterator[slice]:
    stride = max(1, num_elements // vocab_size)
    return (slice(start, start + stride) for start in range(0, num_rows, stride))


def _join(parts: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
    if len(parts) == 1:
        return parts[0]
    return DeviceLogprobs(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top for part in parts]),
    )


def split_by_span(logprobs: Logprobs, spans: Sequence[PromptSpan]) -> list[PromptLogprobs]:
    """Cuts rows into those of each span, each as wide as its request asked for.

    Args:
        logprobs: what `read_prompt_logprobs` found for `spans`, on the host.
        spans: as given there.
    """
    results = []
    first = 0
    for span in spans:
        rows, width = slice(first, first + span.count), slice(span.num_top)
        first += span.count
        own = Logprobs(logprobs.chosen[rows], logprobs.top_ids[rows, width], logprobs.top[rows, width])
        results.append(PromptLogprobs(span.slot, span.start, own))
    return results
