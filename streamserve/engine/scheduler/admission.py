"""Admission: waiting requests get a slot, as long as slots, budget and KV memory last."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.engine.scheduler.kv_cache import KVCache
from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.policy import RequestQueue
from streamserve.engine.scheduler.sharing import newcomer_share
from streamserve.engine.scheduler.states import Request, State
from streamserve.engine.scheduler.table import RequestTable
from streamserve.engine.step import Join


def why_impossible(request: Request, limits: SchedulerLimits) -> str | None:
    """Why `request` could never run to its end, even alone; None if it can."""
    num_known, limit = len(request.tokens), limits.limit(request.num_prompt, request.params.max_tokens)
    if not 1 <= request.num_prompt <= num_known:
        return f"{request.num_prompt} prompt tokens of {num_known}"
    if num_known >= limit:
        return f"{num_known} tokens leave nothing to generate below the limit of {limit}"
    # The K and V of the very last token are never needed.
    if limit - 1 > limits.capacity_tokens:
        return f"{limit} tokens do not fit into a KV cache for {limits.capacity_tokens}"
    if len(request.hashes) > request.num_prompt // limits.block_size:
        return f"{len(request.hashes)} block hashes for {request.num_prompt} prompt tokens"
    return None


@dataclass(frozen=True, slots=True)
class _Blocked:
    """Why the first of the queue could not be admitted: it lacks blocks, or the block with this hash."""

    request: Request
    need: int
    missing_hash: bytes | None


class Admission:
    """Takes requests from the head of the queue.

    A request is admitted only if all its known tokens fit into what is free and not already promised: a
    running prefill is promised the blocks for the rest of its tokens, and each running request one block to
    grow into. That keeps a new request from pushing out one that has just been let in.

    Args:
        limits: sizes.
        table: gives slots.
        kv: gives blocks.
        queue: the waiting requests.

    Attributes:
        begun: those that got their first slot, until somebody takes the list away.
        prompt_tokens: of the requests that got their first slot so far.
        prefix_queries: those of them that were looked up in the prefix cache.
        prefix_hits: those of them that were found there.
    """

    def __init__(
        self, limits: SchedulerLimits, table: RequestTable, kv: KVCache, queue: RequestQueue
    ) -> None:
        self.begun: list[Request] = []
        self.prompt_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._limits = limits
        self._table = table
        self._kv = kv
        self._queue = queue
        self._blocked: _Blocked | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody waits who could come in, if the budget has something left for it.

        Ask before the running requests get their blocks. To give them those changes nothing, since they were
        promised, unless memory is so short that nobody is admitted. A seat kept for one who then finds no
        room would be lost to those who run.
        """
        if not (self._has_seat() and len(self._queue)):
            return False
        self._queue.update()
        request = self._queue.peek()
        return request is not None and self._find_room(request, self._spare_blocks()) is not None

    def admit(
        self, budget: int, left: int, step: int, *, is_shared: bool, document_tokens: int | None = None
    ) -> tuple[list[Join], list[int]]:
        """Admits requests to step `step`: the joins, and how many tokens each runs.

        Args:
            budget: tokens of the step.
            left: those of them that no running request has.
            step: its number.
            is_shared: a running request runs more than one token in it.
            document_tokens: most tokens for one that comes with a document, but for a first one; None for no
                limit.
        """
        joins: list[Join] = []
        counts: list[int] = []
        if left > 0 and self._has_seat() and len(self._queue):
            self._queue.update()
            spare = self._spare_blocks()
            while left > 0 and self._has_seat() and (request := self._queue.peek()) is not None:
                hits = self._find_room(request, spare)
                if hits is None:
                    break
                spare -= self._need(request, hits) + 1
                is_followed = len(self._queue) > 1 and self._table.num_free > 1
                most = newcomer_share(left, budget, is_followed=is_followed, is_shared=is_shared)
                join, count = self._seat(request, hits, most, step, document_tokens)
                is_shared |= count > 1
                joins.append(join)
                counts.append(count)
                left -= count
        return joins, counts

    def _has_seat(self) -> bool:
        """Whether there is a slot, and a token in every later budget for whoever takes it."""
        return self._table.num_free > 0 and self._table.num_running < self._limits.max_num_batched_tokens

    def _spare_blocks(self) -> int:
        """Free blocks that are not promised to a running request."""
        table, size = self._table, self._limits.block_size
        running = table.order
        short = table.num_tokens[running] - table.capacity[running]
        promised = int((-(-short.clip(min=0) // size)).sum())
        return self._kv.pool.num_free - promised - len(running)

    def _need(self, request: Request, hits: list[int]) -> int:
        """Free blocks that all known tokens of `request` take, if it shares `hits`."""
        pool = self._kv.pool
        idle_hits = sum(pool.num_users(block) == 0 for block in hits)
        return self._limits.blocks_for(len(request.tokens)) - len(hits) + idle_hits

    def _find_room(self, request: Request, spare: int) -> list[int] | None:
        """The cached blocks that `request` begins with, or None if it must wait for memory.

        When nothing runs, all blocks are free and any accepted request fits, so nobody waits for ever.
        """
        if self._is_still_blocked(request, spare):
            return None
        hits = self._kv.match(request)
        need = self._need(request, hits)
        if need > spare and self._table.num_running:
            missing = request.hashes[len(hits)] if len(hits) < self._kv.most_hits(request) else None
            self._blocked = _Blocked(request, need, missing)
            return None
        self._blocked = None
        return hits

    def _is_still_blocked(self, request: Request, spare: int) -> bool:
        """Whether `request` had to wait for memory before, and nothing has changed that."""
        blocked = self._blocked
        if blocked is None or blocked.request is not request or not self._table.num_running:
            return False
        # To look a long prompt up again in every step would cost too much; these alone change the answer.
        found_more = blocked.missing_hash is not None and blocked.missing_hash in self._kv.prefix
        return blocked.need > spare and not found_more

    def _seat(
        self, request: Request, hits: list[int], most: int, step: int, document_tokens: int | None
    ) -> tuple[Join, int]:
        limits, table = self._limits, self._table
        tokens = request.tokens
        computed = len(hits) * limits.block_size
        lacking = len(tokens) - computed
        count = min(lacking, most, limits.long_prefill_token_threshold or most)
        is_document = lacking > limits.document_tokens
        if is_document and document_tokens is not None:
            count = min(count, max(document_tokens, 1))
        is_first = request.state is State.WAITING
        if is_first:
            self._count_first(request, computed)
        self._queue.remove(request)
        request.move(State.RUNNING)
        slot = table.join(request, step)
        table.is_document[slot] = is_document
        self._queue.seated(request, lacking if is_first else 0)
        self._kv.adopt(slot, hits)
        self._kv.grow(slot, limits.blocks_for(computed + count) - len(hits))
        join = Join(
            slot=slot,
            tokens=tokens,
            num_prompt=request.num_prompt,
            num_computed=computed,
            blocks=table.block_row(slot).copy(),
            params=request.params,
        )
        return join, count

    def _count_first(self, request: Request, computed: int) -> None:
        request.num_cached = computed
        self.begun.append(request)
        self.prompt_tokens += request.num_prompt
        # A prompt whose log probabilities are wanted is computed, whatever the cache holds.
        if self._kv.caches_prefixes and request.params.prompt_logprobs is None:
            self.prefix_queries += request.num_prompt
            self.prefix_hits += computed
