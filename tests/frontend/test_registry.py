"""Live answers by id, and what is counted of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from streamserve.errors import Expired, Overloaded, RequestFailed
from streamserve.frontend import registry as registry_module
from streamserve.frontend.families import PROMPT_SOURCES
from streamserve.frontend.metrics import Layout, Metrics, Row
from streamserve.frontend.registry import Registry
from streamserve.sampling import SamplingParams


@dataclass
class Asked:
    """A generation that never runs."""

    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=50))
    cached_tokens: int = 0
    began_s: float | None = None
    num_cancels: int = 0

    def cancel(self) -> None:
        self.num_cancels += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic seconds, as the test sets them."""
    now = [1000.0]
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def registry() -> Registry:
    layout = Layout(("alice", "bob"))
    return Registry(Metrics(Row(layout, memoryview(bytearray(layout.row_bytes)))))


def value(registry: Registry, name: str, *labels: str) -> float:
    return registry.metrics.row.counter(name, *labels).value


def count_and_sum(registry: Registry, name: str) -> tuple[float, float]:
    row = registry.metrics.row
    family = next(family for family in row.layout.families if family.name == name)
    at = row.layout.place(name)
    cells = row.cells[at : at + family.width].tolist()
    return sum(cells[:-1]), cells[-1]


def finished(registry: Registry) -> dict[str, int]:
    counts = {reason: int(counter.value) for reason, counter in registry.metrics.finished.items()}
    return {reason: count for reason, count in counts.items() if count}


def test_an_answer_is_listed_while_it_runs(registry: Registry) -> None:
    with registry.track("cmpl-1", "alice", [Asked(cached_tokens=2), Asked()]) as record:
        assert registry.find("cmpl-1", "alice") == [record]
        assert record.describe().items() >= {
            "id": "cmpl-1", "object": "stream", "status": "queued", "choices": 2, "prompt_tokens": 6,
            "cached_tokens": 2, "completion_tokens": 0,
        }.items()  # fmt: skip
        record.observe(4, 1)
        assert record.describe()["status"] == "running"
        assert record.describe()["completion_tokens"] == 4
        assert value(registry, "streamserve:streams_open") == 1
        assert len(registry) == 1
    assert registry.find("cmpl-1", "alice") == []
    assert value(registry, "streamserve:streams_open") == 0
    assert len(registry) == 0


def test_others_do_not_see_it_but_an_administrator_does(registry: Registry) -> None:
    with registry.track("cmpl-1", "alice", [Asked()]) as record:
        assert registry.find("cmpl-1", "bob") == []
        assert registry.all("bob") == []
        assert registry.find("cmpl-1", None) == registry.all(None) == registry.all("alice") == [record]


def test_live_answers_may_share_an_id(registry: Registry) -> None:
    with registry.track("same", "alice", [Asked()]) as first:
        with registry.track("same", "alice", [Asked()]) as second, registry.track("same", "bob", [Asked()]):
            assert registry.find("same", "alice") == [first, second]
        assert registry.find("same", "alice") == [first]


def test_cancelling_reaches_every_choice(registry: Registry) -> None:
    choices = [Asked(), Asked()]
    with registry.track("x", "alice", choices) as record:
        record.cancel()
        assert [choice.num_cancels for choice in choices] == [1, 1]
        assert record.describe()["status"] == "cancelled"
        record.finish("abort", 0)
        record.finish("abort", 1)
    assert finished(registry) == {"abort": 2}


def test_times_and_tokens_of_a_stream(registry: Registry, clock: list[float]) -> None:
    with registry.track("x", "alice", [Asked(cached_tokens=2)]) as record:
        clock[0] += 0.5
        record.observe(0)
        assert count_and_sum(registry, "vllm:time_to_first_token_seconds")[0] == 0
        clock[0] += 0.5
        record.observe(1)
        clock[0] += 3.0
        record.observe(3)
        clock[0] += 0.25
        record.finish("stop")
        record.finish("length")
    assert finished(registry) == {"stop": 1}
    assert count_and_sum(registry, "vllm:time_to_first_token_seconds") == (1, 1.0)
    assert count_and_sum(registry, "vllm:inter_token_latency_seconds") == (3, 3.0)
    assert count_and_sum(registry, "vllm:e2e_request_latency_seconds") == (1, 4.25)
    assert count_and_sum(registry, "vllm:request_decode_time_seconds") == (1, 3.0)
    assert count_and_sum(registry, "vllm:request_time_per_output_token_seconds") == (1, 1.0)
    assert count_and_sum(registry, "vllm:request_prompt_tokens") == (1, 3)
    assert count_and_sum(registry, "vllm:request_generation_tokens") == (1, 4)
    assert count_and_sum(registry, "vllm:request_params_max_tokens") == (1, 50)
    assert count_and_sum(registry, "vllm:request_params_n") == (1, 1)
    assert value(registry, "vllm:prompt_tokens") == 3
    assert value(registry, "vllm:prompt_tokens_cached") == 2
    assert value(registry, "vllm:generation_tokens") == 4
    assert value(registry, "streamserve:key_prompt_tokens", "alice") == 3
    assert value(registry, "streamserve:key_generation_tokens", "alice") == 4
    assert value(registry, "streamserve:key_requests", "alice") == 1
    assert value(registry, "streamserve:key_requests", "bob") == 0


