"""What requests may ask for, through the real server: the same over chat and completions, stream or not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server import sse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
# As many ids as the tiny model has; the last tokens of its vocabulary are words.
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def client(tiny_server):
    with httpx.Client(base_url=tiny_server.url, timeout=300) as client:
        yield client


def body(path, prompt="The river runs through", **fields):
    given = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "tiny", "temperature": 0, "max_tokens": 12, "ignore_eos": True, **given, **fields}


def ask(client, path, **fields):
    response = client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, path, **fields):
    """The chunks of a stream, parsed by a parser that takes no NaN."""
    request = body(path, stream=True, **fields)
    with client.stream("POST", path, json=request) as response:
        assert response.status_code == 200, response.read()
        events = list(sse_events(response))
    assert events[-1] == "[DONE]"
    return [json.loads(event, parse_constant=pytest.fail) for event in events[:-1]]


def texts(answer):
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    ]


def stream_texts(chunks):
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


@PATHS
def test_choices_of_a_stream_are_those_of_the_same_seed_in_one_piece(client, path):
    fields = {"n": 4, "seed": 7, "temperature": 1.0}
    whole = ask(client, path, **fields)
    assert len(set(texts(whole))) > 1
    assert texts(ask(client, path, **fields)) == texts(whole)
    chunks = stream(client, path, stream_options={"include_usage": True}, **fields)
    assert stream_texts(chunks) == texts(whole)
    usage = whole["usage"]
    assert usage["completion_tokens"] == 48
    counts = chunks[-1]["usage"]
    assert [counts[name] for name in ("prompt_tokens", "completion_tokens")] == [
        usage[name] for name in ("prompt_tokens", "completion_tokens")
    ]
    # Each choice is what its own seed gives alone.
    assert texts(ask(client, path, seed=9, temperature=1.0)) == [texts(whole)[2]]


def test_many_choices_finish_while_another_stream_flows(client, tiny_server):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stream, client, COMPLETIONS, max_tokens=200)
        answer = ask(client, COMPLETIONS, n=64, max_tokens=4)
        assert len(answer["choices"]) == 64
        assert len(stream_texts(other.result(300))[0]) > 0
    response = client.post(COMPLETIONS, json=body(COMPLETIONS, n=100_000, max_tokens=1))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_lists_of_prompts(client):
    prompts = ["The river", "A number is", "where que"]
    alone = [texts(ask(client, COMPLETIONS, prompt=prompt))[0] for prompt in prompts]
    answer = ask(client, COMPLETIONS, prompt=prompts)
    assert texts(answer) == alone
    assert stream_texts(stream(client, COMPLETIONS, prompt=prompts)) == alone
    ids = [client.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert texts(ask(client, COMPLETIONS, prompt=ids)) == alone
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_best_of_is_the_likeliest_of_as_many(client):
    fields = {"seed": 3, "temperature": 1.5, "logprobs": 0}
    every = ask(client, COMPLETIONS, n=6, **fields)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in every]
    best = ask(client, COMPLETIONS, n=1, best_of=6, **fields)
    assert texts(best) == [every[means.index(max(means))]["text"]]
    assert best["usage"]["completion_tokens"] == 72


@pytest.mark.parametrize("prompt", ["\n\n 3) Total: 47", "The old town", "x", "Überall grüßen 你好"])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_log_probabilities(client, prompt, max_tokens):
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = ask(client, COMPLETIONS, **fields)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(told["tokens"]) == choice["text"]
    at = 0
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert offset == at
        at += len(text)
    assert told["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in told["token_logprobs"][1:])
    assert len(told["tokens"]) == answer["usage"]["total_tokens"]
    assert answer["usage"]["completion_tokens"] == max_tokens
    chunks = stream(client, COMPLETIONS, **fields)
    assert stream_texts(chunks) == [choice["text"]]
    assert [
        logprob
        for chunk in chunks
        for logprob in (chunk["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ] == pytest.approx(told["token_logprobs"], nan_ok=False, abs=1e-5)


def test_a_prompts_log_probabilities_do_not_depend_on_how_it_is_cut(client):
    """Longer than several steps take, and partly in the prefix cache."""
    prompt = [20 + index * 7 % 480 for index in range(3000)]
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1}
    ask(client, COMPLETIONS, prompt=prompt, max_tokens=1)
    whole = ask(client, COMPLETIONS, **fields)["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == 3001
    assert None not in whole["token_logprobs"][1:]
    chunks = stream(client, COMPLETIONS, **fields)
    # One chunk for the prompt, one for the token, one for the end: nothing while the prompt is worked on.
    assert len(chunks) <= 3
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        whole["token_logprobs"][1:3000], abs=1e-3
    )
    asked = ask(client, COMPLETIONS, prompt=prompt, prompt_logprobs=1, max_tokens=1)["choices"][0]
    told = [
        entry[str(token)]["logprob"]
        for token, entry in zip(prompt[1:], asked["prompt_logprobs"][1:], strict=True)
    ]
    assert told == pytest.approx(whole["token_logprobs"][1:3000], abs=1e-3)


@PATHS
def test_the_log_probability_of_a_greedy_token_is_the_highest(client, path):
    asked = {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    (choice,) = ask(client, path, **asked)["choices"]
    if path == CHAT:
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
        for entry in entries:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert entry["logprob"] == values[0]
        chunks = stream(client, path, **asked)
        for chunk in chunks:
            (part,) = chunk["choices"]
            told = (part["logprobs"] or {"content": []})["content"]
            assert "".join(entry["token"] for entry in told) == part["delta"].get("content", "")
    else:
        told = choice["logprobs"]
        for text, logprob, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[text] == logprob == max(top.values())


@PATHS
def test_biases_and_bans(client, path):
    forced = ask(client, path, logit_bias={"300": 100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert forced == [300] * 12
    plain = ask(client, path, return_token_ids=True)["choices"][0]["token_ids"]
    banned = ask(client, path, logit_bias={str(plain[0]): -100}, return_token_ids=True)["choices"][0]
    assert plain[0] not in banned["token_ids"]
    allowed = ask(client, path, allowed_token_ids=[301, 302], return_token_ids=True)["choices"][0]
    assert set(allowed["token_ids"]) <= {301, 302}
    word = texts(ask(client, path, max_tokens=2, logit_bias={"300": 100}))[0]
    unsaid = ask(
        client, path, bad_words=[word[: len(word) // 2]], logit_bias={"300": 100}, return_token_ids=True
    )
    assert 300 not in unsaid["choices"][0]["token_ids"]


@PATHS
def test_penalties_spread_the_choice(client, path):
    few = {"allowed_token_ids": [300, 301, 302, 303], "max_tokens": 40, "return_token_ids": True}

    def counts(**penalty):
        ids = ask(client, path, **few, **penalty)["choices"][0]["token_ids"]
        return sorted(map(ids.count, few["allowed_token_ids"]))

    plain = counts()
    # Two off a logit for each time that a token was there: in forty tokens none can stay ahead.
    assert counts(frequency_penalty=2)[0] > plain[0]
    assert counts(frequency_penalty=-2)[-1] > 30
    for penalty in ({"presence_penalty": 2}, {"repetition_penalty": 50.0}):
        assert counts(**penalty).count(0) <= plain.count(0)


@PATHS
@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_cut_alike_everywhere(client, path, n):
    text = texts(ask(client, path, max_tokens=24))[0]
    stop = text[7:11]
    begin = text.index(stop)
    for includes in (False, True):
        shown = text[: begin + len(stop)] if includes else text[:begin]
        fields = {"stop": [stop, "never to be seen"], "include_stop_str_in_output": includes, "n": n}
        answer = ask(client, path, max_tokens=24, **fields)
        assert texts(answer) == [shown] * n
        assert [choice["stop_reason"] for choice in answer["choices"]] == [stop] * n
        assert stream_texts(stream(client, path, max_tokens=24, **fields)) == [shown] * n


def test_a_run_of_half_characters_is_flat_and_bounded(client):
    """A single byte that is no character, again and again."""
    byte = next(
        token
        for token in range(VOCAB_SIZE)
        if client.post("/tokenize", json={"prompt": "日"}).json()["tokens"][:1] == [token]
        or client.post("/detokenize", json={"tokens": [token]}).json()["prompt"] == "�"
    )
    fields = {"logit_bias": {str(byte): 100}, "max_tokens": 4000}
    whole = texts(ask(client, COMPLETIONS, **fields))
    assert stream_texts(stream(client, COMPLETIONS, **fields)) == whole
    assert len(whole[0]) >= 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 3}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE + 70_000): -50}}, "logit_bias"),
        ({"logit_bias": {"-1": 3}}, "logit_bias"),
        ({"logit_bias": {"1e3": 3}}, "logit_bias"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"top_k": 0.01}, "top_k"),
        ({"top_k": 10**18}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_hostile_values_are_refused_and_a_stream_flows(client, fields, param):
    with ThreadPoolExecutor(1) as pool:
        canary = pool.submit(stream, client, COMPLETIONS, max_tokens=30)
        for path in (CHAT, COMPLETIONS):
            if param == "tools" and path == COMPLETIONS:
                continue
            for streams in (False, True):
                response = client.post(path, json=body(path, stream=streams, **fields))
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == param
        assert canary.result(300)


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-45])
def test_tiny_temperatures_are_greedy(client, temperature):
    expected = texts(ask(client, COMPLETIONS))
    assert texts(ask(client, COMPLETIONS, temperature=temperature, seed=1)) == expected
    assert texts(ask(client, COMPLETIONS, temperature=1.0, top_p=1e-9, seed=1)) == expected


def test_salted_prompts_share_nothing(client):
    prompt = [40 + index * 3 % 400 for index in range(256)]
    cached = []
    for salt in ("a", "a", "b", None, "b"):
        answer = ask(client, COMPLETIONS, prompt=prompt, cache_salt=salt, max_tokens=1)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, False, False, True]


def test_a_conversation_is_continued(client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The river"}]
    fields = {"messages": messages, "continue_final_message": True}
    tokens = client.post("/tokenize", json=fields).json()["tokens"]
    assert (
        client.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("assistant\nThe river")
    )
    answer = ask(client, CHAT, **fields)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert texts(answer) == texts(ask(client, COMPLETIONS, prompt=tokens))


def test_a_request_may_be_given_up_while_it_waits(client):
    """A deadline that has passed before the engine looks."""
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, client, COMPLETIONS, max_tokens=400) for _ in range(16)]
        response = client.post(COMPLETIONS, json=body(COMPLETIONS, max_queue_time=1e-9))
        assert response.status_code in (200, 503)
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
        assert all(future.result(300) for future in running)
