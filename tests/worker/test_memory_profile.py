"""The KV cache gets what is left of the GPU: the arithmetic, and a worker that is measured by it."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated_link import EmulatedLink, WouldWaitError
from worker_driver import Driver

from streamserve.engine.step import StepDiff, StepResult
from streamserve.errors import ConfigError
from streamserve.sampling import SamplingParams
from streamserve.worker.batch import BatchShape
from streamserve.worker.graphs.graph import GraphError
from streamserve.worker.graphs.runner import GraphRunner
from streamserve.worker.graphs.tape import TapeGraphs
from streamserve.worker.memory_profile import GraphsOfAKind, MemoryProfile
from streamserve.worker.runner import LaunchedStep, ModelRunner
from streamserve.worker.sizing import trial_steps
from streamserve.worker.spec import MemoryAccount, WorkerFacts, WorkerSpec
from streamserve.worker.worker import Worker

pytestmark = pytest.mark.torch

GIB = 1 << 30
MIB = 1 << 20


class Memory:
    """A GPU of 80 GiB on which others hold 1; the test says what comes and goes.

    Attributes:
        tensors: allocated.
        cached: held by the allocator beside them, until it is told to give it back.
        libraries: this process's, but no tensors.
    """

    total = 80 * GIB

    def __init__(self) -> None:
        self.tensors = self.cached = self.libraries = 0
        self.others = 1 * GIB
        self._peak = 0

    def allocate(self, num_bytes: int) -> None:
        self.tensors += num_bytes
        self._peak = max(self._peak, self.tensors)

    def use(self, num_bytes: int) -> None:
        """For a moment: the allocator keeps it."""
        self.allocate(num_bytes)
        self.tensors -= num_bytes
        self.cached += num_bytes

    def free(self) -> int:
        return self.total - self.others - self.libraries - self.reserved()

    def allocated(self) -> int:
        return self.tensors

    def reserved(self) -> int:
        return self.tensors + self.cached

    def reset_peak(self) -> None:
        self._peak = self.tensors

    def peak(self) -> int:
        return self._peak

    def release(self) -> None:
        self.cached = 0


def measured(memory: Memory, utilization: float = 0.9, *, weights: int = 16 * GIB) -> MemoryProfile:
    """Of an 8B model."""
    profile = MemoryProfile(memory, utilization)
    memory.allocate(weights)
    memory.use(2 * GIB)
    profile.weights_loaded()
    memory.allocate(GIB // 2)

    def run() -> None:
        memory.allocate(8 * MIB)
        memory.allocate(GIB // 4)
        memory.use(3 * GIB)
        memory.use(GIB)
        memory.libraries += GIB // 8

    profile.run_largest(run, cache_bytes=8 * MIB)

    def capture() -> list[GraphsOfAKind]:
        memory.allocate(32 * MIB)
        memory.use(GIB)
        return [GraphsOfAKind(51, [600 * MIB, 30 * MIB]), GraphsOfAKind(35, [20 * MIB, 0])]

    profile.capture(capture)
    return profile


def test_the_cache_is_what_is_left() -> None:
    account = measured(Memory()).account(MIB)
    graphs = 32 * MIB + (630 + 49 * 30) * MIB + (20 + 33) * MIB
    assert account == MemoryAccount(
        total=80 * GIB,
        budget=72 * GIB,
        weights=16 * GIB,
        buffers=GIB // 2 + GIB // 4,
        activations=3 * GIB,
        graphs=graphs,
        other=GIB // 8,
        cache=72 * GIB - 16 * GIB - 3 * GIB // 4 - 3 * GIB - graphs - GIB // 8,
    )


def test_a_tenth_more_of_the_gpu_is_a_tenth_more_of_cache() -> None:
    less, more = (measured(Memory(), share).account(MIB) for share in (0.6, 0.7))
    assert abs(more.cache - less.cache - 8 * GIB) < 4
    assert replace(more, budget=less.budget, cache=less.cache) == less


def test_what_was_there_before_is_not_counted() -> None:
    memory = Memory()
    memory.libraries = 2 * GIB
    memory.allocate(GIB)
    assert measured(memory).account(MIB) == measured(Memory()).account(MIB)


def test_others_hold_too_much_of_the_gpu() -> None:
    memory = Memory()
    memory.others = 20 * GIB
    with pytest.raises(ConfigError) as failure:
        MemoryProfile(memory, 0.9)
    text = str(failure.value)
    assert text.startswith("--gpu-memory-utilization 0.9: that is 72.00 GiB of the GPU's 80.00 GiB")
    assert "only 60.00 GiB are free; 12.00 GiB are missing" in text
    assert "go down to 0.75" in text
    MemoryProfile(memory, 0.75)


def test_a_share_that_no_gpu_has() -> None:
    """The driver and CUDA hold some of it before anything is there."""
    memory = Memory()
    memory.others = GIB // 2
    with pytest.raises(ConfigError) as failure:
        MemoryProfile(memory, 1.0)
    text = str(failure.value)
    assert text.startswith("--gpu-memory-utilization 1: that is 80.00 GiB of the GPU's 80.00 GiB")
    assert "the driver and CUDA hold some of it themselves" in text
    assert "go down to 0.99" in text
    MemoryProfile(memory, 0.99)


def test_others_hold_all_of_the_gpu() -> None:
    memory = Memory()
    memory.others = memory.total - 100 * MIB
    with pytest.raises(ConfigError, match=r"so stop what else uses it$"):
        MemoryProfile(memory, 0.9)


def test_a_share_that_cannot_be_raised() -> None:
    memory = Memory()
    memory.others = 60 * GIB
    profile = measured(memory, 0.25, weights=19 * GIB)
    with pytest.raises(ConfigError, match="stop what else uses the GPU, or take a smaller model") as failure:
        profile.account(64 * MIB)
    assert "raise it" not in str(failure.value)


@pytest.mark.parametrize(
    ("weights", "utilization", "missing", "remedy"),
    [
        (16 * GIB, 0.2, "6.0", "take a smaller model"),
        (2 * GIB, 0.08, "1.", "lower --max-num-batched-tokens or --max-num-seqs"),
    ],
)
def test_no_room_for_a_cache(weights: int, utilization: float, missing: str, remedy: str) -> None:
    profile = measured(Memory(), utilization, weights=weights)
    with pytest.raises(ConfigError) as failure:
        profile.account(64 * MIB)
    text = str(failure.value)
    assert text.startswith(f"--gpu-memory-utilization {utilization}: no room for a KV cache, {missing}")
    assert remedy in text
    assert f"weights {weights / GIB:.2f} GiB" in text


def test_graphs_that_take_it_all() -> None:
    memory = Memory()
    profile = MemoryProfile(memory, 0.5)
    profile.weights_loaded()
    profile.run_largest(lambda: None, 0)
    profile.capture(lambda: [GraphsOfAKind(100, [GIB, GIB])])
    with pytest.raises(
        ConfigError, match=r"60\.06 GiB are missing .*--cudagraph-capture-sizes.*--enforce-eager"
    ):
        profile.account(64 * MIB)


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        (BatchShape(4, 10, 100, 16), [2, 3, 2, 3]),
        (BatchShape(4, 4, 100, 16), [1, 1, 1, 1]),
        (BatchShape(2, 100, 20, 16), [20, 20]),
        (BatchShape(1, 64, 4096, 16), [64]),
    ],
)
def test_the_largest_step(shape: BatchShape, counts: list[int]) -> None:
    step, rare, leave = trial_steps(shape)
    assert step.num_tokens is not None
    assert step.num_tokens.tolist() == counts
    assert [len(join.tokens) for join in step.joins] == counts
    assert [len(join.blocks) for join in step.joins] == [-(-count // 16) for count in counts]
    assert rare.leaves.tolist() == list(range(len(counts)))
    assert leave.leaves.tolist() == [join.slot for join in rare.joins]


def test_a_step_of_what_the_largest_one_may_lack() -> None:
    """The end of a long context, and several tokens of a request."""
    _, step, _ = trial_steps(BatchShape(64, 64, 4096, 16))
    assert step.num_tokens is not None
    assert step.num_tokens.tolist() == [1, 2]
    far, chunk = step.joins
    assert (len(far.tokens), far.num_computed, len(far.blocks)) == (1024, 1023, 64)
    assert (len(chunk.tokens), chunk.num_computed) == (2, 0)
    for shape in (BatchShape(1, 64, 4096, 16), BatchShape(64, 2, 4096, 16), BatchShape(64, 64, 1, 16)):
        assert [len(join.tokens) for join in trial_steps(shape)[1].joins] == [min(shape.max_model_len, 1024)]


class CountingGraphs(TapeGraphs):
    """Each captured forward takes `bytes_each`, whatever number of graphs it is in."""

    def __init__(self, bytes_each: int) -> None:
        self._bytes_each = bytes_each
        self._free = 1 << 40
        self._looks = 0

    def free_bytes(self) -> int:
        # Asked for before a capture and after it.
        self._looks += 1
        if self._looks % 2 == 0:
            self._free -= self._bytes_each
        return self._free


class CpuMemory:
    """Counts the tensors of this process as if they were on a GPU; a step is said to use `activations`."""

    total = 4 * GIB
    activations = 40 * MIB

    def __init__(self) -> None:
        self._other_tensors = self._living()

    def free(self) -> int:
        return self.total - self.reserved()

    def allocated(self) -> int:
        return self._living() - self._other_tensors

    def reserved(self) -> int:
        return self.allocated()

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.allocated() + self.activations

    def release(self) -> None:
        pass

    @staticmethod
    def _living() -> int:
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        sizes: dict[int, int] = {}
        for tensor in tensors:
            # What torch.compile has left behind has no memory, and warns or raises when asked where it is.
            with contextlib.suppress(RuntimeError, UserWarning):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> CpuMemory:
    """The worker takes the CPU for a GPU of 4 GiB whose graphs take 3 MiB each."""
    memory = CpuMemory()
    monkeypatch.setattr(
        "streamserve.worker.worker.begin_profile", lambda _, share: MemoryProfile(memory, share)
    )
    monkeypatch.setattr("streamserve.worker.graphs.build.TapeGraphs", lambda: CountingGraphs(3 * MIB))
    return memory


def gpu_spec(spec_for: Callable[..., WorkerSpec], folder: Path, **changes: object) -> WorkerSpec:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "max_model_len": 4096,
        "num_blocks_override": None,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": (1, 2, 8, 16),
        "gpu_memory_utilization": 0.028,
    }
    return spec_for(folder, **{**settings, **changes})


def start(spec: WorkerSpec) -> tuple[Worker, WorkerFacts]:
    worker = Worker(spec)
    return worker, worker.start(lambda what, share: None)


def generate(execute: Callable[[StepDiff], StepResult]) -> list[int]:
    driver = Driver(execute, num_slots=8, num_blocks=40, block_size=16, budget=48)
    request = driver.add(range(5, 70), SamplingParams(max_tokens=20, temperature=0.0))
    driver.run()
    return request.output


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_worker_keeps_to_its_account(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is left of what was tried out, and what is there afterwards is what was reckoned with."""
    caplog.set_level(logging.INFO)
    worker, facts = start(gpu_spec(spec_for, tiny_model))
    allocated = on_a_gpu.allocated()
    account = facts.memory
    assert account is not None
    assert account.budget == int(0.028 * on_a_gpu.total)
    # 4 graphs of mixed steps and 3 of decodes, the second of each kind standing for the rest. A tape keeps
    # tensors of its own on top of that, which a CUDA graph has in its pool.
    assert account.graphs >= 7 * 3 * MIB
    assert account.activations == on_a_gpu.activations
    assert 0 <= account.weights - facts.weights_bytes < 10_000
    assert account.cache == account.budget - sum(
        (account.weights, account.buffers, account.activations, account.graphs, account.other)
    )
    assert facts.num_blocks == account.cache // facts.kv_block_bytes
    reckoned = account.weights + account.buffers + facts.num_blocks * facts.kv_block_bytes
    # Some of the buffers are made at first use.
    assert abs(allocated - reckoned) < MIB
    assert generate(worker.execute) == generate(_plain(tiny_model, spec_for).execute)
    while worker.work_ahead():
        pass
    numbers = worker.statistics()
    assert (numbers["gpu_memory_cache"], numbers["gpu_memory_graphs"]) == (account.cache, account.graphs)
    assert (numbers["graphs_captured"], numbers["graphs_bytes"]) == (7, 7 * 3 * MIB)
    assert "GPU memory of 0.11 GiB: weights 0.00 GiB" in caplog.text


