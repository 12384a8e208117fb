"""Steps that overlap on a device of its own: nothing waits, nothing is overtaken, the tokens are the same."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import engine_harness
import numpy as np
import pytest
import torch
from emulated_link import EmulatedLink, LateTapes, NoSync, WouldWaitError, WrittenTooEarlyError
from engine_harness import EngineHarness, EngineSettings
from tiny_model import VOCAB_SIZE

from streamserve.engine.executor.overlapped import OverlappedExecutor
from streamserve.messages import Logprobs
from streamserve.sampling import SamplingParams, TokenSet
from streamserve.worker.attention.metadata import PagedMetadataBuilder
from streamserve.worker.graphs.tape import TapeGraphs
from streamserve.worker.runner import ModelRunner
from streamserve.worker.sampler import Sampled, Sampler
from streamserve.worker.spec import WorkerSpec

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2] / "streamserve" / "worker"
NUM_REQUESTS = 30
SETTINGS = EngineSettings(
    max_num_seqs=8, max_num_batched_tokens=48, num_blocks=36, max_model_len=256, overlaps=True
)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
# Everything that a request may ask of sampling and that the host's sampler does without a question.
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=1.0, seed=5),
    replace(GREEDY, temperature=0.8, seed=6, top_k=7),
    replace(GREEDY, ignore_eos=False, temperature=2.0, seed=8),
    replace(GREEDY, stop_token_ids=tuple(range(3, 200)), min_tokens=3),
    replace(GREEDY, logprobs=3, prompt_logprobs=2),
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1),
    replace(GREEDY, logit_bias=((7, 3.0), (9, -2.0)), bad_words=((11,), (12, 13)), logprobs=0),
    replace(GREEDY, allowed_token_ids=TokenSet.of((5, 6, 7, 8, 9)), temperature=1.0, seed=9),
)


@dataclass
class Day:
    """What came of a long trace.

    Attributes:
        tokens, finish: of each request.
        logprobs: of each that asked, and of its prompt.
        preemptions: of all.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, Any] = field(default_factory=dict)
    logprobs: list[Logprobs] = field(default_factory=list)
    preemptions: int = 0

    def assert_same(self, other: Day) -> None:
        assert self.tokens == other.tokens
        assert self.finish == other.finish
        for mine, its in zip(self.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(mine.chosen, its.chosen, atol=1e-4)
            np.testing.assert_array_equal(mine.top_ids, its.top_ids)


def spend(folder: Path, depth: int = 1, kinds: tuple[SamplingParams, ...] = KINDS) -> Day:
    """Requests come two by two, some with the same beginning, into memory for a few of them; some leave."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(64)]
    settings = replace(SETTINGS, overlaps=depth > 1)
    with EngineHarness(folder, settings) as engine:
        if depth > 1:
            engine.executor.depth = depth
        aborted = set()
        for stream in range(NUM_REQUESTS):
            own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 100))]
            engine.add(stream, [*common, *own] if rng.random() < 0.4 else own, kinds[stream % len(kinds)])
            if stream % 2:
                engine.step()
            if stream % 10 == 9:
                engine.abort(stream - 1)
                aborted.add(stream - 1)
        while len(engine.finish) < NUM_REQUESTS - len(aborted) or engine.step():
            engine.step()
        engine.scheduler.check_integrity()
        kept = [stream for stream in engine.tokens if stream not in aborted]
        day = Day(
            {stream: engine.tokens[stream] for stream in kept},
            {stream: engine.finish[stream] for stream in kept},
            preemptions=engine.statistics()["preemptions"],
        )
        for stream in kept:
            asked = kinds[stream % len(kinds)]
            for found, num_top in (
                (engine.logprobs, asked.logprobs),
                (engine.prompt_logprobs, asked.prompt_logprobs),
            ):
                if num_top is not None:
                    parts = [part.rows(slice(None), num_top) for part in found[stream]]
                    day.logprobs.append(Logprobs.join(parts))
        return day


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> Day:
    """On the host, a step at a time."""
    day = spend(tiny_model)
    assert len(day.tokens) == NUM_REQUESTS - 3
    assert day.preemptions > 3
    assert len(day.logprobs) > 5
    assert len({len(tokens) for tokens in day.tokens.values()}) > 2
    return day


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> EmulatedLink:
    """Workers are on an emulated device, and the engine overlaps their steps in its own thread."""
    link = EmulatedLink()
    monkeypatch.setattr("streamserve.worker.worker.open_link", lambda device, forbids_sync: link)
    monkeypatch.setattr("streamserve.worker.graphs.build.TapeGraphs", lambda: LateTapes(link))
    # A CPU takes the greatest by NumPy.
    monkeypatch.setattr("streamserve.worker.sampler.likeliest", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(engine_harness, "ThreadedExecutor", OverlappedExecutor)
    return link


def with_graphs(monkeypatch: pytest.MonkeyPatch, *, lazy: bool) -> None:
    sizes = (1, 4, 8, 16, 48)
    asked = partial(
        WorkerSpec, cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=sizes, lazy_graphs=lazy
    )
    monkeypatch.setattr(engine_harness, "WorkerSpec", asked)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_tokens_are_the_same(tiny_model: Path, truth: Day, link: EmulatedLink, depth: int) -> None:
    spend(tiny_model, depth).assert_same(truth)
    link.synchronize()
    assert link.num_sent > 500
    assert link.most_unread == depth


@pytest.mark.parametrize("lazy", [False, True])
def test_the_tokens_are_the_same_from_graphs(
    tiny_model: Path, truth: Day, link: EmulatedLink, monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    with_graphs(monkeypatch, lazy=lazy)
    spend(tiny_model, 2).assert_same(truth)
    link.synchronize()


Mutate = Callable[[type, str, Callable[..., Any]], None]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Replaces a method by a function that gets the original first."""

    def replace_by(owner: type, name: str, mutant: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: mutant(original, *args, **kwargs))

    return replace_by


@pytest.mark.usefixtures("link")
def test_staging_memory_without_turns_is_noticed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedLink, "staging_for", lambda self, target: (torch.zeros_like(target),) * 2)
    with pytest.raises(WrittenTooEarlyError):
        spend(tiny_model, 2)


