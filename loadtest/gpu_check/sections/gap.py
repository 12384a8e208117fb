"""What the host costs a device that has always something to do, and that nothing in a step waits for it."""

from __future__ import annotations

from typing import Any

import torch

from loadtest.gpu_check.results import Record
from loadtest.gpu_check.rig import Rig
from loadtest.gpu_check.sections.decode import Large, large_model, shape_of, step_seconds
from loadtest.gpu_check.setting import Setting
from loadtest.gpu_check.targets import HOST_GAP
from loadtest.gpu_check.timing import device_seconds
from streamserve.sampling import SamplingParams
from streamserve.worker.graphs.mode import CUDAGraphMode

_STEPS = 100
_REPLAYS = 20
# What the device is asked for beside the likeliest token, and may not be waited for either.
_ASKING = SamplingParams(
    max_tokens=1000,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    seed=1,
    logprobs=3,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    min_tokens=900,
    logit_bias=((5, 1.0),),
    bad_words=((7,), (8, 9)),
    ignore_eos=True,
)


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    large = large_model(setting, shared)
    table = record.table(
        "Host and device in steady decode",
        *("requests", "step ms", "device ms", "difference µs", "idle between steps µs"),
    )
    worst = 0.0
    for batch in setting.batches:
        rig = _watched_rig(setting, large, batch)
        num_steps = 3 if setting.is_rehearsal else _STEPS
        rig.join(batch, setting.context, large.last)
        seconds = step_seconds(rig, batch, num_steps)
        record.check(f"no sync in {num_steps} steps of {batch} requests", True)
        gaps = rig.runner.link.gaps
        idle = gaps.total_ns / 1e3 / gaps.count if gaps is not None and gaps.count else 0.0
        busy = _busy_seconds(rig, batch)
        worst = max(worst, idle)
        record.row(table, batch, seconds * 1e3, busy * 1e3, (seconds - busy) * 1e6, idle)
    record.target(HOST_GAP, worst)
    rig = _watched_rig(setting, large, setting.batches[-1])
    rig.join(setting.batches[-1], setting.context, large.last, _ASKING)
    seconds = step_seconds(rig, setting.batches[-1], 3)
    record.check("no sync where requests ask for all there is", True, f"{seconds * 1e3:.2f} ms a step")


def _watched_rig(setting: Setting, large: Large, batch: int) -> Rig:
    """Any wait within a step of it is an error."""
    return Rig(
        setting,
        large.config,
        large.model,
        large.cache,
        shape=shape_of(setting),
        mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        sizes=[batch],
        forbids_sync=True,
    )


def _busy_seconds(rig: Rig, batch: int) -> float:
    """Seconds of the device for the forward, the logits and the choice of a step, replayed without a host
    between them.
    """
    graphs, device = rig.graphs, rig.batch.link.device
    assert graphs is not None
    launched = rig.decode_on()
    launched.result()
    step = launched.inputs
    assert step.num_tokens == batch

    def work() -> None:
        with torch.inference_mode():
            rig.model.logits(graphs.forward(step)).argmax(-1)

    # The staging memory of a step is written once a turn, and here it is written with what it holds.
    work()
    return device_seconds(work, device, _REPLAYS)
