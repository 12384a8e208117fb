"""A whole engine in one process: real rings, scheduler and worker, with the test as its only frontend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamserve.engine.core import EngineCore
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.executor.threaded import ThreadedExecutor
from streamserve.engine.outbox import Outbox
from streamserve.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from streamserve.hashing import BlockHasher
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import (
    AddRequest,
    Finish,
    Kind,
    Logprobs,
    decode_prompt_logprobs,
    decode_step,
    encode_abort,
    encode_add,
)
from streamserve.sampling import SamplingParams
from streamserve.worker.spec import WorkerSpec

EPOCH = 3
CAPACITY = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """What a test may vary."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    num_blocks: int = 4096
    block_size: int = 16
    enable_prefix_caching: bool = True
    dtype: str = "float32"
    max_model_len: int | None = None
    overlaps: bool = False


class EngineHarness:
    """Drives `EngineCore` step by step and collects what it sends.

    Attributes:
        tokens: what each stream generated so far.
        finish: how each finished stream ended.
        logprobs: a piece for each frame of streams that asked; join them.
        prompt_logprobs: the same for their prompts.
        events: (stream, number of tokens so far) in the order in which they arrived.
    """

    def __init__(self, model_path: Path, settings: EngineSettings | None = None) -> None:
        settings = settings or EngineSettings()
        spec = WorkerSpec(
            model_path=str(model_path),
            load_format="auto",
            dtype=settings.dtype,
            device="cpu",
            seed=0,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            kv_cache_memory=None,
            num_blocks_override=settings.num_blocks,
            cpu_threads=2,
        )
        self._segments = [Segment.create(name, ring_bytes(CAPACITY)) for name in ("requests", "deltas")]
        for segment in self._segments:
            format_ring(segment.view, CAPACITY)
        self._bells = [Doorbell.create(), Doorbell.create()]
        requests, deltas = self._segments
        self._writer = RingWriter(requests.view, self._bells[0])
        self._reader = RingReader(deltas.view, self._bells[1])
        self.executor = ThreadedExecutor(spec) if settings.overlaps else InlineExecutor(spec)
        self.facts = self.executor.start(lambda what, fraction: None)
        self._hasher = BlockHasher(b"k" * 32, settings.block_size)
        limits = SchedulerLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_token_threshold=0,
            num_blocks=self.facts.num_blocks,
            block_size=settings.block_size,
            max_model_len=self.facts.max_model_len,
            enable_prefix_caching=settings.enable_prefix_caching,
            eos_token_ids=self.facts.eos_token_ids,
        )
        self.scheduler = Scheduler(limits, self._hasher)
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            [RingReader(requests.view, self._bells[1])],
            [Outbox(RingWriter(deltas.view, self._bells[1]), EPOCH)],
            EPOCH,
        )
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[Logprobs]] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.events: list[tuple[int, int]] = []

    def __enter__(self) -> EngineHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()
        for closable in (*self._segments, *self._bells):
            closable.close()

    def add(self, stream: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Sends one request through the request ring."""
        tokens = np.array(prompt, dtype=np.int32)
        request = AddRequest(
            stream=stream,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            block_hashes=self._hasher.chain(tokens),
        )
        self.tokens[stream] = []
        parts = encode_add(EPOCH, request)
        assert self._writer.try_push(Kind.ADD, parts)

    def abort(self, *streams: int) -> None:
        """Says that nobody waits for these streams any more."""
        assert self._writer.try_push(Kind.ABORT, encode_abort(EPOCH, streams))

    def step(self) -> bool:
        """One engine step and everything that came of it."""
        busy = self.core.step()
        for kind, payload in self._reader.read():
            if kind == Kind.STEP:
                self._take(payload)
            elif kind == Kind.PROMPT_LOGPROBS:
                stream, _, logprobs = decode_prompt_logprobs(payload)
                self.prompt_logprobs.setdefault(stream, []).append(logprobs)
        self._reader.release()
        return busy

    def _take(self, payload: memoryview) -> None:
        out = decode_step(payload)
        at = 0
        for row, (stream, count, finish) in enumerate(out.rows()):
            self.tokens[stream] += out.tokens[at : at + count].tolist()
            if out.logprobs is not None:
                self.logprobs.setdefault(stream, []).append(out.logprobs.rows(slice(at, at + count)))
            at += count
            self.events.append((stream, len(self.tokens[stream])))
            if out.cached is not None and stream not in self.cached:
                self.cached[stream] = int(out.cached[row])
            if finish:
                self.finish[stream] = Finish(finish)

    def run_until_idle(self, max_steps: int = 100_000) -> None:
        """Steps until every stream has finished."""
        for _ in range(max_steps):
            if not self.step() and len(self.finish) == len(self.tokens):
                return
        raise AssertionError(f"not idle after {max_steps} steps")

    def generate(self, prompts: Iterable[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Runs all prompts at once and returns their tokens."""
        first = len(self.tokens)
        streams = []
        for stream, prompt in enumerate(prompts, first):
            self.add(stream, prompt, params)
            streams.append(stream)
        self.run_until_idle()
        self.scheduler.check_integrity()
        return [self.tokens[stream] for stream in streams]

    def statistics(self) -> dict[str, Any]:
        """The numbers of a STATS frame."""
        return self.core.statistics()
