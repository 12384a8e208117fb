"""The engine process: `python -m streamserve.engine.process --bootstrap FD`.

Waits for the model, loads it, says so, then loops: rings in, step, rings out. Blocks while there is nothing
to do, so an idle server costs no processor time. Ends when the supervisor says so, or at once when that is
gone.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from streamserve.bootstrap import STOP_ORDER, Bootstrap, ReadyPipe, ResolvedModel
from streamserve.config import Config, cache_root
from streamserve.engine.core import EngineCore
from streamserve.engine.executor.base import Executor
from streamserve.engine.executor.inline import InlineExecutor
from streamserve.engine.executor.overlapped import OverlappedExecutor
from streamserve.engine.executor.threaded import ThreadedExecutor
from streamserve.engine.outbox import Outbox
from streamserve.engine.pacing import StepPacer
from streamserve.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from streamserve.errors import ConfigError
from streamserve.hashing import BlockHasher
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.notice import Notice
from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.ipc.segment import Segment
from streamserve.lifeline import watch_lifeline
from streamserve.logs import configure_logging
from streamserve.worker.spec import WorkerFacts, WorkerSpec, parse_capture_sizes

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
# A deadline may be farther off than poll() can count.
LONGEST_SLEEP_S = 3600.0

# (most requests in a step, token budget of a step) where the operator sets none.
_DEFAULT_BATCH = {"cpu": (64, 512), "cuda": (256, 8192)}
# Tokens in a KV cache block where the operator says nothing. Small ones are shared more often, large ones
# are found faster.
_DEFAULT_BLOCK = {"cpu": 16, "cuda": 64}
_FLASH_ATTN_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Rings:
    """The engine's ends of all channels."""

    inboxes: list[RingReader]
    outboxes: list[Outbox]
    bell: Doorbell


def open_rings(bootstrap: Bootstrap) -> Rings:
    """Attaches to the rings of every frontend."""
    inboxes, outboxes = [], []
    for channel in bootstrap.channels:
        frontend_bell = Doorbell.attach(channel.frontend_bell)
        requests = Segment.attach(channel.request_ring)
        deltas = Segment.attach(channel.delta_ring)
        inboxes.append(RingReader(requests.view, frontend_bell))
        writer = RingWriter(deltas.view, frontend_bell)
        outboxes.append(Outbox(writer, bootstrap.epoch, channel.incarnation))
    return Rings(inboxes, outboxes, Doorbell.attach(bootstrap.channels[0].engine_bell))


def worker_spec(config: Config, device: str, model: ResolvedModel) -> WorkerSpec:
    """What the worker is to serve, with the defaults that depend on the device filled in.

    Raises:
        ConfigError: the token budget is smaller than the batch.
    """
    max_num_seqs, budget = _DEFAULT_BATCH[device]
    max_num_seqs = config.scheduler.max_num_seqs or max_num_seqs
    budget = config.scheduler.max_num_batched_tokens or max(budget, max_num_seqs)
    if budget < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) must not be below --max-num-seqs ({max_num_seqs}): "
            "every request in a step needs at least one token."
        )
    return WorkerSpec(
        model_path=str(model.path),
        load_format=model.load_format,
        dtype=model.dtype,
        device=device,
        seed=config.model.seed or 0,
        max_model_len=config.model.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=config.cache.block_size or _default_block(config.worker.attention_backend, device),
        kv_cache_memory=config.cache.kv_cache_memory,
        num_blocks_override=config.cache.num_gpu_blocks_override,
        cpu_threads=config.worker.cpu_threads,
        attention_backend=config.worker.attention_backend,
        cudagraph_mode="NONE" if config.worker.enforce_eager else config.worker.cudagraph_mode,
        cudagraph_capture_sizes=parse_capture_sizes(config.worker.cudagraph_capture_sizes),
        lazy_graphs=config.worker.lazy_graphs,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        debug_no_sync=config.worker.debug_no_sync,
        compile=config.worker.compile,
        compile_cache=None if config.worker.compile == "none" else str(cache_root() / "compiled"),
    )


def _default_block(attention_backend: str, device: str) -> int:
    return _FLASH_ATTN_BLOCK if attention_backend == "flash_attn" else _DEFAULT_BLOCK[device]


def scheduler_limits(spec: WorkerSpec, facts: WorkerFacts, config: Config) -> SchedulerLimits:
    """What the scheduler may use, from what the worker found."""
    return SchedulerLimits(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        num_blocks=facts.num_blocks,
        block_size=spec.block_size,
        max_model_len=facts.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        eos_token_ids=facts.eos_token_ids,
    )


