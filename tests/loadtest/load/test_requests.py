"""What is asked, by how many, and when."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from loadtest.load.arrivals import PoissonArrivals, Shape, ThinkTime
from loadtest.load.command import for_one_file
from loadtest.load.mixes import KINDS, Lengths, Mix, Question, parse_mix
from streamserve.bench.words import WORDS, TextMaker

MAKER = TextMaker(dict.fromkeys(WORDS, 2))


def tokens(question: Question) -> int:
    return sum(2 * len(message["content"].split()) for message in question.messages)


def draw(weights: str, lengths: Lengths, count: int = 400) -> list[Question]:
    mix, rng = Mix(parse_mix(weights), lengths, MAKER, seed=0), random.Random(1)
    return [mix.draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("sharegpt", {"sharegpt": 1.0}),
        ("sharegpt:8, document:0.5", {"sharegpt": 8.0, "document": 0.5}),
        ("shared-prefix:0,document", {"shared-prefix": 0.0, "document": 1.0}),
    ],
)
def test_a_mix_is_kinds_and_weights(text: str, weights: dict[str, float]) -> None:
    assert parse_mix(text) == weights


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fun", "there is no 'fun'; choose of sharegpt, shared-prefix, document"),
        ("sharegpt:x", "'sharegpt:x' has to be of the form KIND:WEIGHT"),
        ("sharegpt:-1", "the weight of sharegpt has to be at least 0"),
        ("sharegpt:inf", "the weight of sharegpt has to be at least 0"),
        ("sharegpt:0", "one of the weights has to be more than 0"),
        ("", "there is no ''"),
    ],
)
def test_a_wrong_mix_is_explained(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_mix(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize("document", [1, 100, 256, 260, 700, 8000])
def test_a_document_is_as_long_as_asked_and_new_from_its_beginning(document: int) -> None:
    questions = draw("document", Lengths(document=document), 20)
    # Words are of two tokens.
    assert {tokens(question) for question in questions} == {document // 2 * 2}
    if document >= 100:
        assert len({question.messages[0]["content"][:60] for question in questions}) == 20


def test_kinds_come_by_their_weights() -> None:
    kinds = Counter(
        question.kind
        for question in draw("sharegpt:3,document:1,shared-prefix:0", Lengths(document=100), 2000)
    )
    assert set(kinds) == {"sharegpt", "document"}
    assert kinds["sharegpt"] == pytest.approx(1500, abs=80)


def test_the_same_seed_asks_the_same() -> None:
    assert draw("sharegpt,document", Lengths()) == draw("sharegpt,document", Lengths())


def test_prompts_like_sharegpts() -> None:
    lengths = [tokens(question) for question in draw("sharegpt", Lengths(), 3000)]
    assert fmean(lengths) == pytest.approx(145, rel=0.15)
    assert max(lengths) <= 1024


def test_a_shared_prefix_is_a_system_message_that_all_have() -> None:
    questions = draw("shared-prefix", Lengths(shared_prefix=300))
    assert {message["role"] for message in (each.messages[0] for each in questions)} == {"system"}
    assert len({each.messages[0]["content"] for each in questions}) == 1
    assert len({each.messages[1]["content"] for each in questions}) == len(questions)
    assert {tokens(each) for each in questions} <= set(range(300 + 8, 300 + 49))


def test_documents_are_long_and_of_their_own() -> None:
    questions = draw("document", Lengths(document=3000), 20)
    assert {tokens(each) for each in questions} == {3000}
    assert len({each.messages[0]["content"] for each in questions}) == 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [256, 1000])
def test_nothing_is_longer_than_the_context(kind: str, context: int) -> None:
    for question in draw(kind, Lengths(most_output=100).within(context)):
        assert 1 <= question.max_tokens <= 100
        assert tokens(question) + question.max_tokens <= context - 16 or kind == "shared-prefix"


def test_a_body_asks_for_all_tokens_unless_told_otherwise() -> None:
    question = Question("sharegpt", ({"role": "user", "content": "Hi"},), 5)
    body = question.body("tiny", stops_at_eos=False)
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["stream"]) == ("tiny", 5, True)
    assert "ignore_eos" not in question.body("tiny", stops_at_eos=True)


def test_an_open_loop_is_a_poisson_process_whatever_the_answers_take() -> None:
    arrivals = PoissonArrivals(4.0, random.Random(2))
    now, moments = 50.0, []
    for number in range(4000):
        now += arrivals.pause(now)
        moments.append(now)
        # Every tenth request holds the user up; the next ones follow at once.
        now += 1.0 if number % 10 == 0 else 0.0
    assert len(moments) / (moments[-1] - 50.0) == pytest.approx(4.0, rel=0.05)


def test_who_is_behind_its_plan_says_by_how_much() -> None:
    arrivals = PoissonArrivals(4.0, random.Random(2))
    assert arrivals.lateness(50.0) == 0.0
    due = 50.0 + arrivals.pause(50.0)
    assert arrivals.lateness(due + 3.0) == pytest.approx(3.0)
    assert ThinkTime(2.0, random.Random(3)).lateness(9.0) == 0.0


def test_a_closed_loop_thinks() -> None:
    thinking = ThinkTime(2.0, random.Random(3))
    assert fmean(thinking.pause(0.0) for _ in range(5000)) == pytest.approx(2.0, rel=0.05)
    assert ThinkTime(0.0, random.Random(3)).pause(7.0) == 0.0


@pytest.mark.parametrize(
    ("shape", "users"),
    [
        (Shape("ramp", 10, 20.0, 1), [1, 1, 3, 5, 8, 10, None]),
        (Shape("steps", 10, 20.0, 4), [3, 3, 5, 5, 10, 10, None]),
        (Shape("steps", 3, 20.0, 10), [1, 1, 1, 2, 3, 3, None]),
    ],
)
def test_shapes(shape: Shape, users: list[int | None]) -> None:
    assert [shape.users_at(second) for second in (0.0, 2.0, 5.0, 9.9, 15.0, 19.9, 20.0)] == users


def test_the_folder_becomes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "loadtest"
    folder.mkdir()
    file = folder / "locustfile.py"
    monkeypatch.chdir(tmp_path)
    for word in ("loadtest/", "loadtest", str(folder), "./loadtest"):
        assert for_one_file(["locust", "-f", word, "-u", "3"], file) == ["locust", "-f", str(file), "-u", "3"]
        assert for_one_file([f"-f{word}"], file) == [f"-f{file}"]
        assert for_one_file([f"--locustfile={word}"], file) == [f"--locustfile={file}"]
    same = ["locust", "-f", "loadtest/locustfile.py", "-f", str(tmp_path), "--host", "", "-f"]
    assert for_one_file(same, file) == same
