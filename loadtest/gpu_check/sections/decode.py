"""How long a decode step of a large model takes, beside the time in which its bytes can be read at all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from loadtest.gpu_check.floor import floor_seconds, kv_bytes, weight_bytes
from loadtest.gpu_check.model_folder import write_config
from loadtest.gpu_check.results import Record, Table
from loadtest.gpu_check.rig import Rig, allocate_cache, load_model
from loadtest.gpu_check.setting import Setting
from loadtest.gpu_check.targets import FULL_BATCHES, SPEEDUP, full_over_floor
from loadtest.gpu_check.timing import copy_bandwidth, synchronize
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.mode import CUDAGraphMode
from streamserve.worker.kv_cache import KVCache
from streamserve.worker.models.config import DecoderConfig
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.model import Model
from streamserve.worker.runner import LaunchedStep
from streamserve.worker.spec import WorkerSpec

# FULL_DECODE_ONLY is FULL as a decode step meets it by default: the graph of a mixed step has more in it.
MODES = {
    "NONE": CUDAGraphMode.NONE,
    "PIECEWISE": CUDAGraphMode.PIECEWISE,
    "FULL": CUDAGraphMode.FULL_DECODE_ONLY,
}
# Steps of a model that is launched and read, with those that go before; contexts grow by as many.
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Large:
    """The large model and its cache, for all sections of a process.

    Attributes:
        config, model, cache: see `Rig`.
        last: tokens that each request has room for.
        bandwidth: bytes per second.
    """

    config: DecoderConfig
    model: LlamaModel
    cache: KVCache
    last: int
    bandwidth: float


def shape_of(setting: Setting) -> BatchShape:
    """Of all steps here."""
    most = max(setting.batches)
    return BatchShape(most, max(most, *setting.graph_sizes), setting.max_model_len, setting.block_size)


def large_model(setting: Setting, shared: dict[str, Any]) -> Large:
    """Made once a process."""
    if "large" not in shared:
        device = torch.device(setting.device)
        bandwidth = copy_bandwidth(device, setting.copy_bytes)
        folder = write_config(setting.folder / "models" / "large", setting.large)
        config, model = load_model(folder, setting.dtype, device)
        last = setting.context + len(setting.batches) * (setting.num_steps + _WARM_UP + 1)
        blocks = max(setting.batches) * -(-last // setting.block_size)
        cache = allocate_cache(config, blocks, setting.block_size, setting.dtype, device)
        shared["large"] = Large(config, model, cache, last, bandwidth)
    large: Large = shared["large"]
    return large


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    large = large_model(setting, shared)
    record.note(f"copying reads and writes {large.bandwidth / 1e12:.3f} TB/s, which floors are reckoned with")
    measured = {}
    table = step_table(setting, record)
    for label, mode in MODES.items():
        measured[label] = measure(
            setting, record, table, large=large, model=large.model, label=label, mode=mode
        )
    for batch in FULL_BATCHES:
        if batch in setting.batches:
            record.target(full_over_floor(batch), measured["FULL"][batch].over_floor)
    least = setting.batches[0]
    record.target(SPEEDUP, measured["NONE"][least].seconds / measured["FULL"][least].seconds)


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes:
    seconds: of a decode step.
    floor: seconds in which its bytes can be read.
    """

    seconds: float
    floor: float

    @property
    def over_floor(self) -> float:
        """How many times the floor it is."""
        return self.seconds / self.floor


def step_table(setting: Setting, record: Record) -> Table:
    """For `measure`."""
    return record.table(
        f"Decode step, {setting.context} tokens of context, {setting.dtype}",
        *("mode", "requests", "ms", "floor ms", "over floor", "tokens/s"),
    )


def measure(
    setting: Setting,
    record: Record,
    table: Table,
    *,
    large: Large,
    model: Model,
    label: str,
    mode: CUDAGraphMode,
) -> dict[int, Step]:
    """Steps of every batch in one mode, a row each.

    Args:
        setting, record, table: where to, and how many.
        large: what is measured.
        model: the large one, or what stands in for it.
        label: for the rows.
        mode: of the graphs.
    """
    rig = Rig(
        setting,
        large.config,
        model,
        large.cache,
        shape=shape_of(setting),
        mode=mode,
        sizes=setting.graph_sizes,
    )
    rig.join(max(setting.batches), setting.context, large.last)
    steps = {}
    for batch in setting.batches:
        seconds = step_seconds(rig, batch, setting.num_steps)
        steps[batch] = step = Step(seconds, _floor(rig, large, batch))
        times = (seconds * 1e3, step.floor * 1e3, step.over_floor, round(batch / seconds))
        record.row(table, label, batch, *times)
    del rig
    gc.collect()
    synchronize(torch.device(setting.device))
    return steps


def step_seconds(rig: Rig, batch: int, num_steps: int) -> float:
    """Median seconds from one step to the next, as a server runs them: each is read once the next one waits.

    Host work counts if the device has to wait for it, and not otherwise.
    """
    launched = rig.decode(batch)

    def turn() -> None:
        nonlocal launched
        launched = _launch_and_read(launched, rig.decode_on)

    for _ in range(_WARM_UP):
        turn()
    moments = [time.perf_counter()]
    for _ in range(num_steps):
        turn()
        moments.append(time.perf_counter())
    launched.result()
    return statistics.median(end - begin for begin, end in pairwise(moments))


def _launch_and_read(launched: LaunchedStep, launch: Callable[[], LaunchedStep]) -> LaunchedStep:
    following = launch()
    launched.result()
    return following


def spec_of(setting: Setting, **changes: Any) -> WorkerSpec:
    """Options of a worker with the large model, at sizes that the steps here stay within."""
    shape = shape_of(setting)
    spec = WorkerSpec(
        model_path=str(setting.folder / "models" / "large"),
        load_format="dummy",
        dtype=setting.dtype,
        device=setting.device,
        seed=0,
        max_model_len=setting.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_tokens,
        block_size=setting.block_size,
        kv_cache_memory=None,
        num_blocks_override=None,
        cpu_threads=0,
    )
    return replace(spec, **changes)


def _floor(rig: Rig, large: Large, batch: int) -> float:
    """Seconds, for the contexts as they are now, which are half a measurement longer than the mean."""
    itemsize = large.cache.keys[0].element_size()
    contexts = rig.batch.num_computed[:batch].tolist()
    num_bytes = weight_bytes(large.config, itemsize) + kv_bytes(large.config, contexts, itemsize)
    return floor_seconds(num_bytes, large.bandwidth)
