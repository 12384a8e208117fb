"""The live answers of a frontend: what they are doing, how to end one by its id, and what is counted of them.

    with service.registry.track(answer_id, tenant, generations) as record:
        async for delta in client.generate(generations[choice]):
            record.observe(len(delta.tokens), choice)     # once a delta, before anything is held back
            ...
        record.finish("stop", choice)                     # stop, length or abort; what the client is told

A choice that is not finished when the `with` ends is counted as failed if an error ended it, and as aborted
if anything else did: a client that leaves cancels the task or closes the iterator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from streamserve.errors import Expired, Overloaded
from streamserve.frontend.metrics import Latencies, Metrics, Sizes
from streamserve.sampling import SamplingParams

COUNT_INTERVAL_S = 0.2


class Generation(Protocol):
    """What is asked of a generation here (streamserve.frontend.client.Generation)."""

    @property
    def prompt(self) -> Any:
        """Token ids."""

    @property
    def params(self) -> SamplingParams:
        """Sampling settings."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; known with the first delta."""

    @property
    def began_s(self) -> float | None:
        """Since when the engine runs it, monotonic; known with the first delta or at the end."""

    def cancel(self) -> None:
        """Ends it at once; what has come so far stands."""


class Meter:
    """Observes one choice of an answer. Times are monotonic seconds.

    Attributes:
        num_tokens: generated so far.
    """

    __slots__ = ("_count_at_s", "_first_s", "_generation", "_is_finished", "_key", "_last_s", "_metrics",
                 "_num_counted", "_observe_gap", "_started_s", "num_tokens")  # fmt: skip

    def __init__(self, metrics: Metrics, tenant: str, generation: Generation) -> None:
        self.num_tokens = 0
        self._metrics = metrics
        self._key = metrics.of_key(tenant)
        self._generation = generation
        self._is_finished = False
        self._observe_gap = metrics.latency.between_tokens.observe
        self._num_counted = 0
        self._started_s = time.monotonic()
        self._first_s = self._last_s = self._count_at_s = 0.0

    def observe(self, num_tokens: int) -> None:
        """Takes note of tokens that came at once. Hot: once a delta."""
        if not num_tokens:
            return
        now = time.monotonic()
        if self.num_tokens:
            # Those of one delta share the time since the last one.
            self._observe_gap((now - self._last_s) / num_tokens, num_tokens)
        else:
            self._start(now)
        self._last_s = now
        self.num_tokens += num_tokens
        if now >= self._count_at_s:
            self._count(now)

    def _count(self, now: float) -> None:
        """Brings the counters up to date; a moment later is early enough for those who read them."""
        num_new = self.num_tokens - self._num_counted
        self._num_counted = self.num_tokens
        self._count_at_s = now + COUNT_INTERVAL_S
        self._metrics.generation_tokens.add(num_new)
        self._key.generation_tokens.add(num_new)

    def _start(self, now: float) -> None:
        generation, metrics = self._generation, self._metrics
        num_prompt, num_cached = len(generation.prompt), generation.cached_tokens
        self._first_s = now
        metrics.latency.first_token.observe(now - self._started_s)
        metrics.prompt_tokens.add(num_prompt)
        metrics.cached_tokens.add(num_cached)
        metrics.computed_by_source.add(num_prompt - num_cached)
        metrics.found_by_source.add(num_cached)
        metrics.cached_on_device.add(num_cached)
        self._key.prompt_tokens.add(num_prompt)

    def finish(self, reason: str) -> None:
        """Counts the end, once."""
        if self._is_finished:
            return
        self._is_finished = True
        metrics, now = self._metrics, time.monotonic()
        self._count(now)
        metrics.finished[reason].add()
        self._key.requests.add()
        self._observe_times(metrics.latency, now)
        self._observe_sizes(metrics.sizes)

    def _observe_times(self, latency: Latencies, now: float) -> None:
        """How long it took as a whole, and its parts as far as it got."""
        latency.whole.observe(now - self._started_s)
        began_s = self._generation.began_s
        if began_s is not None:
            latency.queue.observe(began_s - self._started_s)
        if not self.num_tokens:
            return
        if began_s is not None:
            latency.prefill.observe(self._first_s - began_s)
            latency.inference.observe(self._last_s - began_s)
        decode_s = self._last_s - self._first_s
        latency.decode.observe(decode_s)
        if self.num_tokens > 1:
            latency.per_token.observe(decode_s / (self.num_tokens - 1))

    def _observe_sizes(self, sizes: Sizes) -> None:
        generation, num_prompt = self._generation, len(self._generation.prompt)
        sizes.prompt.observe(num_prompt)
        if self.num_tokens:
            sizes.computed.observe(num_prompt - generation.cached_tokens)
        sizes.generated.observe(self.num_tokens)
        sizes.max_tokens.observe(generation.params.max_tokens)


