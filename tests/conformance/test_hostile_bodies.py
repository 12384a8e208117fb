"""Random bodies that look like requests: never the server's fault, and a stream beside them flows on."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ways_in import CHAT, COMPLETION, PATHS, RESPONSE, strict_json
from websockets.sync.client import connect

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
SCALARS = st.one_of(st.none(), NUMBERS, st.text(max_size=20))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
TOKEN_IDS = st.lists(st.integers(-1, 513), max_size=6)
TEXT_PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "input_text", "output_text", "image_url"]), "text": st.text()}
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "", "x"])},
        optional={"content": SCALARS | TEXT_PARTS, "name": ANYTHING, "tool_calls": ANYTHING, "type": SCALARS},
    ),
    max_size=4,
)
LIKELY = {
    "n": st.integers(-1, 4), "best_of": st.integers(-1, 4), "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.1, 1.1), "top_k": st.integers(-2, 600), "min_p": st.floats(-0.1, 1.1),
    "seed": NUMBERS, "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "stop_token_ids": TOKEN_IDS,
    "logit_bias": st.dictionaries(st.integers(-1, 513).map(str), NUMBERS, max_size=4),
    "allowed_token_ids": TOKEN_IDS, "bad_words": st.lists(st.text(max_size=4), max_size=3),
    "presence_penalty": st.floats(-2.5, 2.5), "frequency_penalty": st.floats(-2.5, 2.5),
    "repetition_penalty": st.floats(-0.5, 3), "logprobs": st.booleans() | st.integers(-1, 21),
    "top_logprobs": st.integers(-1, 21), "prompt_logprobs": st.integers(-1, 21), "echo": st.booleans(),
    "ignore_eos": st.booleans(), "min_tokens": st.integers(-1, 9), "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(), "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(), "truncate_prompt_tokens": st.integers(-2, 9),
    "truncation_side": st.sampled_from(["left", "right", "up"]), "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(), "chat_template_kwargs": ANYTHING, "documents": ANYTHING,
    "priority": NUMBERS,
    "max_queue_time": st.sampled_from([-1, 0, 60, 1e300]), "cache_salt": st.text(max_size=5),
    "request_id": st.text(max_size=5), "user": SCALARS,
    "model": st.sampled_from(["tiny", "tiny", "tiny", "other"]),
    "tools": ANYTHING, "response_format": ANYTHING, "metadata": ANYTHING,
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "include": st.just(["message.output_text.logprobs"]), "instructions": st.text(max_size=9),
}  # fmt: skip


def mostly(good, odd):
    """As it should be seven times in eight, so that there is an answer now and then."""
    return st.integers(0, 7).flatmap(lambda turn: good if turn else odd)


WORDS = st.text(min_size=1, max_size=30)
GOOD_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=3,
)
PROMPTS = mostly(WORDS, TOKEN_IDS | st.lists(WORDS, max_size=3) | ANYTHING)
CHATS = mostly(GOOD_MESSAGES, MESSAGES | ANYTHING)
STREAM = {"stream": mostly(st.booleans(), SCALARS)}
LIMIT = mostly(st.integers(1, 8), st.floats() | st.text(max_size=2))
INPUTS = mostly(WORDS | GOOD_MESSAGES, MESSAGES | ANYTHING)
# What each path wants.
REQUIRED = {
    PATHS[CHAT]: {"messages": CHATS, "max_tokens": LIMIT, **STREAM},
    PATHS[COMPLETION]: {"prompt": PROMPTS, "max_tokens": LIMIT, **STREAM},
    PATHS[RESPONSE]: {"input": INPUTS, "max_output_tokens": LIMIT, **STREAM},
    "/tokenize": {"prompt": PROMPTS},
    "/detokenize": {"tokens": mostly(TOKEN_IDS, ANYTHING)},
}  # fmt: skip


@st.composite
def bodies(draw, path):
    """What the path wants, and a few other fields."""
    body = draw(st.fixed_dictionaries(REQUIRED[path]))
    for name in draw(st.lists(st.sampled_from(sorted(LIKELY)), max_size=4, unique=True)):
        body[name] = draw(mostly(LIKELY[name], ANYTHING))
    return body


def requests(paths):
    """Pairs of a path and a body."""
    return st.sampled_from(paths).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))


ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}
CONTROLS = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


def check_over_http(server, num_bodies):
    statuses = Counter()
    with httpx.Client(base_url=server.url, timeout=300) as client:

        @settings(CONTROLS, max_examples=num_bodies)
        @given(requests(list(REQUIRED)))
        def send(request):
            path, body = request
            # ASCII, as what is half a surrogate pair is then written as well.
            answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, answer.text
            if answer.status_code != 200:
                assert strict_json(answer.content)["error"]["message"]
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert 'data: {"error":' not in answer.text
            else:
                strict_json(answer.content)

        send()
    return statuses


def check_over_a_socket(server, num_bodies):
    heard = Counter()
    with connect(server.url.replace("http", "ws", 1) + "/v1/ws", max_size=None) as socket:

        @settings(CONTROLS, max_examples=num_bodies)
        @given(requests(list(PATHS.values())))
        def send(request):
            path, body = request
            message = {"type": "create", "id": 1, "endpoint": ENDPOINTS[path], "body": body}
            socket.send(json.dumps(message))
            while True:
                message = strict_json(socket.recv(300))
                heard[message["type"]] += 1
                if message["type"] == "error":
                    assert message["error"]["status"] < 500, message
                if message["type"] in ("done", "error"):
                    return

        send()
    return heard


def test_over_http(tiny_server, untouched):
    statuses = check_over_http(tiny_server, 250)
    assert statuses[200] > 60, statuses
    assert statuses[400] > 25, statuses


def test_over_a_socket(tiny_server, untouched):
    heard = check_over_a_socket(tiny_server, 150)
    assert heard["done"] > 40, heard
    assert heard["error"] > 15, heard


@pytest.mark.heavy
def test_many(tiny_server, untouched):
    check_over_http(tiny_server, 3000)
    check_over_a_socket(tiny_server, 1500)
