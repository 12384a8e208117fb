"""The same decode steps with `--compile pieces`."""

from __future__ import annotations

import time
from typing import Any

import torch

from loadtest.gpu_check.results import Record
from loadtest.gpu_check.sections.decode import MODES, large_model, measure, spec_of, step_table
from loadtest.gpu_check.setting import Setting
from streamserve.errors import ConfigError
from streamserve.worker.compile import check_compile, compile_model
from streamserve.worker.device import resolve_dtype


def run(setting: Setting, record: Record, shared: dict[str, Any]) -> None:
    """See `SectionModule.run`."""
    large = large_model(setting, shared)
    spec = spec_of(setting, compile="pieces", compile_cache=str(setting.folder / "compiled"))
    try:
        device = torch.device(setting.device)
        check_compile(spec, resolve_dtype(spec.dtype, device), device)
    except ConfigError as error:
        record.skip(str(error))
        return
    began = time.perf_counter()
    made = compile_model(spec, large.model, lambda what, share: None)
    seconds = time.perf_counter() - began
    pieces = ", ".join(f"{each.name} {each.seconds:.1f} s" for each in made.compilations)
    record.check("the model compiles", bool(made.compilations), f"{seconds:.1f} s: {pieces or 'see logs'}")
    table = step_table(setting, record)
    # Emulated graphs do not see what compiled code does.
    modes = {"NONE": MODES["NONE"]} if setting.is_rehearsal else MODES
    for label, mode in modes.items():
        measure(setting, record, table, large=large, model=made.model, label=label, mode=mode)
