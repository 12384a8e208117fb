"""Which graphs a mixed trace runs from, against what the dispatcher says without a device."""

from __future__ import annotations

from typing import Any

import torch

from loadtest.gpu_check.model_folder import write_config
from loadtest.gpu_check.results import Record
from loadtest.gpu_check.rig import Rig, allocate_cache, load_model
from loadtest.gpu_check.sections.equality import NUM_BLOCKS, SHAPE, SIZES
from loadtest.gpu_check.setting import Setting
from loadtest.gpu_check.trace import play, predict
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.mode import CUDAGraphMode, RuntimeMode


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    device = torch.device(setting.device)
    folder = write_config(setting.folder / "models" / "small", setting.small)
    config, model = load_model(folder, setting.dtype, device)
    table = record.table("Steps of a mixed trace", "mode", "NONE", "PIECEWISE", "FULL", "rows of padding")
    for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        cache = allocate_cache(config, NUM_BLOCKS, SHAPE.block_size, setting.dtype, device)
        rig = Rig(setting, config, model, cache, shape=SHAPE, mode=mode, sizes=SIZES, checks=True)
        assert rig.graphs is not None
        trace = play(rig.execute, SHAPE, NUM_BLOCKS, config.vocab_size, num_steps=setting.trace_steps, seed=1)
        predicted = predict(GraphDispatcher(rig.mode, SIZES, SHAPE.max_num_seqs), trace.steps)
        counters = rig.graphs.counters
        record.row(table, mode.name, *(counters.steps[kind] for kind in RuntimeMode), counters.padded_tokens)
        record.check(
            f"{mode.name} dispatches as predicted",
            counters.steps == predicted.steps and counters.padded_tokens == predicted.padded_tokens,
            f"{counters.steps} and {predicted.steps}"
            if counters.steps != predicted.steps
            else f"{len(trace.steps)} steps",
        )
        record.check(f"{mode.name} uses FULL graphs", counters.steps[RuntimeMode.FULL] > 0)
