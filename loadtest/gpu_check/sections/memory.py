"""What a worker reckoned its memory would come to, against what it came to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from loadtest.gpu_check.model_folder import write_config
from loadtest.gpu_check.results import Record
from loadtest.gpu_check.sections.decode import spec_of
from loadtest.gpu_check.setting import Setting
from loadtest.gpu_check.targets import GRAPH_ESTIMATE, MEMORY_OVERRUN, MEMORY_USED
from streamserve.worker.batch import BatchShape
from streamserve.worker.sizing import trial_steps
from streamserve.worker.spec import MemoryAccount, WorkerFacts
from streamserve.worker.worker import Worker

_GIB = 1 << 30
# As a server has them at its defaults, but for fewer graphs, which would take a minute.
_MAX_NUM_SEQS, _MAX_NUM_TOKENS = 256, 2048
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    write_config(setting.folder / "models" / "large", setting.large)
    changes: dict[str, Any] = {"lazy_graphs": False}
    if setting.is_rehearsal:
        changes |= {"cudagraph_mode": "FULL_AND_PIECEWISE", "num_blocks_override": 40}
        changes |= {"cudagraph_capture_sizes": setting.graph_sizes}
    else:
        changes |= {"max_num_seqs": _MAX_NUM_SEQS, "max_num_batched_tokens": _MAX_NUM_TOKENS}
        changes |= {"cudagraph_capture_sizes": _SIZES}
    spec = spec_of(setting, **changes)
    before = _used(setting)
    worker = Worker(spec)
    facts = worker.start(lambda what, share: None)
    account = facts.memory or _of_a_cpu(facts)
    table = record.table("Memory of the GPU, GiB", "when", "in use", "of the budget", "held by torch")
    _row(record, table, "after the start", account, setting=setting, before=before)
    shape = BatchShape(spec.max_num_seqs, spec.max_num_batched_tokens, facts.max_model_len, spec.block_size)
    for diff in trial_steps(shape):
        worker.execute(diff)
    used = _row(record, table, "after the largest step", account, setting=setting, before=before)
    parts = record.table("What it reckoned, GiB", *asdict(account))
    record.row(parts, *(num_bytes / _GIB for num_bytes in asdict(account).values()))
    _check_graphs(record, worker, account)
    record.target(MEMORY_OVERRUN, used / account.budget)
    record.target(MEMORY_USED, used / account.budget)
    worker.close()


def _check_graphs(record: Record, worker: Worker, account: MemoryAccount) -> None:
    numbers = worker.statistics()
    record.check("all graphs are captured", numbers["graphs_waiting"] == 0, f"{numbers['graphs_captured']}")
    taken = numbers["graphs_bytes"]
    record.note(
        f"graphs took {taken / _GIB:.3f} GiB as they were captured, {account.graphs / _GIB:.3f} reckoned"
    )
    if account.graphs:
        record.target(GRAPH_ESTIMATE, taken / account.graphs)


def _row(
    record: Record, table: Any, when: str, account: MemoryAccount, *, setting: Setting, before: int
) -> int:
    """Bytes in use by this process."""
    used = _used(setting) - before
    held = 0 if setting.device == "cpu" else torch.cuda.memory_reserved()
    record.row(table, when, used / _GIB, used / account.budget, held / _GIB)
    return used


def _used(setting: Setting) -> int:
    """Bytes of the device that somebody uses; nothing is known of a CPU."""
    if setting.device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _of_a_cpu(facts: WorkerFacts) -> MemoryAccount:
    """For a rehearsal: a CPU has no account."""
    cache = facts.num_blocks * facts.kv_block_bytes
    total = facts.weights_bytes + cache
    return MemoryAccount(total, total, facts.weights_bytes, 0, 0, 0, 0, cache)
