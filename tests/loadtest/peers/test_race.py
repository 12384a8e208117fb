"""Whole races between made-up servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.peers import __main__ as command
from loadtest.peers.measuring import Measurement, drive, evaluate, make_job
from loadtest.peers.models import ServedModel
from loadtest.peers.process_tree import still_running
from loadtest.peers.prompts import PromptMaker
from loadtest.peers.race import Race
from loadtest.peers.running import RunningServer, ServerFailed
from loadtest.peers.servers import PEERS, variant
from loadtest.peers.workload import Case, Limits, Shape

CASE = Case("tiny", "decode", Shape(prompt_tokens=5, max_tokens=12, waves=2), concurrency=3)
LIMITS = Limits(context=64, streams=3, threads=1)


@pytest.fixture
def race(tiny: ServedModel, tmp_path: Path):
    def make(*peers, rounds: int = 1) -> list[Measurement]:
        return list(Race(peers, tiny, (CASE,), LIMITS, rounds, tmp_path).run(rehearse=False))

    return make


def test_servers_take_turns_and_get_the_same(race, fake_peer) -> None:
    measurements = race(fake_peer("a"), fake_peer("b"), rounds=2)
    turns = [(each.round, each.peer, each.case) for each in measurements]
    assert turns == [
        (number, peer, case)
        for number in (0, 1)
        for peer in ("a", "b")
        for case in ("tiny/startup", "tiny/decode/3")
    ]
    assert all(each.problems == () for each in measurements)
    startup, decode = measurements[0].figures, measurements[1].figures
    assert 0.0 < startup["ready_s"] < startup["first_token_s"]
    assert decode["tokens_per_event"] == 1.0
    assert {"ttft_p99_ms", "itl_p99_ms", "tokens_per_s", "cpu_s_per_1k", "pss_mb"} <= decode.keys()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--short", "2"), "6 x 10 tokens instead of 12"),
        (("--no-usage",), "6 x no usage"),
        (("--refuse",), '6 x HTTP 429: {"error": "too much"}'),
    ],
)
def test_wrong_answers_are_flagged(race, fake_peer, flags: tuple[str, ...], problem: str) -> None:
    measurement = race(fake_peer(flags=flags))[-1]
    assert measurement.problems == (problem,)


def test_a_server_that_cannot_start_is_left_out_of_later_rounds(race, fake_peer, capsys) -> None:
    measurements = race(fake_peer("bad", flags=("--broken",)), fake_peer("good"), rounds=2)
    assert {each.peer for each in measurements} == {"good"}
    told = capsys.readouterr().err
    assert told.count("bad ended with 1") == 1
    assert "cannot find the model" in told


def test_a_server_is_asked_until_it_is_ready(tiny, tmp_path, fake_peer) -> None:
    with RunningServer(fake_peer(flags=("--not-ready", "3")), tiny, LIMITS, tmp_path / "log") as server:
        # Three questions went by.
        assert server.ready_s > 0.06


def test_all_processes_of_a_server_are_stopped(tiny, tmp_path, fake_peer) -> None:
    with RunningServer(fake_peer(flags=("--child",)), tiny, LIMITS, tmp_path / "log") as server:
        members = server.tree.members()
        assert len(members) == 2
        assert still_running(members) == members
    assert still_running(members) == []


def test_a_server_is_stopped_when_its_race_is_broken_off(tiny, tmp_path, fake_peer) -> None:
    members = []

    def break_off() -> None:
        with RunningServer(fake_peer(), tiny, LIMITS, tmp_path / "log") as server:
            members.extend(server.tree.members())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert len(members) == 1
    assert still_running(members) == []


def test_a_broken_server_says_what_it_printed(tiny, tmp_path, fake_peer) -> None:
    with pytest.raises(ServerFailed, match="cannot find the model"):
        RunningServer(fake_peer(flags=("--broken",)), tiny, LIMITS, tmp_path / "log").__enter__()


def test_streams_beside_a_document_are_cut_off(tiny, tmp_path, fake_peer) -> None:
    shape = Shape(prompt_tokens=5, max_tokens=10**9, document_tokens=50)
    case = Case("tiny", "document", shape, concurrency=2)
    with RunningServer(fake_peer(), tiny, LIMITS, tmp_path / "log") as server:
        job = replace(make_job(server, case, PromptMaker(tiny.folder), "seed"), alone_s=0.3)
        outcome, _ = drive(server, job)
    figures, problems = evaluate(outcome, job)
    assert problems == ()
    assert len(outcome.answers) == 2
    assert figures["rate_kept"] > 0.0
    assert "tokens_per_s" not in figures


def test_the_command_leaves_out_what_is_missing(tiny, fake_peer, monkeypatch, capsys, tmp_path) -> None:
    peers = {"here": fake_peer("here"), "gone": fake_peer("gone", absent="not installed")}
    monkeypatch.setattr(command, "PEERS", peers)
    results = tmp_path / "results"
    arguments = ["--peers", "here,gone", "--shapes", "startup", "--rounds", "2", "--json", str(results)]
    assert command.main(arguments) == 0
    output = capsys.readouterr()
    assert "gone: skipped: not installed" in output.err
    assert "Medians of 2 rounds." in output.out
    measurements = [Measurement.from_line(line) for line in results.read_text().splitlines()]
    assert [each.peer for each in measurements] == ["here", "here"]


def test_the_command_fails_where_answers_are_wrong(tiny, fake_peer, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "PEERS", {"fake": fake_peer(flags=("--no-usage",))})
    arguments = ["--peers", "fake", "--concurrency", "1", "--rounds", "1", "--no-rehearsal"]
    assert command.main(arguments) == 1
    assert "WRONG: 8 x no usage" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--peers", "nobody"], "no server is called nobody"),
        (["--workload", "huge"], "no workload is called huge"),
        (["--variant", "x=y", "--peers", "x"], "no server is called y"),
        (["--variant", "x", "--peers", "x"], "not of the form"),
    ],
)
def test_the_command_says_what_it_does_not_know(arguments: list[str], told: str, capsys) -> None:
    assert command.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_a_variant_adds_flags_to_a_server(tiny: ServedModel) -> None:
    uncached = variant("uncached=streamserve --no-enable-prefix-caching")
    base = PEERS["streamserve"].command(tiny, LIMITS, 1)
    assert uncached.name == "uncached"
    assert uncached.command(tiny, LIMITS, 1) == [*base, "--no-enable-prefix-caching"]
    assert uncached.environment(LIMITS) == PEERS["streamserve"].environment(LIMITS)


def test_a_variant_sets_variables_before_flags(tiny: ServedModel) -> None:
    two = variant("two=vllm OMP_NUM_THREADS=2 A_B=c=d --seed 1 X=1")
    assert two.command(tiny, LIMITS, 1)[-3:] == ["--seed", "1", "X=1"]
    own = PEERS["vllm"].environment(LIMITS)
    assert two.environment(LIMITS) == {**own, "OMP_NUM_THREADS": "2", "A_B": "c=d"}


@pytest.mark.parametrize("name", list(PEERS))
def test_every_server_is_on_the_loopback_and_asked_for_the_same_tokens(name: str, tiny: ServedModel) -> None:
    line = PEERS[name].command(tiny, LIMITS, 1234)
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--port") + 1] == "1234"
    body = PEERS[name].body(tiny, "text", 7)
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["stream"]) == ("text", 7, 0.0, True)