def _plain(folder: Path, spec_for: Callable[..., WorkerSpec]) -> Worker:
    worker, facts = start(spec_for(folder))
    assert facts.memory is None
    return worker


def test_the_size_of_the_cache_as_given(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], on_a_gpu: CpuMemory
) -> None:
    _, facts = start(gpu_spec(spec_for, tiny_model, num_blocks_override=33))
    assert (facts.num_blocks, facts.memory) == (33, None)


@pytest.mark.parametrize("given", [{"num_blocks_override": 40}, {"kv_cache_memory": 4 * MIB}])
def test_kernels_are_compiled_before_anybody_asks(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, int],
) -> None:
    """Though there is nothing to measure; nobody sees anything of it."""
    monkeypatch.setattr("streamserve.worker.worker.compiles_kernels", lambda device: True)
    tried: list[int] = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, diff: StepDiff) -> LaunchedStep:
        tried.append(0 if diff.num_tokens is None else int(diff.num_tokens.sum()))
        return launch(runner, diff)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    worker, facts = start(gpu_spec(spec_for, tiny_model, **given))
    assert facts.memory is None
    assert tried == [48, 3, 0]
    counters = worker.graph_counters()
    assert counters is not None
    assert sum(counters.steps.values()) == 0
    assert generate(worker.execute) == generate(_plain(tiny_model, spec_for).execute)


