"""Decides what runs in each step. Torch-free; no clock, no ipc, no log: values in, values out."""

from streamserve.engine.scheduler.limits import SchedulerLimits
from streamserve.engine.scheduler.output import PromptRows, SchedulerStatistics, StepOutput
from streamserve.engine.scheduler.scheduler import Scheduler
from streamserve.engine.scheduler.states import Request

__all__ = ["PromptRows", "Request", "Scheduler", "SchedulerLimits", "SchedulerStatistics", "StepOutput"]