def times(registry: Registry) -> dict[str, tuple[float, float]]:
    """Count and sum of the parts of a request's time."""
    parts = ("queue", "prefill", "decode", "inference")
    return {part: count_and_sum(registry, f"vllm:request_{part}_time_seconds") for part in parts}


def test_the_parts_of_a_request_add_up_to_the_whole(registry: Registry, clock: list[float]) -> None:
    asked = Asked(cached_tokens=2)
    with registry.track("x", "alice", [asked]) as record:
        clock[0] += 2.0
        asked.began_s = clock[0]
        clock[0] += 0.5
        record.observe(1)
        # Whatever happens between two tokens, a preemption say, belongs to the decode.
        clock[0] += 4.0
        record.observe(2)
        record.finish("stop")
    assert times(registry) == {
        "queue": (1, 2.0), "prefill": (1, 0.5), "decode": (1, 4.0), "inference": (1, 4.5),
    }  # fmt: skip
    assert count_and_sum(registry, "vllm:e2e_request_latency_seconds") == (1, 6.5)


def test_an_aborted_request_has_the_times_that_it_got_to(registry: Registry, clock: list[float]) -> None:
    _, in_prefill, in_decode = asked = [Asked(), Asked(), Asked()]
    with registry.track("x", "alice", asked) as record:
        clock[0] += 1.0
        in_prefill.began_s = in_decode.began_s = clock[0]
        clock[0] += 1.0
        record.observe(1, 2)
        clock[0] += 0.25
        record.observe(1, 2)
        clock[0] += 100.0
    assert finished(registry) == {"abort": 3}
    assert times(registry) == {
        "queue": (2, 2.0), "prefill": (1, 1.0), "decode": (1, 0.25), "inference": (1, 1.25),
    }  # fmt: skip
    assert count_and_sum(registry, "vllm:e2e_request_latency_seconds") == (3, 3 * 102.25)


def test_prompts_are_counted_by_what_had_to_be_computed(registry: Registry) -> None:
    with registry.track("x", "alice", [Asked(cached_tokens=2), Asked(), Asked()]) as record:
        for choice in (0, 1):
            record.observe(1, choice)
            record.finish("stop", choice)
        # What a request that never ran would have found is not known.
        record.finish("abort", 2)
    assert count_and_sum(registry, "vllm:request_prefill_kv_computed_tokens") == (2, 4)
    assert count_and_sum(registry, "vllm:request_prompt_tokens") == (3, 9)
    by_source = {source: value(registry, "vllm:prompt_tokens_by_source", source) for source in PROMPT_SOURCES}
    assert by_source == {"local_compute": 4, "local_cache_hit": 2, "external_kv_transfer": 0}
    assert sum(by_source.values()) == value(registry, "vllm:prompt_tokens")
    assert value(registry, "vllm:prompt_tokens_cached_by_source", "device") == 2


def test_choices_are_counted_each_and_the_longest_once(registry: Registry) -> None:
    with registry.track("x", "bob", [Asked(), Asked(), Asked()]) as record:
        for choice, num_tokens in enumerate((5, 9, 2)):
            record.observe(num_tokens, choice)
            record.finish("length", choice)
    assert finished(registry) == {"length": 3}
    assert count_and_sum(registry, "vllm:request_params_n") == (1, 3)
    assert count_and_sum(registry, "vllm:request_max_num_generation_tokens") == (1, 9)
    assert count_and_sum(registry, "vllm:request_generation_tokens") == (3, 16)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncio.CancelledError(), {"stop": 1, "abort": 1}),
        (GeneratorExit(), {"stop": 1, "abort": 1}),
        (RequestFailed("x"), {"stop": 1, "error": 1}),
        (RuntimeError("x"), {"stop": 1, "error": 1}),
    ],
)
def test_what_nobody_finished_is_counted_by_how_it_ended(
    registry: Registry, error: BaseException, expected: dict[str, int]
) -> None:
    def run() -> None:
        with registry.track("x", "alice", [Asked(), Asked()]) as record:
            record.finish("stop")
            raise error

    with pytest.raises(type(error)):
        run()
    assert finished(registry) == expected
    assert len(registry) == 0


@pytest.mark.parametrize(
    ("error", "reason", "count"), [(Overloaded("x"), "max_waiting", 0), (Expired("x"), "max_queue_time", 1)]
)
def test_what_never_ran_is_no_finished_request(
    registry: Registry, error: Exception, reason: str, count: int
) -> None:
    with pytest.raises(type(error)), registry.track("x", "alice", [Asked()]):
        raise error
    assert finished(registry) == {}
    assert count_and_sum(registry, "vllm:request_params_n")[0] == 0
    assert registry.metrics.rejected[reason].value == count


def test_the_default_counts_for_nobody() -> None:
    alone: Any = Registry()
    with alone.track("x", "anybody", [Asked()]) as record:
        record.observe(1)
        record.finish("stop")
    assert finished(alone) == {"stop": 1}
