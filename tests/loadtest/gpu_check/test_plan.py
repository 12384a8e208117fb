"""The parts of the GPU check that need no GPU: its plan, targets, floors, wheels and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.gpu_check import report, wheels
from loadtest.gpu_check.floor import floor_seconds, kv_bytes, weight_bytes
from loadtest.gpu_check.plan import (
    GROUPS,
    TOTAL_S,
    Section,
    allowance,
    chosen_groups,
    sections,
    without_finished,
)
from loadtest.gpu_check.results import Record, SectionResult, read_section
from loadtest.gpu_check.setting import LLAMA_8B
from loadtest.gpu_check.targets import HOST_GAP, SPEEDUP, Bound, full_over_floor
from streamserve.worker.models.config import DecoderConfig, read_decoder_config

FOLDER = Path(report.__file__).parent / "sections"


@pytest.fixture
def llama_8b(tmp_path: Path) -> DecoderConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return read_decoder_config(tmp_path)


def test_there_is_a_module_for_each_section() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(sections()) == modules
    assert len(sections()) == len(modules)


def test_no_section_takes_the_time_of_another() -> None:
    assert sum(section.budget_s for group in GROUPS for section in group) <= TOTAL_S <= 8 * 60


def test_a_section_may_take_its_budget_or_what_is_left() -> None:
    section = Section("any", 50)
    assert allowance(section, 100, 450) == 50
    assert allowance(section, 430, 450) == 20
    assert allowance(section, 500, 450) == 0
    assert allowance(section, 0, 1800, factor=4) == 200


def test_sections_are_chosen_in_their_order() -> None:
    assert chosen_groups([]) == list(GROUPS)
    chosen = chosen_groups(["memory", "sampling", "environment"])
    assert [[section.name for section in group] for group in chosen] == [
        ["environment", "sampling"],
        ["memory"],
    ]
    with pytest.raises(ValueError, match="no section kernels; there are environment, "):
        chosen_groups(["kernels", "memory"])


def test_what_is_left_of_a_group() -> None:
    group = GROUPS[0]
    assert without_finished(group, [group[0].name, group[1].name]) == group[2:]
    assert without_finished(group, [section.name for section in group]) == ()


@pytest.mark.parametrize(
    ("bound", "value", "holds"),
    [
        (full_over_floor(1), 1.15, True),
        (full_over_floor(64), 1.151, False),
        (SPEEDUP, 2.0, True),
        (SPEEDUP, 1.99, False),
        (HOST_GAP, 99.0, True),
        (HOST_GAP, float("nan"), False),
        (SPEEDUP, float("nan"), False),
    ],
)
def test_targets(bound: Bound, value: float, holds: bool) -> None:
    assert bound.holds(value) is holds


def test_a_figure_is_told_with_its_target() -> None:
    assert HOST_GAP.words(123.456) == "123.5 µs (target: at most 100 µs)"
    assert SPEEDUP.words(3) == "3 (target: at least 2)"


def test_bytes_of_an_8b_model(llama_8b: DecoderConfig) -> None:
    """8.03 billion parameters, of which a decode step leaves out the embedding."""
    assert weight_bytes(llama_8b, 2) == 2 * (8_030_261_248 - 128_256 * 4096)
    # 128 KiB a token.
    assert kv_bytes(llama_8b, [10, 6], 2) == 16 * 131_072
    assert floor_seconds(3_000, 1_000.0) == 3.0
    with pytest.raises(ValueError, match="bandwidth"):
        floor_seconds(3_000, 0.0)


def test_wheels_are_those_of_the_lock() -> None:
    locked = wheels.pins(wheels.LOCK.read_text().splitlines())
    wanted = wheels.requirements(locked)
    assert "jinja2==3.1.6" in wanted
    assert not [line for line in wanted if line.startswith(("torch", "triton"))]
    assert len(set(wanted)) == len(wheels.PACKAGES)
    command = wheels.download_command(Path("folder"), "3.12", wanted)
    assert command[-len(wanted) :] == wanted
    assert "--no-deps" in command


def test_all_that_a_server_imports_is_among_the_wheels() -> None:
    """But for torch and what only a download, a GGUF file or the clients in the terminal need."""
    project = Path(wheels.LOCK).parent.parent / "pyproject.toml"
    import tomllib

    needed = tomllib.loads(project.read_text())["project"]["dependencies"]
    names = {wheels.canonical(line.partition(">")[0]) for line in needed}
    assert names - set(map(wheels.canonical, wheels.PACKAGES)) == {
        *("torch", "gguf", "huggingface-hub", "httpx", "tqdm")
    }


def a_record(folder: Path, *, judges: bool) -> Record:
    record = Record("decode", folder, judges=judges)
    table = record.table("Decode step", "mode", "ms")
    record.row(table, "FULL | NONE", 3.14159)
    record.check("it is right", True, "3 steps")
    record.target(full_over_floor(1), 2.0)
    record.note("copying is fast")
    return record


def test_a_target_that_is_missed_fails_a_section_on_a_gpu(tmp_path: Path) -> None:
    a_record(tmp_path, judges=True).end()
    found = read_section(tmp_path, "decode")
    assert found is not None
    assert found.state == "failed"
    assert [check.passed for check in found.checks] == [True, False]
    a_record(tmp_path, judges=False).end()
    rehearsed = read_section(tmp_path, "decode")
    assert rehearsed is not None
    assert rehearsed.state == "passed"
    assert rehearsed.checks[1].passed is None


def test_what_is_found_is_on_disk_at_once(tmp_path: Path) -> None:
    a_record(tmp_path, judges=True)
    found = read_section(tmp_path, "decode")
    assert found is not None
    assert found.state == "running"
    assert found.notes == ["copying is fast"]
    assert read_section(tmp_path, "gap") is None


def test_a_section_that_raises_or_is_skipped(tmp_path: Path) -> None:
    raised = a_record(tmp_path, judges=False)
    raised.end("Traceback\n  somewhere\nValueError: 3")
    assert raised.result.state == "failed"
    skipped = Record("attention", tmp_path, judges=True)
    skipped.skip("no Triton")
    skipped.end()
    assert skipped.result.state == "skipped"
    assert not report.passed([raised.result, skipped.result])
    assert report.passed([skipped.result])
    assert not report.passed([])
    assert "failed: `ValueError: 3`" in report.to_markdown([raised.result], is_rehearsal=False)


def test_the_report(tmp_path: Path) -> None:
    record = a_record(tmp_path, judges=False)
    record.end()
    result = record.result
    result.seconds = 1.25
    assert report.to_markdown([result], is_rehearsal=False) == (
        "## On a GPU: `scripts/gpu_check.sh`\n\n"
        "| section | state | seconds |\n| --- | --- | --- |\n| decode | passed | 1.25 |\n\n"
        "### decode\n\nDecode step\n\n| mode | ms |\n| --- | --- |\n| FULL \\| NONE | 3.142 |\n\n"
        "- PASS it is right: 3 steps\n"
        "- not judged FULL decode step over byte floor, batch 1: 2 (target: at most 1.15)\n\n"
        "- copying is fast\n"
    )
    assert "mean nothing" in report.to_markdown([result], is_rehearsal=True)
    data = json.loads(json.dumps(report.to_json([result], is_rehearsal=True)))
    assert data["rehearsal"]
    assert data["passed"]
    assert SectionResult.from_json(data["sections"][0]).checks == result.checks
