"""From the options of a worker to its graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.batch import InputBatch
from streamserve.worker.graphs.cuda import CudaGraphs
from streamserve.worker.graphs.descriptor import checked_capture_sizes, default_capture_sizes
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.graph import GraphDevice
from streamserve.worker.graphs.mode import CUDAGraphMode, lower
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.graphs.tape import TapeGraphs
from streamserve.worker.models.model import Model
from streamserve.worker.spec import WorkerSpec

logger = logging.getLogger(__name__)


def requested_mode(spec: WorkerSpec, device: torch.device) -> CUDAGraphMode:
    """What `spec` asks for; where it leaves it open, as much as can be on CUDA and nothing elsewhere."""
    if spec.cudagraph_mode is not None:
        return CUDAGraphMode[spec.cudagraph_mode]
    return CUDAGraphMode.FULL_AND_PIECEWISE if device.type == "cuda" else CUDAGraphMode.NONE


def graph_devices(device: torch.device) -> Callable[[], GraphDevice]:
    """Makes what captures graphs on `device`, again and again.

    All on one stream: libraries never give back the workspace of a stream that they were once used on.
    """
    if device.type != "cuda":
        return TapeGraphs
    stream = torch.cuda.Stream(device)
    return lambda: CudaGraphs(device, stream)


def build_graphs(
    spec: WorkerSpec,
    model: Model,
    batch: InputBatch,
    attention: AttentionBackend,
    new_device: Callable[[], GraphDevice],
) -> GraphRunner | None:
    """The runner of a worker's graphs, none of them captured yet; None when all steps run eagerly.

    Args:
        spec: says which graphs.
        model, batch, attention: see `GraphRunner`.
        new_device: from `graph_devices`.

    Raises:
        ConfigError: a capture size that no step can have.
    """
    asked = requested_mode(spec, batch.link.device)
    mode = lower(asked, attention.graph_support)
    if mode is not asked:
        backend = type(attention).__name__
        logger.warning(
            "graphs are %s, not %s: %s supports %s",
            mode.name,
            asked.name,
            backend,
            attention.graph_support.name,
        )
    if mode is CUDAGraphMode.NONE:
        return None
    shape = batch.shape
    sizes = checked_capture_sizes(spec.cudagraph_capture_sizes, shape.max_num_tokens)
    sizes = sizes or default_capture_sizes(shape.max_num_seqs, shape.max_num_tokens)
    return GraphRunner(
        model,
        batch,
        attention,
        GraphDispatcher(mode, sizes, shape.max_num_seqs),
        new_device(),
        checks=logger.isEnabledFor(logging.DEBUG),
    )
