"""Several choices, token counts and log probabilities: the same on every path, and each where it belongs."""

from __future__ import annotations

import concurrent.futures
import math

import httpx
import pytest
from ways_in import CHAT, COMPLETION, HTTP, SSE, TRANSPORTS, WAYS, Refused, ask, prompt

MODEL = {"model": "tiny"}
STREAM_WAYS = [way for way in WAYS if "s" in way[1] and way[1] in ("sse", "socket-stream")]
USAGE = {"stream_options": {"include_usage": True}}
SPACED = "\n\n 3) Total: 47"


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_each_choice_has_its_own_of_everything(tiny_server, endpoint, transport, num_logprobs):
    body = {**MODEL, **prompt(endpoint, "Name one."), "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    if num_logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    whole = ask(tiny_server.url, endpoint, HTTP, body)
    heard = ask(tiny_server.url, endpoint, transport, {**body, **USAGE})
    assert len({said.text for said in whole.choices.values()}) == 3
    for index, said in whole.choices.items():
        other = heard.choices[index]
        assert (other.text, other.reason, other.tokens) == (said.text, said.reason, said.tokens)
        # Other requests beside it change the last digits.
        assert other.logprobs == pytest.approx(said.logprobs, abs=1e-3)
        assert other.offsets == said.offsets
        assert bool(other.tokens) == bool(num_logprobs)
    assert heard.usage["completion_tokens"] == whole.usage["completion_tokens"]
    assert heard.usage["prompt_tokens"] == whole.usage["prompt_tokens"]


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
def test_usage_is_the_sum_of_all_choices_and_counts_the_prompt_once(tiny_server, endpoint, transport):
    body = {**MODEL, **prompt(endpoint, "Count."), "n": 3, "max_tokens": 7, "ignore_eos": True}
    one = ask(tiny_server.url, endpoint, HTTP, {**body, "n": 1})
    heard = ask(tiny_server.url, endpoint, transport, {**body, **USAGE})
    assert heard.usage["completion_tokens"] == 21
    assert heard.usage["prompt_tokens"] == one.usage["prompt_tokens"]
    assert heard.usage["total_tokens"] == one.usage["prompt_tokens"] + 21


@pytest.mark.parametrize(("endpoint", "transport"), STREAM_WAYS)
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_counts_in_every_chunk_do_not_depend_on_how_the_prompt_was_read(
    tiny_server, endpoint, transport, max_tokens
):
    body = {**MODEL, **prompt(endpoint, "word " * 1500), "max_tokens": max_tokens, "ignore_eos": True}
    whole = ask(tiny_server.url, endpoint, HTTP, body)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    heard = ask(tiny_server.url, endpoint, transport, {**body, **options})
    counts = [chunk["usage"] for chunk in heard.chunks]
    assert {count["prompt_tokens"] for count in counts} == {whole.usage["prompt_tokens"]}
    said = [count["completion_tokens"] for count in counts]
    assert said == sorted(said)
    assert said[-1] == max_tokens
    assert said[0] >= 1 or endpoint == CHAT


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
def test_too_many_choices_are_refused_and_as_many_as_allowed_finish(
    tiny_server, untouched, endpoint, transport
):
    body = {**MODEL, **prompt(endpoint, "Many."), "max_tokens": 2, "ignore_eos": True}
    for number in (512, 100_000, 2**70):
        with pytest.raises(Refused) as refused:
            ask(tiny_server.url, endpoint, transport, {**body, "n": number})
        assert (refused.value.status, refused.value.error["param"]) == (400, "n")
        assert not refused.value.is_late
    heard = ask(tiny_server.url, endpoint, transport, {**body, "n": 100})
    assert len(heard.choices) == 100
    assert {said.reason for said in heard.choices.values()} == {"length"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("text", [SPACED, "Hello  world", "éa 日 b"])
def test_echoed_tokens_join_to_the_text_and_offsets_point_into_it(tiny_server, transport, text):
    body = {**MODEL, "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}
    said = ask(tiny_server.url, COMPLETION, transport, body).only
    assert said.text.startswith(text)
    assert "".join(said.tokens) == said.text
    at = 0
    for token, offset in zip(said.tokens, said.offsets, strict=True):
        assert offset == at
        at += len(token)
    assert said.logprobs[0] is None
    assert all(value is not None and value <= 0 for value in said.logprobs[1:])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_logprobs", [None, 0, 1])
def test_a_prompt_can_be_scored(tiny_server, transport, num_logprobs):
    body = {**MODEL, "prompt": "Two plus two is", "max_tokens": 0, "echo": True}
    if num_logprobs is not None:
        body["logprobs"] = num_logprobs
    heard = ask(tiny_server.url, COMPLETION, transport, {**body, **USAGE})
    assert (heard.text, heard.only.reason) == ("Two plus two is", "length")
    assert heard.usage["completion_tokens"] == 0
    if num_logprobs is not None:
        assert len(heard.only.tokens) == heard.usage["prompt_tokens"]
        assert heard.only.logprobs[0] is None
        assert all(value < 0 for value in heard.only.logprobs[1:])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_of_many_steps_is_scored_whole(tiny_server, transport):
    ids = [5 + i % 500 for i in range(1600)]
    body = {**MODEL, "prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    said = ask(tiny_server.url, COMPLETION, transport, body).only
    assert len(said.tokens) == len(said.logprobs) == len(said.top) == len(ids) + 1
    assert None not in said.logprobs[1:]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_logprobs_may_be_in_a_completion(tiny_server, transport):
    body = {**MODEL, "prompt": "Say", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for off in (None, False):
        assert ask(tiny_server.url, COMPLETION, transport, {**body, "logprobs": off}).only.logprobs == []
    for number in (0, 1, 5, 6):
        said = ask(tiny_server.url, COMPLETION, transport, {**body, "logprobs": number}).only
        assert len(said.logprobs) == 4
        assert all(value is not None and math.isfinite(value) for value in said.logprobs)
        for token, top in zip(said.tokens, said.top, strict=True):
            # Texts that are the same are one entry.
            assert number == 0 or 1 <= len(top) <= number + 1
            assert token in (top or {token}) or token == "" or "\ufffd" in token
    for bad in (-1, True, 21, 1.5, "1"):
        with pytest.raises(Refused) as refused:
            ask(tiny_server.url, COMPLETION, transport, {**body, "logprobs": bad})
        assert (refused.value.status, refused.value.error["param"]) == (400, "logprobs")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_logprobs_may_be_in_a_chat(tiny_server, transport):
    body = {**MODEL, **prompt(CHAT, "Say"), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for number in (None, 0, 3, 20):
        said = ask(tiny_server.url, CHAT, transport, {**body, "logprobs": True, "top_logprobs": number}).only
        assert {len(top) for top in said.top} == {number or 0}
        assert len(said.logprobs) == 4
    for bad in ({"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3},
                {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):  # fmt: skip
        with pytest.raises(Refused) as refused:
            ask(tiny_server.url, CHAT, transport, {**body, **bad})
        assert (refused.value.status, refused.value.error["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 48])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_that_is_all_in_the_cache(tiny_server, num_tokens, transport):
    ids = [(TRANSPORTS.index(transport) + 7 * i) % 400 + 5 for i in range(num_tokens)]
    body = {**MODEL, "prompt": ids, "max_tokens": 3, "temperature": 0, "logprobs": 1, **USAGE}
    first, second = (ask(tiny_server.url, COMPLETION, transport, body) for _ in range(2))
    assert second.text == first.text
    assert second.only.tokens == first.only.tokens
    assert second.only.logprobs == pytest.approx(first.only.logprobs, abs=1e-3)
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == (num_tokens - 1) // 16 * 16
    one = ask(tiny_server.url, COMPLETION, transport, {**body, "max_tokens": 1})
    assert one.usage["completion_tokens"] == 1


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
@pytest.mark.parametrize("cold", [{"temperature": 1e-4}, {"temperature": 1e-45}, {"top_p": 1e-9}])
def test_as_good_as_greedy_is_greedy_and_bothers_nobody_in_the_batch(
    tiny_server, untouched, endpoint, transport, cold
):
    body = {**MODEL, **prompt(endpoint, "Once"), "max_tokens": 12, "seed": 5}
    greedy = ask(tiny_server.url, endpoint, HTTP, {**body, "temperature": 0})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        warm = pool.submit(ask, tiny_server.url, endpoint, transport, {**body, "temperature": 1})
        heard = ask(tiny_server.url, endpoint, transport, {**body, **cold})
    assert heard.text == greedy.text != ""
    assert warm.result().text == ask(tiny_server.url, endpoint, HTTP, {**body, "temperature": 1}).text


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_any_seed_of_64_bits_is_one(tiny_server, endpoint, seed):
    body = {**MODEL, **prompt(endpoint, "Roll."), "max_tokens": 12, "seed": seed, "temperature": 1}
    assert ask(tiny_server.url, endpoint, HTTP, body).text == ask(tiny_server.url, endpoint, SSE, body).text


def test_what_a_benchmark_sends_is_accepted(tiny_server):
    """The fields of requests that `vllm bench serve` makes, with counts that it relies on."""
    common = {
        **MODEL, "temperature": 0.0, "repetition_penalty": 1.0, "stream": True, "ignore_eos": True,
        "min_tokens": 10, "n": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "seed": 0, "use_beam_search": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    completion = {**common, "prompt": "Go on", "max_tokens": 10, "logprobs": None, "best_of": 1}
    message = {"role": "user", "content": [{"type": "text", "text": "Go on"}]}
    chat = {**common, "messages": [message], "max_completion_tokens": 10, "logprobs": True, "top_logprobs": 0}
    for endpoint, body in (
        (COMPLETION, completion),
        (COMPLETION, {**completion, "logprobs": 1}),
        (CHAT, chat),
    ):
        heard = ask(tiny_server.url, endpoint, SSE, body)
        assert heard.usage["completion_tokens"] == 10
        assert heard.only.reason == "length"
    headers = {"Authorization": "Bearer unused", "x-request-id": "bench-0", "X-Vllm-Priority": "3"}
    answer = httpx.post(f"{tiny_server.url}/v1/completions", json=completion, headers=headers, timeout=300)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "bench-0"