class Record:
    """One live answer.

    Attributes:
        id: its id, as the client knows it.
        tenant: name of the API key that it was asked with.
    """

    def __init__(
        self, answer_id: str, tenant: str, generations: Sequence[Generation], metrics: Metrics
    ) -> None:
        self.id = answer_id
        self.tenant = tenant
        self._generations = generations
        self._meters = [Meter(metrics, tenant, generation) for generation in generations]
        self._created_s = time.time()
        self._is_cancelled = False

    def meter(self, choice: int) -> Meter:
        """What observes one of the generations, for whoever does so very often."""
        return self._meters[choice]

    def observe(self, num_tokens: int, choice: int = 0) -> None:
        """Takes note of tokens that came at once for one of the generations. Hot: once a delta."""
        self._meters[choice].observe(num_tokens)

    def finish(self, reason: str, choice: int = 0) -> None:
        """Takes note that a choice has ended, and why: `stop`, `length` or `abort`."""
        self._meters[choice].finish(reason)

    def cancel(self) -> None:
        """Ends all its generations; the answer then ends with the text so far and the reason `abort`."""
        self._is_cancelled = True
        for generation in self._generations:
            generation.cancel()

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, all choices together."""
        return sum(meter.num_tokens for meter in self._meters)

    @property
    def longest(self) -> int:
        """Tokens of the choice that has most."""
        return max((meter.num_tokens for meter in self._meters), default=0)

    def describe(self, *, is_detached: bool = False) -> dict[str, Any]:
        """What GET /v1/streams/{id} says of it.

        Args:
            is_detached: nobody is connected, and it goes on for who comes back.
        """
        num_tokens = self.num_tokens
        status = "detached" if is_detached else "running" if num_tokens else "queued"
        if self._is_cancelled:
            status = "cancelled"
        return {
            "id": self.id,
            "object": "stream",
            "status": status,
            "created": int(self._created_s),
            "age_seconds": round(max(0.0, time.time() - self._created_s), 3),
            "choices": len(self._generations),
            "prompt_tokens": sum(len(generation.prompt) for generation in self._generations),
            "cached_tokens": sum(generation.cached_tokens for generation in self._generations),
            "completion_tokens": num_tokens,
        }

    def close(self, reason: str | None) -> None:
        """Counts the choices that nobody has finished, unless nothing of the answer ever ran."""
        if reason is not None:
            for meter in self._meters:
                meter.finish(reason)


class Registry:
    """All live answers of this frontend.

    Args:
        metrics: where they are counted.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics()
        # Clients choose ids, so several live answers may share one.
        self._records: dict[str, list[Record]] = {}

    @contextmanager
    def track(self, answer_id: str, tenant: str, generations: Sequence[Generation]) -> Iterator[Record]:
        """Lists an answer for as long as it runs.

        Args:
            answer_id: the id in the answer.
            tenant: name of the API key that it was asked with.
            generations: one for each of its choices.
        """
        metrics = self.metrics
        record = Record(answer_id, tenant, generations, metrics)
        self._records.setdefault(answer_id, []).append(record)
        metrics.streams_open.add()
        reason: str | None = "abort"
        try:
            yield record
        except Overloaded:
            # Turned away before anything ran; the queue itself counts those.
            reason = None
            raise
        except Expired:
            metrics.rejected["max_queue_time"].add()
            reason = None
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            record.close(reason)
            if reason is not None:
                metrics.sizes.choices.observe(len(generations))
                metrics.sizes.longest.observe(record.longest)
            metrics.streams_open.add(-1)
            self._forget(record)

    def find(self, answer_id: str, tenant: str | None) -> list[Record]:
        """The live answers under an id, the newest last.

        Args:
            tenant: only those of this API key's name; None finds everybody's.
        """
        records = self._records.get(answer_id, ())
        return [record for record in records if tenant is None or record.tenant == tenant]

    def all(self, tenant: str | None) -> list[Record]:
        """All live answers, oldest first, of one API key's name or of everybody."""
        found = [record for records in self._records.values() for record in records]
        return [record for record in found if tenant is None or record.tenant == tenant]

    def _forget(self, record: Record) -> None:
        records = self._records[record.id]
        records.remove(record)
        if not records:
            del self._records[record.id]

    def __len__(self) -> int:
        return sum(len(records) for records in self._records.values())
