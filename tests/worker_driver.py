"""A scheduler in miniature for tests of the worker: keeps slots and blocks by hand, writes StepDiffs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamserve.engine.step import EMPTY, Join, StepDiff, StepResult
from streamserve.messages import Logprobs
from streamserve.sampling import SamplingParams

LogprobRow = tuple[float, list[int], list[float]]


@dataclass
class Running:
    """One request as the driver sees it.

    Where its parameters ask for log probabilities: `logprobs` has those of each output token, and
    `prompt_logprobs` those of prompt tokens by their position, as (chosen, top ids, top).
    """

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    slot: int | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: dict[int, LogprobRow] = field(default_factory=dict)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.params.max_tokens


class Driver:
    """Runs requests through `execute` (a Worker's or a fake's) with at most `budget` tokens a step.

    Slots and blocks are handed out last-freed first, so that stale rows are met as soon as possible.
    """

    def __init__(
        self,
        execute: Callable[[StepDiff], StepResult],
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        budget: int,
    ) -> None:
        self.execute = execute
        self.block_size = block_size
        self.budget = budget
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(num_blocks))
        self.owners = np.zeros(num_blocks, dtype=int)
        self.requests: list[Running] = []
        self.leaves: list[int] = []
        self.step_number = 0
        self.last: tuple[list[int], list[int]] | None = None

    def add(
        self, prompt: Sequence[int], params: SamplingParams, shared_with: Running | None = None
    ) -> Running:
        """A new request; it joins at the next step. Full blocks in common with `shared_with` are shared."""
        request = Running(list(prompt), len(prompt), params)
        if shared_with is not None:
            self._share(request, shared_with)
        self.requests.append(request)
        return request

    def leave(self, request: Running, *, forget: bool = False) -> None:
        """Takes the request's slot and blocks away (preemption); `forget` drops it for good."""
        if request.slot is not None:
            self.leaves.append(request.slot)
            self.free_slots.append(request.slot)
        for block in reversed(request.blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free_blocks.append(block)
        request.slot, request.num_computed, request.blocks = None, 0, []
        if forget:
            self.requests.remove(request)

    def step(self) -> StepDiff:
        """Schedules, runs and settles one step; returns what it sent."""
        joins: list[Join] = []
        appends: list[tuple[int, int]] = []
        scheduled: list[tuple[Running, int]] = []
        budget = self.budget
        for request in self.requests:
            if request.is_done or budget == 0:
                continue
            count = min(len(request.tokens) - request.num_computed, budget)
            new_blocks = self._allocate(request, request.num_computed + count)
            if request.slot is None:
                request.slot = self.free_slots.pop()
                joins.append(_join(request))
            else:
                appends += [(request.slot, block) for block in new_blocks]
            scheduled.append((request, count))
            budget -= count
        diff = self._diff(joins, appends, scheduled)
        self._settle(self.execute(diff), scheduled)
        return diff

    def run(self, on_step: Callable[[], Any] = lambda: None) -> None:
        """Steps until all requests are done."""
        while not all(request.is_done for request in self.requests):
            on_step()
            self.step()

    def _share(self, request: Running, other: Running) -> None:
        count = 0
        limit = min(len(request.tokens) - 1, other.num_computed) // self.block_size
        while count < limit and self._block(request, count) == self._block(other, count):
            count += 1
        request.blocks = other.blocks[:count]
        self.owners[request.blocks] += 1
        request.num_computed = count * self.block_size

    def _block(self, request: Running, index: int) -> list[int]:
        return request.tokens[index * self.block_size : (index + 1) * self.block_size]

    def _allocate(self, request: Running, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self.block_size) - len(request.blocks)
        new_blocks = [self.free_blocks.pop() for _ in range(needed)]
        self.owners[new_blocks] += 1
        request.blocks = request.blocks + new_blocks
        return new_blocks

    def _diff(
        self,
        joins: list[Join],
        appends: list[tuple[int, int]],
        scheduled: list[tuple[Running, int]],
    ) -> StepDiff:
        slots = [request.slot for request, _ in scheduled if request.slot is not None]
        counts = [count for _, count in scheduled]
        same = self.last == (slots, counts)
        self.last = (slots, counts)
        self.step_number += 1
        leaves, self.leaves = self.leaves, []
        return StepDiff(
            step=self.step_number,
            leaves=_int32(leaves),
            joins=joins,
            append_slots=_int32(slot for slot, _ in appends),
            append_blocks=_int32(block for _, block in appends),
            slots=None if same else _int32(slots),
            num_tokens=None if same else _int32(counts),
        )

    def _settle(self, result: StepResult, scheduled: list[tuple[Running, int]]) -> None:
        assert result.step == self.step_number
        sampled = []
        for request, count in scheduled:
            request.num_computed += count
            if request.num_computed == len(request.tokens):
                sampled.append(request)
        assert result.slots.tolist() == [request.slot for request in sampled]
        assert result.token_ids.dtype == np.int32
        self._note_logprobs(result, sampled)
        for request, token_id in zip(sampled, result.token_ids.tolist(), strict=True):
            request.tokens.append(token_id)
            if request.is_done:
                self.leave(request)

    def _note_logprobs(self, result: StepResult, sampled: list[Running]) -> None:
        asked = [request.params.logprobs for request in sampled]
        assert (result.logprobs is None) == all(num_top is None for num_top in asked)
        if result.logprobs is not None:
            assert result.logprobs.top.shape == (len(sampled), max(n for n in asked if n is not None))
            for index, (request, num_top) in enumerate(zip(sampled, asked, strict=True)):
                if num_top is not None:
                    request.logprobs.append(_row(result.logprobs, index, num_top))
        by_slot = {request.slot: request for request in self.requests if request.slot is not None}
        for part in result.prompt_logprobs:
            request = by_slot[part.slot]
            num_top = request.params.prompt_logprobs
            assert num_top is not None
            assert part.logprobs.top.shape == (len(part.logprobs.chosen), num_top)
            for index in range(len(part.logprobs.chosen)):
                request.prompt_logprobs[part.start + index] = _row(part.logprobs, index, num_top)


def logprobs_of(sampled: Any) -> Logprobs | None:
    """What a `Sampled` has to say of its tokens, on the host."""
    if sampled.report is None:
        return None
    return sampled.report.among_all(Logprobs(*(part.numpy() for part in sampled.report.read.tensors())))


def _row(logprobs: Logprobs, index: int, num_top: int) -> LogprobRow:
    columns = (logprobs.chosen, logprobs.top_ids, logprobs.top)
    assert [column.dtype for column in columns] == [np.float32, np.int32, np.float32]
    chosen, top_ids, top = (column[index].tolist() for column in columns)
    return chosen, top_ids[:num_top], top[:num_top]


def _join(request: Running) -> Join:
    assert request.slot is not None
    return Join(
        slot=request.slot,
        tokens=_int32(request.tokens),
        num_prompt=request.num_prompt,
        num_computed=request.num_computed,
        blocks=_int32(request.blocks),
        params=request.params,
    )


def _int32(values: Iterable[int]) -> Any:
    array = np.fromiter(values, dtype=np.int32)
    return array if len(array) else EMPTY
