"""Chooses one token for each row of logits.

First come the rules of the requests that have any: allowed ids, bad words, min_tokens, logit bias, penalties
(`logit_rules`). Log probabilities are those from before. A step without such requests skips all that.

Filters come in the usual order, each on what the one before left over: temperature, min_p, top_k, top_p.
Rows are split by what the host knows about them: greedy ones take the argmax; those without top_k and top_p
draw from the whole vocabulary; the others are cut to a sorted list of candidates first, which is short
unless the distribution is flat. On a GPU kernels do all of this for any mix of rows and nothing is waited for
(`triton_sampler`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from streamserve.engine.step import Int32Array
from streamserve.messages import Logprobs
from streamserve.worker.gumbel import gumbel_noise, noise_bits, row_keys
from streamserve.worker.link import DeviceLink
from streamserve.worker.logit_rules import LogitRules
from streamserve.worker.logprobs import DeviceLogprobs, read_logprobs
from streamserve.worker.sampling_columns import SamplingColumns
from streamserve.worker.token_pool import TokenPool
from streamserve.worker.triton_launcher import can_launch

if TYPE_CHECKING:
    from streamserve.worker.triton_sampler import TritonSampler

# Lengths of candidate lists: a row goes on to the next one only if its nucleus does not fit. The likeliest
# few hundred are found ten times faster than a vocabulary is sorted.
CANDIDATES = (512, 4096)
# Elements of noise made at a time, which bounds memory and keeps the passes over it in the CPU's cache.
_NOISE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one step's logits.

    Attributes:
        token_ids: int32[k] on the device; nothing writes there later.
        report: log probabilities of `token_ids`; None when no slot asked.
    """

    token_ids: torch.Tensor
    report: LogprobReport | None = None


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Log probabilities of the tokens of a step, still on the device.

    Attributes:
        read: a row for each slot that asked.
        asking: int64[a], the places of those among all that sampled.
        num_rows: k, how many sampled.
    """

    read: DeviceLogprobs
    asking: npt.NDArray[np.int64]
    num_rows: int

    def among_all(self, read: Logprobs) -> Logprobs:
        """k rows, those of `read` and zeros for slots that did not ask.

        Args:
            read: `self.read` on the host.
        """
        if len(self.asking) == self.num_rows:
            return read
        num_top = read.top.shape[1]
        chosen = np.zeros(self.num_rows, dtype=np.float32)
        top_ids = np.zeros((self.num_rows, num_top), dtype=np.int32)
        top = np.zeros((self.num_rows, num_top), dtype=np.float32)
        chosen[self.asking], top_ids[self.asking], top[self.asking] = read.chosen, read.top_ids, read.top
        return Logprobs(chosen, top_ids, top)


class Sampler:
    """Samples for the slots of a batch.

    Args:
        columns: the slots' settings.
        pool: known tokens of every slot.
        vocab_size: width of the logits.
        device: where the logits are.
        use_kernels: choose with Triton kernels; None does so on CUDA where Triton can launch them.
    """

    def __init__(
        self,
        columns: SamplingColumns,
        pool: TokenPool,
        vocab_size: int,
        device: torch.device,
        *,
        use_kernels: bool | None = None,
    ) -> None:
        self._columns = columns
        self._vocab_size = vocab_size
        self._device = device
        self._link = pool.link
        self._rules = LogitRules(columns, pool, vocab_size)
        self._all_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._list_lengths = [length for length in CANDIDATES if length < vocab_size] + [vocab_size]
        if use_kernels is None:
            use_kernels = device.type == "cuda" and can_launch()
        self._kernels = _kernels(columns, vocab_size, pool.link) if use_kernels else None

    def sample(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> Sampled:
        """One token id for each row. Hot: once a step.

        Args:
            logits: float32[k, vocab_size]; overwritten.
            slots: int32[k], whose settings apply to each row.
            positions: int32[k], known tokens of each row before this one; all of them are in the pool.
        """
        columns = self._columns
        if columns.is_plain[slots].all():
            return Sampled(self._choose(logits, slots, positions))
        asking = np.flatnonzero(columns.wants_logprobs[slots])
        has_rules = columns.has_rules[slots].any()
        is_untouched = len(asking) == len(slots) and not has_rules and columns.is_greedy[slots].all()
        raw = logits if is_untouched else logits.index_select(0, self._link.upload(asking))
        if has_rules:
            self._rules.apply(logits, slots, positions)
        token_ids = self._choose(logits, slots, positions)
        if len(asking) == 0:
            return Sampled(token_ids)
        return Sampled(token_ids, self._report(raw, asking, token_ids, slots))

    def _report(
        self, raw: torch.Tensor, asking: npt.NDArray[np.int64], token_ids: torch.Tensor, slots: Int32Array
    ) -> LogprobReport:
        """Log probabilities by `raw`, the untouched logits of the rows `asking`."""
        num_top = int(self._columns.num_top[slots[asking]].max())
        chosen_ids = token_ids.index_select(0, self._link.upload(asking)).to(torch.int64)
        return LogprobReport(read_logprobs(raw, chosen_ids, num_top), asking, len(slots))

    def _choose(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """int32[k] on the device, by temperature and filters; overwrites `logits`."""
        greedy = self._columns.is_greedy[slots]
        if greedy.all():
            return likeliest(logits).to(torch.int32)
        if self._kernels is not None:
            return self._kernels.choose(logits, slots, positions)
        cut = (self._columns.top_k[slots] < self._vocab_size) | (self._columns.top_p[slots] < 1.0)
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for chosen, draw in (
            (greedy, self._take_likeliest),
            (~greedy & ~cut, self._draw_from_all),
            (~greedy & cut, self._draw_from_candidates),
        ):
            if chosen.all():
                token_ids = draw(logits, slots, positions)
            elif chosen.any():
                rows = np.flatnonzero(chosen)
                index = self._link.upload(rows)
                token_ids[index] = draw(logits.index_select(0, index), slots[rows], positions[rows])
        return token_ids.to(torch.int32)

    def _take_likeliest(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return likeliest(logits)

    def _draw_from_all(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        scaled = self._scale(logits, slots)
        keys = self._keys(slots, positions)
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        stride = max(1, _NOISE_ELEMENTS // self._vocab_size)
        for start in range(0, len(slots), stride):
            part = slice(start, start + stride)
            scores = gumbel_noise(noise_bits(keys[part], self._all_ids)).add_(scaled[part])
            torch.argmax(scores, -1, out=token_ids[part])
        return token_ids

    def _draw_from_candidates(
        self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        scaled = self._scale(logits, slots)
        keys = self._keys(slots, positions)
        top_k = self._columns.top_k[slots]
        is_open = top_k == self._vocab_size
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        waiting = np.arange(len(slots))
        for length in self._list_lengths:
            rows = waiting[(top_k[waiting] <= length) | is_open[waiting]]
            if len(rows) == 0:
                continue
            any_open = bool(is_open[rows].any())
            width = length if any_open else int(top_k[rows].max())
            index = self._link.upload(rows)
            token_ids[index], complete = self._draw_within(
                scaled.index_select(0, index), keys.index_select(0, index), slots[rows], width, any_open
            )
            # The one question put to the device, and only when some row has top_p alone.
            done = rows[complete.cpu().numpy()] if any_open and width < self._vocab_size else rows
            waiting = np.setdiff1d(waiting, done, assume_unique=True)
            if len(waiting) == 0:
                break
        return token_ids

    def _draw_within(
        self, scaled: torch.Tensor, keys: torch.Tensor, slots: Int32Array, width: int, any_open: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws each row from its `width` likeliest tokens: ids int64[r]; bool[r], was that wide enough?"""
        values, candidates, complete = cut_candidates(
            scaled,
            self._link.upload(self._columns.top_k[slots]),
            self._link.upload(self._columns.top_p[slots]),
            width,
            any_open,
        )
        noise = gumbel_noise(noise_bits(keys, candidates.to(torch.int32)))
        choice = noise.add_(values).argmax(-1, keepdim=True)
        return candidates.gather(1, choice).squeeze(1), complete

    def _scale(self, logits: torch.Tensor, slots: Int32Array) -> torch.Tensor:
        """Divides by the temperature and cuts by min_p, in place."""
        logits.div_(self._link.upload(self._columns.temperature[slots]).unsqueeze(1))
        min_p = self._columns.min_p[slots]
        if min_p.any():
            with np.errstate(divide="ignore"):
                log_min_p = self._link.upload(np.log(min_p)).unsqueeze(1)
            floor = logits.amax(-1, keepdim=True) + log_min_p
            logits.masked_fill_(logits < floor, -torch.inf)
        return logits

    def _keys(self, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return self._link.upload(row_keys(self._columns.seed_keys[slots], positions).view(np.int32))


def _kernels(columns: SamplingColumns, vocab_size: int, link: DeviceLink) -> TritonSampler:
    from streamserve.worker.triton_sampler import TritonSampler

    return TritonSampler(columns, vocab_size, link.device, link)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """int64[k], the first greatest of each row [k, vocab_size]."""
    if logits.device.type == "cpu":
        # Of the two, NumPy's compares many numbers at a time.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def cut_candidates(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int, any_open: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, cut by top_k, then by top_p over what top_k left.

    Args:
        scaled: float32[r, v], logits after temperature and min_p.
        top_k: int64[r]; v keeps all: such a row is open.
        top_p: float32[r].
        width: how many tokens to look at; at least the top_k of every row that is not open.
        any_open: whether there are open rows, whose top_p is a share of the whole vocabulary.

    Returns:
        values float32[r, width], -inf where cut; token ids int64[r, width]; and bool[r], whether no token
        beyond `width` would have been kept. The likeliest token is always kept.
    """
    values, token_ids = scaled.topk(width)
    likeliest = values[:, :1]
    behind_top_k = torch.arange(width, device=scaled.device) >= top_k.unsqueeze(1)
    weights = (values - likeliest).exp_().masked_fill_(behind_top_k, 0.0)
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1]
    is_open = top_k == scaled.shape[1]
    if any_open:
        total = torch.where(is_open, (scaled - likeliest).exp_().sum(-1), total)
    nucleus = (top_p * total).unsqueeze(1)
    # A token is kept while the mass before it is short of top_p: the one that crosses the line is in.
    is_cut = behind_top_k.logical_or_(cumulated - weights >= nucleus)
    is_cut[:, 0].fill_(False)
    complete = ~is_open | (cumulated[:, -1:] >= nucleus).squeeze(1)
    return values.masked_fill(is_cut, -torch.inf), token_ids, complete
