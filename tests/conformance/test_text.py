"""What a stream says is what the same request says in one piece, on every path, to the character."""

from __future__ import annotations

import concurrent.futures

import httpx
import pytest
from ways_in import (
    ALL_WAYS,
    CHAT,
    COMPLETION,
    HTTP,
    RESPONSE,
    SOCKET_STREAM,
    SSE,
    TRANSPORTS,
    WAYS,
    ask,
    prompt,
)

ENDOFTEXT, IM_END = 0, 2
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 40}
# Several tokens each in the tiny vocabulary, with lengths of 2, 3 and 4 bytes.
LONG_CHARACTERS = "é日😊"


def token_ids(server, text):
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=300)
    return answer.raise_for_status().json()["tokens"]


@pytest.fixture(scope="module")
def letters(tiny_server):
    """Tokens of plain words, so that what the model says can be cut anywhere."""
    return sorted(set(token_ids(tiny_server, "the river and the boat went to market for apples or cheese")))


@pytest.fixture(scope="module")
def spoken(tiny_server, letters):
    """For each endpoint a request, and the text that it gives."""
    requests = {}
    for endpoint in (CHAT, COMPLETION, RESPONSE):
        body = {**GREEDY, **prompt(endpoint, "Tell me about rivers."), "allowed_token_ids": letters}
        requests[endpoint] = (body, ask(tiny_server.url, endpoint, HTTP, body).text)
    return requests


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_characters_of_several_tokens_come_whole(tiny_server, endpoint, transport, num_logprobs):
    body = {
        **prompt(endpoint, "Say it."),
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 300,
        "allowed_token_ids": token_ids(tiny_server, LONG_CHARACTERS[:2]),
    }
    expected = ask(tiny_server.url, endpoint, HTTP, body).text
    assert "é" in expected
    if num_logprobs and endpoint != RESPONSE:
        body |= {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    heard = ask(tiny_server.url, endpoint, transport, body)
    assert heard.text == expected
    if num_logprobs and endpoint != RESPONSE:
        assert len(heard.only.tokens) == 300


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_a_run_of_half_characters_goes_on(tiny_server, untouched, endpoint, transport):
    body = {
        **prompt(endpoint, "x"),
        "temperature": 0,
        "max_tokens": 300,
        "ignore_eos": True,
        "allowed_token_ids": token_ids(tiny_server, "é")[-1:],
    }
    assert ask(tiny_server.url, endpoint, transport, body).text == "\ufffd" * 300


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_from_the_middle_of_one_word_to_that_of_another(
    tiny_server, spoken, endpoint, transport, includes
):
    body, text = spoken[endpoint]
    stop = text[20:27]
    cut = text.index(stop)
    heard = ask(
        tiny_server.url,
        endpoint,
        transport,
        {**body, "stop": ["zzzz", stop], "include_stop_str_in_output": includes},
    )
    assert heard.text == text[: cut + len(stop) if includes else cut]
    assert heard.only.reason == "stop"
    if endpoint != RESPONSE:
        assert heard.only.stop_reason == stop


@pytest.mark.parametrize(("endpoint", "transport"), WAYS)
def test_a_stop_string_cuts_every_choice_and_its_log_probabilities(tiny_server, spoken, endpoint, transport):
    body, text = spoken[endpoint]
    stop = text[20:27]
    expected = text[: text.index(stop)]
    more = {"logprobs": True} if endpoint == CHAT else {"logprobs": 0}
    heard = ask(tiny_server.url, endpoint, transport, {**body, **more, "stop": stop, "n": 3})
    assert sorted(heard.choices) == [0, 1, 2]
    for said in heard.choices.values():
        assert (said.text, said.reason, said.stop_reason) == (expected, "stop", stop)
        assert expected.startswith("".join(said.tokens)) or "".join(said.tokens).startswith(expected)
        assert len(said.logprobs) == len(said.tokens)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stop_string_cuts_the_answers_to_all_prompts(tiny_server, spoken, transport):
    body, text = spoken[COMPLETION]
    stop = text[20:27]
    body = {**body, "prompt": [body["prompt"], body["prompt"] + " More"]}
    uncut = ask(tiny_server.url, COMPLETION, HTTP, body)
    heard = ask(tiny_server.url, COMPLETION, transport, {**body, "stop": stop})
    for index, said in uncut.choices.items():
        assert heard.choices[index].text == said.text.split(stop)[0]


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_of_two_stop_strings_that_which_is_said_first_counts(tiny_server, spoken, endpoint, transport):
    body, text = spoken[endpoint]
    inner, outer = text[22:26], text[20:28]
    heard = ask(tiny_server.url, endpoint, transport, {**body, "stop": [outer, inner]})
    # When the inner one is there, the outer one is not complete.
    assert heard.text == text[: text.index(inner)]


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_what_might_have_become_a_stop_string_is_not_lost(tiny_server, spoken, endpoint, transport):
    body, text = spoken[endpoint]
    heard = ask(tiny_server.url, endpoint, transport, {**body, "stop": [text[-3:] + "never", "z" * 20]})
    assert heard.text == text
    assert heard.only.reason == "length"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_prompt_is_no_part_of_a_match(tiny_server, spoken, transport):
    body, text = spoken[COMPLETION]
    stop = body["prompt"][-3:] + text[:3]
    assert stop not in text
    assert ask(tiny_server.url, COMPLETION, transport, {**body, "stop": stop}).text == text
    echoed = ask(tiny_server.url, COMPLETION, transport, {**body, "stop": stop, "echo": True})
    assert echoed.text == body["prompt"] + text


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("skips", [True, False])
def test_a_special_token_as_the_callers_stop(tiny_server, letters, endpoint, transport, skips):
    body = {
        **prompt(endpoint, "Go on."),
        "temperature": 0,
        "max_tokens": 20,
        "min_tokens": 4,
        "stop_token_ids": [ENDOFTEXT],
        "ignore_eos": True,
        "allowed_token_ids": [*letters, ENDOFTEXT],
        "logit_bias": {str(ENDOFTEXT): 100},
        "skip_special_tokens": skips,
    }
    heard = ask(tiny_server.url, endpoint, transport, body)
    assert heard.only.reason == "stop"
    assert heard.text
    assert "<|" not in heard.text
    assert heard.usage is None or heard.usage["completion_tokens"] == 5
    if endpoint != RESPONSE:
        assert heard.only.stop_reason == ENDOFTEXT


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
def test_the_models_own_end_is_a_reason_for_each_of_many(tiny_server, letters, endpoint, transport):
    body = {
        **prompt(endpoint, "Say little."),
        "temperature": 0,
        "max_tokens": 50,
        "min_tokens": 3,
        "logit_bias": {str(IM_END): 100},
        "allowed_token_ids": [*letters, IM_END],
    }
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(tiny_server.url, endpoint, transport, body), range(12)))
    assert {(heard.text, heard.only.reason) for heard in answers} == {(answers[0].text, "stop")}


