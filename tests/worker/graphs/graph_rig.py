"""A worker that runs from emulated graphs, and a long random day in its life."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tiny_model import VOCAB_SIZE
from worker_driver import Driver, Running

from streamserve.engine.step import StepDiff, StepResult
from streamserve.sampling import SamplingParams
from streamserve.worker.attention.base import AttentionBackend
from streamserve.worker.attention.torch_padded import TorchPaddedAttention
from streamserve.worker.batch import BatchShape, InputBatch
from streamserve.worker.graphs.dispatcher import GraphDispatcher
from streamserve.worker.graphs.graph import GraphDevice
from streamserve.worker.graphs.mode import CUDAGraphMode, lower
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.graphs.tape import TapeGraphs
from streamserve.worker.kv_cache import KVCache, allocate
from streamserve.worker.loader import load_weights
from streamserve.worker.models.config import read_decoder_config
from streamserve.worker.models.llama import LlamaModel
from streamserve.worker.models.model import Model
from streamserve.worker.models.registry import build_model
from streamserve.worker.runner import ModelRunner
from streamserve.worker.sampler import Sampler
from streamserve.worker.sampling_columns import SamplingColumns

SIZES = (1, 2, 4, 8, 16, 32)
SHAPE = BatchShape(max_num_seqs=8, max_num_tokens=48, max_model_len=256, block_size=16)
NUM_BLOCKS = 128


class Rig:
    """A `ModelRunner` put together by hand, so that a test can change any part of it.

    Attributes:
        graphs: runs the forwards; None in mode NONE.
        execute: runs a step.

    Args:
        folder: of the model.
        mode: asked for; lowered as a worker does.
        attention: makes the backend.
        checks: see `GraphRunner`.
        captured: whether all graphs are captured at once.
        device: captures; None is `TapeGraphs`.
        stand_in: makes what runs in the place of the model.
    """

    def __init__(
        self,
        folder: Path,
        mode: CUDAGraphMode,
        *,
        attention: Callable[[KVCache], AttentionBackend] = TorchPaddedAttention,
        checks: bool = False,
        captured: bool = True,
        device: GraphDevice | None = None,
        stand_in: Callable[[LlamaModel], Model] = lambda model: model,
    ) -> None:
        cpu = torch.device("cpu")
        config = read_decoder_config(folder)
        loaded = build_model(config, torch.float32, cpu)
        load_weights("auto", folder, 0, loaded.destinations(), lambda share: None)
        model = stand_in(loaded)
        backend = attention(allocate(config, NUM_BLOCKS, SHAPE.block_size, torch.float32, cpu))
        columns = SamplingColumns(SHAPE.max_num_seqs, config.vocab_size, config.eos_token_ids)
        batch = InputBatch(SHAPE, columns, cpu)
        sampler = Sampler(columns, batch.tokens, config.vocab_size, cpu)
        self.graphs: GraphRunner | None = None
        if mode is not CUDAGraphMode.NONE:
            dispatcher = GraphDispatcher(lower(mode, backend.graph_support), SIZES, SHAPE.max_num_seqs)
            self.graphs = GraphRunner(
                model, batch, backend, dispatcher, device or TapeGraphs(), checks=checks
            )
            while captured and self.graphs.num_waiting:
                self.graphs.capture_next()
        self._runner = ModelRunner(model, batch, backend, sampler, graphs=self.graphs)

    def execute(self, diff: StepDiff) -> StepResult:
        return self._runner.run(diff)


@dataclass
class Trace:
    """What happened, and what came of it.

    Attributes:
        outputs: tokens of each request, in the order of arrival.
        decodes, mixed: steps in which every request ran one token, and others.
        chunked: steps that ended within a prompt.
        preempted, aborted, shared: requests that lost their slot, went away, began in others' blocks.
    """

    outputs: list[list[int]] = field(default_factory=list)
    decodes: int = 0
    mixed: int = 0
    chunked: int = 0
    preempted: int = 0
    aborted: int = 0
    shared: int = 0


def play(execute: Callable[[StepDiff], StepResult], num_steps: int = 300, seed: int = 0) -> Trace:
    """Requests come, share prefixes, are cut into chunks, preempted and aborted, as `seed` wants it.

    What happens does not depend on the tokens that come out.
    """
    rng = random.Random(seed)
    trace = Trace()
    driver = Driver(
        execute,
        num_slots=SHAPE.max_num_seqs,
        num_blocks=NUM_BLOCKS,
        block_size=SHAPE.block_size,
        budget=SHAPE.max_num_tokens,
    )
    arrived: list[Running] = []
    for _ in range(num_steps):
        alive = [request for request in driver.requests if not request.is_done]
        if alive and rng.random() < 0.05:
            driver.leave(rng.choice(alive))
            trace.preempted += 1
        if alive and rng.random() < 0.02:
            driver.leave(alive.pop(rng.randrange(len(alive))), forget=True)
            trace.aborted += 1
        if len(alive) < SHAPE.max_num_seqs and (not alive or rng.random() < 0.15):
            arrived.append(_arrive(driver, rng, trace))
        _note(driver.step(), driver, trace)
    trace.outputs = [request.output for request in arrived]
    return trace


def _arrive(driver: Driver, rng: random.Random, trace: Trace) -> Running:
    """A new request, every third of them with the beginning of a running one's prompt."""
    length = rng.choice((rng.randint(1, 8), rng.randint(9, 40), rng.randint(41, 120)))
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    params = SamplingParams(
        max_tokens=rng.randint(3, 60), temperature=rng.choice((0.0, 0.0, 1.0)), seed=7, ignore_eos=True
    )
    others = [request for request in driver.requests if request.num_computed >= driver.block_size]
    if not others or rng.random() > 0.33:
        return driver.add(prompt, params)
    other = rng.choice(others)
    kept = other.tokens[: min(other.num_prompt, other.num_computed)]
    request = driver.add([*kept, *prompt][:150], params, shared_with=other)
    trace.shared += request.num_computed > 0
    return request


def _note(diff: StepDiff, driver: Driver, trace: Trace) -> None:
    _, counts = driver.last or ([], [])
    if all(count == 1 for count in counts):
        trace.decodes += bool(counts)
    else:
        trace.mixed += 1
    trace.chunked += any(0 < r.num_computed < r.num_prompt for r in driver.requests if r.slot is not None)