def hello(bootstrap: Bootstrap, name: str, spec: WorkerSpec, facts: WorkerFacts) -> dict[str, Any]:
    """The body of the HELLO frame."""
    return {
        "epoch": bootstrap.epoch,
        "pid": os.getpid(),
        "model": name,
        "max_model_len": facts.max_model_len,
        "vocab_size": facts.vocab_size,
        "block_size": spec.block_size,
        "num_blocks": facts.num_blocks,
        "kv_capacity_tokens": facts.num_blocks * spec.block_size,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enable_prefix_caching": bootstrap.settings().cache.enable_prefix_caching,
        "eos_token_ids": list(facts.eos_token_ids),
    }


class EngineLoop:
    """Steps while there is work; else has workers use the time, piece by piece; else sleeps on the bell."""

    def __init__(self, core: EngineCore, rings: Rings) -> None:
        self._core = core
        self._rings = rings
        self._stopping = False
        self._next_stats_s = 0.0

    def stop(self, *_: object) -> None:
        """Ends `run` after the current step; safe in a signal handler."""
        self._stopping = True
        self._rings.bell.ring()

    def run(self) -> None:
        """Runs until `stop`."""
        while not self._stopping:
            busy = self._core.step()
            for outbox in self._rings.outboxes:
                if outbox.has_backlog:
                    outbox.flush()
            self._report()
            if not busy and not self._core.work_ahead():
                self._sleep()

    def _report(self) -> None:
        now = time.monotonic()
        if now >= self._next_stats_s:
            self._send_stats(now)

    def _send_stats(self, now: float) -> None:
        self._next_stats_s = now + STATS_INTERVAL_S
        numbers = self._core.statistics()
        for outbox in self._rings.outboxes:
            outbox.stats(numbers)

    def _sleep(self) -> None:
        # The last numbers before a silence must be the true ones: an idle engine sends none until asked.
        self._send_stats(time.monotonic())
        inboxes, outboxes = self._rings.inboxes, self._rings.outboxes
        empty = [inbox.arm() for inbox in inboxes]
        full = [outbox.wait_for_room() for outbox in outboxes if outbox.has_backlog]
        if all(empty) and all(full) and not self._stopping:
            # Without a bell the engine wakes up only for a request whose time in the queue runs out.
            timeout_s = self._core.seconds_to_deadline()
            self._rings.bell.wait(None if timeout_s is None else min(timeout_s, LONGEST_SLEEP_S))
        for inbox in inboxes:
            inbox.disarm()
        for outbox in outboxes:
            outbox.stop_waiting()


def choose_executor(spec: WorkerSpec, overlaps: bool | None) -> Executor:
    """Steps overlap on a GPU unless told otherwise; on a CPU they do if told to, in a thread."""
    if spec.device == "cuda":
        return InlineExecutor(spec) if overlaps is False else OverlappedExecutor(spec)
    return ThreadedExecutor(spec) if overlaps else InlineExecutor(spec)


def serve(bootstrap: Bootstrap, ready: ReadyPipe) -> None:
    """Starts the engine and runs it to its end.

    Raises:
        ConfigError: the model cannot be served as configured.
    """
    config = bootstrap.settings()
    rings = open_rings(bootstrap)
    # Imports torch, which takes seconds: meanwhile the model may arrive.
    device = InlineExecutor.device(config.model.device)
    model = ResolvedModel.wait(Notice.attach(bootstrap.model), rings.bell)
    spec = worker_spec(config, device, model)
    executor = choose_executor(spec, config.scheduler.async_scheduling)
    facts = executor.start(ready.progress)
    hasher = BlockHasher(bytes.fromhex(bootstrap.secret), spec.block_size)
    limits, policy = scheduler_limits(spec, facts, config), config.scheduler.scheduling_policy
    scheduler = Scheduler(limits, hasher, policy)
    core = EngineCore(
        scheduler,
        executor,
        rings.inboxes,
        rings.outboxes,
        bootstrap.epoch,
        pacer=StepPacer(config.scheduler.document_share, config.scheduler.mixed_step_limit),
    )
    loop = EngineLoop(core, rings)
    signal.signal(STOP_ORDER, loop.stop)
    for outbox in rings.outboxes:
        outbox.hello(hello(bootstrap, model.name, spec, facts))
    # What lives now lives for good: keep it out of every later garbage collection.
    gc.collect()
    gc.freeze()
    ready.ready({"num_blocks": facts.num_blocks, "max_model_len": facts.max_model_len, "dtype": facts.dtype})
    loop.run()
    executor.close()


def main() -> int:
    """Entry point of the process; returns its exit code."""
    bootstrap = Bootstrap.from_argv()
    watch_lifeline(bootstrap.lifeline)
    server = bootstrap.settings().server
    configure_logging("engine", server.log_level, server.log_format)
    ready = ReadyPipe(bootstrap.ready)
    try:
        serve(bootstrap, ready)
    except ConfigError as error:
        ready.failed(str(error))
        return 2
    except MemoryError:
        ready.failed("not enough memory; lower --kv-cache-memory or --max-num-seqs")
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        ready.failed(f"the engine failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