def test_a_turn_without_its_guard_is_noticed(
    tiny_model: Path, link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a depth of 3 results are read too late to guard the memory of the step before the last."""
    monkeypatch.setattr(link, "_ends", _NeverSet([0, 0]))
    with pytest.raises(WrittenTooEarlyError):
        spend(tiny_model, 3)


class _NeverSet(list):
    def __setitem__(self, index: Any, value: Any) -> None:
        pass


@pytest.mark.usefixtures("link")
def test_sampled_tokens_in_memory_that_is_used_again_are_noticed(
    tiny_model: Path, truth: Day, mutate: Mutate
) -> None:
    """The next step overwrites them before they have been copied."""
    memory = torch.zeros(8, dtype=torch.int32)

    def sample(original: Callable[..., Sampled], *args: Any) -> Sampled:
        sampled = original(*args)
        kept = memory[: len(sampled.token_ids)].copy_(sampled.token_ids)
        return Sampled(kept, sampled.report)

    mutate(Sampler, "sample", sample)
    assert spend(tiny_model, 2).tokens != truth.tokens


@pytest.mark.usefixtures("link")
def test_slots_that_are_taken_for_sent_are_noticed(
    tiny_model: Path, truth: Day, mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder that never sends the slots again."""

    def build(original: Callable[..., Any], builder: Any, batch: Any, step: Any, padded: Any = None) -> Any:
        if builder._slots_held is not None:
            builder._slots_held = step.slots
        return original(builder, batch, step, padded)

    mutate(PagedMetadataBuilder, "build", build)
    with_graphs(monkeypatch, lazy=False)
    assert spend(tiny_model, 2).tokens != truth.tokens


@pytest.mark.usefixtures("link")
def test_capture_that_does_not_wait_is_noticed(
    tiny_model: Path, link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes staging memory of the step before."""
    with_graphs(monkeypatch, lazy=True)
    monkeypatch.setattr("streamserve.worker.graphs.build.TapeGraphs", TapeGraphs)
    with pytest.raises(WrittenTooEarlyError):
        spend(tiny_model, 2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: int(x[0]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool((x > 3).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: torch.where(x > 3),
        lambda x: x.masked_select(x > 3),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x),
        lambda x: x.index_put_((x > 3,), x[0]),
        lambda x: torch.tensor([3]),
        lambda x: torch.from_numpy(np.zeros(3)),
    ],
)
@pytest.mark.usefixtures("link")
def test_a_step_that_waits_is_noticed(
    tiny_model: Path, mutate: Mutate, ask: Callable[[torch.Tensor], Any]
) -> None:
    def forward(original: Callable[..., torch.Tensor], runner: Any, step: Any) -> torch.Tensor:
        ask(step.positions)
        return original(runner, step)

    mutate(ModelRunner, "_forward", forward)
    with pytest.raises(WouldWaitError, match="aten::"):
        spend(tiny_model, 2)


def test_what_does_not_wait_is_let_through() -> None:
    x = torch.arange(10)
    with torch.inference_mode(), NoSync():
        y = x.index_select(0, x)[x].clone()
        y[x] = torch.where(x > 3, x, 0)
        y.index_put_((x,), x)


# Calls that wait for a GPU, or copy to it from memory that is not pinned.
SUSPECTS = ("cpu", "item", "from_numpy", "as_tensor", "pin_memory", "synchronize", "wait_stream")
# Where they may be: in what is not part of a step, and in what exists for it.
ALLOWED = {
    "link.py": {"from_numpy", "pin_memory", "synchronize", "wait_stream"},
    # Captures, and the measuring of memory before the first step.
    "graphs/cuda.py": {"synchronize"},
    "graphs/runner.py": {"synchronize"},
    "sizing.py": {"synchronize"},
    # Memory for buffers.
    "device.py": {"from_numpy"},
    # What is for a CPU alone.
    "attention/cpu_paged.py": {"from_numpy"},
    # What is for a CPU, and a question that a GPU without Triton has to be asked.
    "sampler.py": {"cpu", "from_numpy"},
}


def test_only_the_link_touches_both_sides() -> None:
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if not name.startswith(("loader/", "models/")):
            found[name] = set(_suspects(ast.parse(path.read_text())))
    assert {name: calls for name, calls in found.items() if calls} == ALLOWED


def _suspects(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield "pin_memory"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        if name in SUSPECTS:
            yield name
        elif name == "tensor" and isinstance(owner, ast.Name) and owner.id == "torch":
            yield "torch.tensor"