def test_no_memory_to_compile_them(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamserve.worker.worker.compiles_kernels", lambda device: True)
    monkeypatch.setattr(ModelRunner, "run", _out_of_memory)
    with pytest.raises(ConfigError, match="for a step of 48 tokens; lower --max-num-batched-tokens"):
        start(gpu_spec(spec_for, tiny_model, num_blocks_override=33))


def test_no_more_blocks_than_could_ever_be_used(
    tiny_model: Path, spec_for: Callable[..., WorkerSpec], on_a_gpu: CpuMemory
) -> None:
    _, facts = start(gpu_spec(spec_for, tiny_model, max_model_len=64))
    assert facts.num_blocks == 8 * 4


def test_a_gpu_too_small(tiny_model: Path, spec_for: Callable[..., WorkerSpec], on_a_gpu: CpuMemory) -> None:
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0.01: no room for a KV cache, 0\.0\d GiB"
    ):
        start(gpu_spec(spec_for, tiny_model, gpu_memory_utilization=0.01))


def test_no_memory_for_the_largest_step(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelRunner, "run", _out_of_memory)
    with pytest.raises(ConfigError, match="for a step of 48 tokens; lower --max-num-batched-tokens"):
        start(gpu_spec(spec_for, tiny_model))


def test_what_is_tried_out_may_wait(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --debug-no-sync, and no kernels to sample with; the steps of requests may not."""
    link = EmulatedLink()
    monkeypatch.setattr("streamserve.worker.worker.open_link", lambda device, forbids_sync: link)
    monkeypatch.setattr("streamserve.worker.sampler.CANDIDATES", (16,))
    worker, _ = start(gpu_spec(spec_for, tiny_model, cudagraph_mode="NONE"))
    driver = Driver(worker.execute, num_slots=8, num_blocks=40, block_size=16, budget=48)
    driver.add(range(5, 70), SamplingParams(max_tokens=20, top_p=0.9))
    with pytest.raises(WouldWaitError):
        driver.run()


def test_graphs_that_cannot_be_captured(
    tiny_model: Path,
    spec_for: Callable[..., WorkerSpec],
    on_a_gpu: CpuMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps run eagerly then, as they do if a capture fails while the server serves."""

    def capture(*_: object) -> int:
        raise GraphError("an operation that cannot be captured")

    monkeypatch.setattr(GraphRunner, "capture", capture)
    worker, facts = start(gpu_spec(spec_for, tiny_model))
    assert facts.memory is not None
    assert facts.memory.graphs < MIB
    assert "an operation that cannot be captured" in caplog.text
    assert generate(worker.execute) == generate(_plain(tiny_model, spec_for).execute)
    assert worker.statistics()["graphs_captured"] == 0