@pytest.mark.parametrize(("endpoint", "transport"), ALL_WAYS)
@pytest.mark.parametrize("text", ["def f():\n", "a    b", "\n\n 3) Total: 47", "Hello"])
def test_leading_and_running_spaces(tiny_server, endpoint, transport, text):
    spaces = token_ids(tiny_server, "  the   river\n\n  was\t")
    body = {
        **prompt(endpoint, text),
        "seed": 1,
        "temperature": 1,
        "max_tokens": 30,
        "allowed_token_ids": sorted(set(spaces)),
    }
    expected = ask(tiny_server.url, endpoint, HTTP, body).text
    assert expected != expected.strip() or "  " in expected
    assert ask(tiny_server.url, endpoint, transport, body).text == expected


@pytest.mark.parametrize("transport", [SSE, SOCKET_STREAM])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_the_first_chunk_comes_with_the_first_output(tiny_server, endpoint, transport):
    body = {**GREEDY, **prompt(endpoint, "word " * 1500), "stream_options": {"include_usage": True}}
    heard = ask(tiny_server.url, endpoint, transport, body)
    whole = ask(tiny_server.url, endpoint, HTTP, body)
    assert heard.text == whole.text
    # Not more than one for the role, one for each token, the end and the usage, however the prompt was read.
    assert len(heard.chunks) <= 3 + heard.usage["completion_tokens"]
