"""Several choices and several prompts: every one whole, under its own index, over every path."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from streamserve.messages import AddRequest, Finish

PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
WORDS = ["the ", "quick ", "brown ", "fox ", "jumps ", "over ", "lazy ", "dog ", "日本 ", "naïve "]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {**prompt, **fields}


def by_seed(frontend: Any, num_words: int = 6) -> None:
    """Makes the engine answer something that the seed alone decides."""

    def script(request: AddRequest) -> list[int]:
        draw = random.Random(request.params.seed)
        text = "".join(draw.choice(WORDS) for _ in range(num_words))
        return [*frontend.encode(text), frontend.engine.facts["eos_token_ids"][0]]

    frontend.engine.script = script


def texts_of(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    ]


def texts_of_stream(chunks: list[Any]) -> dict[int, str]:
    """Text by index. One choice in a chunk at most; role first, finish last, each once."""
    texts: dict[int, str] = {}
    finished: set[int] = set()
    for chunk in chunks:
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in finished
        if "delta" in choice:
            assert ("role" in choice["delta"]) == (index not in texts)
            assert None not in choice["delta"].values()
            text = choice["delta"].get("content", "")
        else:
            text = choice["text"]
        texts[index] = texts.get(index, "") + text
        if choice["finish_reason"]:
            finished.add(index)
    assert finished == texts.keys()
    return texts


@PATHS
@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_stream_has_the_choices_of_the_same_answer_in_one_piece(
    frontend: Any, events: Any, path: str, tokens_per_step: int
) -> None:
    frontend.engine.tokens_per_step = tokens_per_step
    by_seed(frontend)
    fields = {"n": 3, "seed": 7, "max_tokens": 100, "stop": ["lazy dog"]}
    whole = await frontend.http.post(path, json=body_of(path, **fields))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await frontend.http.post(path, json=body_of(path, **fields, **options))
    texts = texts_of(whole.json())
    assert len(set(texts)) == 3
    chunks = events(streamed.text)
    assert texts_of_stream(chunks) == dict(enumerate(texts))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"] == whole.json()["usage"]


@PATHS
async def test_a_choice_is_what_its_own_seed_gives(frontend: Any, path: str) -> None:
    by_seed(frontend)
    together = await frontend.http.post(path, json=body_of(path, n=3, seed=-2))
    alone = [await frontend.http.post(path, json=body_of(path, seed=seed)) for seed in (-2, -1, 0)]
    assert texts_of(together.json()) == [text for answer in alone for text in texts_of(answer.json())]


async def test_seeds_go_on_from_the_lowest_behind_the_highest(frontend: Any) -> None:
    await frontend.complete(n=2, seed=2**63 - 1, max_tokens=1)
    assert [add.params.seed for add in frontend.engine.adds] == [2**63 - 1, -(2**63)]


async def test_without_a_seed_choices_differ(frontend: Any) -> None:
    await frontend.complete(["a", "a"], n=2, max_tokens=1)
    assert len({add.params.seed for add in frontend.engine.adds}) == 4


@PATHS
async def test_usage_counts_the_prompt_once_and_all_choices(frontend: Any, events: Any, path: str) -> None:
    frontend.engine.cached_tokens = 2
    frontend.engine.script = lambda _request: frontend.encode("a b c d e f g")
    fields = {"n": 3, "max_tokens": 7, "ignore_eos": True}
    whole = (await frontend.http.post(path, json=body_of(path, **fields))).json()
    usage = whole["usage"]
    assert usage["completion_tokens"] == 21
    assert usage["prompt_tokens"] == len(frontend.engine.adds[0].tokens)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await frontend.http.post(path, json=body_of(path, **fields, **options))).text)
    assert chunks[-2]["usage"] == usage
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


@PATHS
@pytest.mark.parametrize("n", [1, 2])
async def test_continuous_usage_counts_up(frontend: Any, events: Any, path: str, n: int) -> None:
    frontend.engine.cached_tokens = 1
    frontend.say("one two three")
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await frontend.http.post(path, json=body_of(path, n=n, stream=True, stream_options=options))
    *chunks, last, _ = events(response.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    for chunk in [*chunks, last]:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    # It acts only where usage is asked for at all.
    silent = {"continuous_usage_stats": True}
    response = await frontend.http.post(path, json=body_of(path, n=n, stream=True, stream_options=silent))
    assert all("usage" not in chunk for chunk in events(response.text)[:-1])


async def test_a_list_of_prompts_is_answered_in_order(frontend: Any, events: Any) -> None:
    frontend.engine.script = lambda request: [
        *[int(token) for token in request.tokens],
        request.params.seed % 2 + frontend.encode("A")[0],
        frontend.engine.facts["eos_token_ids"][0],
    ]
    prompts = ["one", "two", "three"]
    expected = [prompt + end for prompt in prompts for end in "AB"]
    fields = {"n": 2, "seed": 4, "max_tokens": 50}
    whole = (await frontend.complete(prompts, **fields)).json()
    assert texts_of(whole) == expected
    assert whole["usage"]["prompt_tokens"] == sum(len(frontend.encode(prompt)) for prompt in prompts)
    ids = [frontend.encode(prompt) for prompt in prompts]
    assert texts_of((await frontend.complete(ids, **fields)).json()) == expected
    streamed = events((await frontend.complete(prompts, stream=True, **fields)).text)
    assert texts_of_stream(streamed) == dict(enumerate(expected))


async def test_one_bad_prompt_in_a_list_refuses_all(frontend: Any) -> None:
    for prompts in (["a", ""], [[1], [512]], [[1], [5] * 512]):
        response = await frontend.complete(prompts)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    assert not frontend.engine.adds


async def test_many_prompts(run_harness: Any) -> None:
    async with run_harness(max_model_len=64) as frontend:
        response = await frontend.complete([[index % 400] for index in range(1024)], max_tokens=1)
        choices = response.json()["choices"]
        assert [choice["text"] for choice in choices] == [
            frontend.decode([index % 400]) for index in range(1024)
        ]


async def test_more_than_may_wait_is_refused_for_good(run_harness: Any) -> None:
    async with run_harness(max_waiting=6) as frontend:
        assert (await frontend.complete(["a"] * 3, n=2, max_tokens=1)).status_code == 200
        response = await frontend.complete(["a"] * 3, n=3, max_tokens=1)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        response = await frontend.complete("a", n=7, max_tokens=1)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_into_the_queue_now_is_turned_away_whole(
    run_harness: Any, stream: bool
) -> None:
    async with run_harness(max_waiting=4) as frontend:
        engine = frontend.engine
        engine.is_automatic = False
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(frontend.complete("a", n=2, max_tokens=1))
            await engine.until(lambda: len(engine.adds) == 2)
            refused = await frontend.complete("a", n=3, max_tokens=1, stream=stream)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            # Those of its choices that had been let in are taken back.
            await engine.until(lambda: len(engine.live) == 2)
            engine.step()
        assert waiting.result().status_code == 200


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_the_failure_of_one_choice_ends_all(
    frontend: Any, events: Any, path: str, stream: bool
) -> None:
    engine = frontend.engine
    engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(
            frontend.http.post(path, json=body_of(path, n=3, max_tokens=50, stream=stream))
        )
        await engine.until(lambda: len(engine.adds) == 3)
        engine.step()
        await frontend.until(lambda: not frontend.client.admission.waiting)
        first, second, third = (add.stream for add in engine.adds)
        engine.finish(second, Finish.ERROR)
        await engine.until(lambda: len(engine.aborts) == 2)
    assert set(engine.aborts) == {first, third}
    response = asked.result()
    if stream:
        assert events(response.text)[-1]["error"]["code"] == "request_failed"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_choices(run_harness: Any, path: str, stream: bool) -> None:
    async with run_harness() as frontend, frontend.served() as url:
        engine = frontend.engine
        engine.is_automatic = False
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = body_of(path, n=4, max_tokens=50, ignore_eos=True, stream=stream)
            sending = asyncio.ensure_future(http.post(path, json=body))
            await engine.until(lambda: len(engine.adds) == 4)
            engine.step()
            await frontend.until(lambda: not frontend.client.admission.waiting)
            sending.cancel()
            await asyncio.wait([sending])
            await engine.until(lambda: not engine.live)
        assert sorted(engine.aborts) == sorted(add.stream for add in engine.adds)


async def test_a_choice_that_meets_its_stop_string_is_freed_while_the_others_go_on(frontend: Any) -> None:
    engine = frontend.engine
    by_text = {0: "one two three", 1: "one stop two three four five six seven"}
    engine.script = lambda request: frontend.encode(by_text[request.params.seed])
    response = await frontend.complete(n=2, seed=0, stop=["stop"], max_tokens=12, stream=True)
    assert response.status_code == 200
    assert engine.aborts == [engine.adds[1].stream]


async def test_a_slow_reader_of_several_choices_gets_merged_deltas(frontend: Any) -> None:
    engine = frontend.engine
    engine.is_automatic = False
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(frontend.complete(n=2, max_tokens=40, ignore_eos=True, stream=True))
        await engine.until(lambda: len(engine.adds) == 2)
        # All steps before a task runs once.
        while engine.step():
            pass
    body = asked.result().text
    assert body.count("data: {") <= 8
    assert body.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_many_choices_finish_while_others_make_progress(frontend: Any, stream: bool) -> None:
    other = asyncio.ensure_future(frontend.complete(max_tokens=200, ignore_eos=True))
    response = await frontend.complete(n=128, max_tokens=2, stream=stream)
    assert response.status_code == 200
    assert (await other).json()["usage"]["completion_tokens"] == 200


# The best of several


def by_likelihood(frontend: Any) -> None:
    """Choice with seed s says the letter s, and is the likelier the nearer s is to 3."""
    letters = {seed: frontend.encode("ABCDEFGH"[seed])[0] for seed in range(8)}
    odds = {letter: -1.0 - abs(seed - 3) - seed / 100 for seed, letter in letters.items()}
    frontend.engine.script = lambda request: [letters[request.params.seed]] * 3
    frontend.engine.odds = lambda token: (odds[token], [(token, odds[token])] * 20)


async def test_the_likeliest_are_answered_likeliest_first(frontend: Any) -> None:
    by_likelihood(frontend)
    answer = (await frontend.complete(best_of=8, n=3, seed=0, max_tokens=3)).json()
    assert texts_of(answer) == ["DDD", "CCC", "EEE"]
    assert answer["usage"]["completion_tokens"] == 24
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 3
    assert len(frontend.engine.adds) == 8


async def test_each_prompt_has_its_own_best(frontend: Any) -> None:
    by_likelihood(frontend)
    answer = (await frontend.complete(["a", "b"], best_of=4, seed=0, max_tokens=3, logprobs=0)).json()
    assert texts_of(answer) == ["DDD", "DDD"]
    assert answer["choices"][1]["logprobs"]["tokens"] == ["D", "D", "D"]


async def test_a_stream_cannot_choose(frontend: Any) -> None:
    response = await frontend.complete(best_of=2, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert (await frontend.complete(best_of=2, n=2, stream=True, max_tokens=1)).status_code == 200
