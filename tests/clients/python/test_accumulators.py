"""Chunks of awkward streams, put together."""

from __future__ import annotations

import pytest

from streamserve_client import APIError, InvalidAnswer, text_of
from streamserve_client.accumulators import chat_accumulator, completion_accumulator, response_accumulator

HEAD = {"id": "1", "created": 1, "model": "tiny"}


def chat(*choices, **more):
    return {**HEAD, "choices": [dict(choice) for choice in choices], **more}


def test_choices_that_take_turns():
    accumulator = chat_accumulator()
    for index, content, more in (
        (1, "b", {}),
        (0, "a", {"logprobs": {"content": [{"token": "a"}]}, "token_ids": [1]}),
        (1, "B", {"finish_reason": "length"}),
        (0, "A", {"logprobs": {"content": [{"token": "A"}]}, "token_ids": [2, 3]}),
        (0, None, {"logprobs": {"content": []}, "finish_reason": "stop", "stop_reason": 7}),
    ):
        delta = {} if content is None else {"content": content}
        accumulator.add(chat({"index": index, "delta": delta, **more}))
    accumulator.add(chat(usage={"total_tokens": 9}))
    answer = accumulator.answer()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["aA", "bB"]
    first, second = answer["choices"]
    assert first["logprobs"] == {"content": [{"token": "a"}, {"token": "A"}]}
    assert (first["token_ids"], first["stop_reason"], first["finish_reason"]) == ([1, 2, 3], 7, "stop")
    assert (second["logprobs"], second["finish_reason"]) == (None, "length")
    assert answer["usage"] == {"total_tokens": 9}
    assert accumulator.text == text_of(answer) == "aA"


def test_log_probabilities_of_completions_are_lists():
    accumulator = completion_accumulator()
    for text, top in (("On", [{"On": -1.0}]), ("ce", None)):
        logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": top, "text_offset": [0]}
        accumulator.add(chat({"index": 0, "text": text, "logprobs": logprobs}))
    answer = accumulator.answer()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["On", "ce"]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"On": -1.0}]
    assert text_of(answer) == "Once"


def test_the_chunks_themselves_are_left_alone():
    accumulator = chat_accumulator()
    first = chat({"index": 0, "delta": {}, "logprobs": {"content": [{"token": "a"}]}, "token_ids": [1]})
    accumulator.add(first)
    accumulator.add(
        chat({"index": 0, "delta": {}, "logprobs": {"content": [{"token": "b"}]}, "token_ids": [2]})
    )
    assert first["choices"][0]["logprobs"] == {"content": [{"token": "a"}]}
    assert first["choices"][0]["token_ids"] == [1]


RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "error": None}
ITEM = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def begun():
    accumulator = response_accumulator()
    accumulator.add({"type": "response.created", "response": RESPONSE})
    accumulator.add({"type": "response.output_item.added", "item": ITEM})
    for delta in ("Hel", "lo"):
        accumulator.add({"type": "response.output_text.delta", "delta": delta})
    return accumulator


def test_a_response_so_far():
    accumulator = begun()
    accumulator.end()
    assert not accumulator.is_complete
    answer = accumulator.answer()
    assert (answer["status"], text_of(answer), accumulator.text) == ("in_progress", "Hello", "Hello")


@pytest.mark.parametrize("kind", ["completed", "incomplete"])
def test_the_last_event_has_the_whole_response(kind):
    accumulator = begun()
    accumulator.add({"type": "response.future_event"})
    last = {**RESPONSE, "status": kind}
    accumulator.add({"type": f"response.{kind}", "response": last})
    assert accumulator.is_complete
    assert accumulator.answer() == last


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "c", "message": "The engine died.", "param": None},
        {"type": "error", "code": "x", "message": "x", "error": {"code": "c", "message": "The engine died."}},
        {
            "type": "response.failed",
            "response": {**RESPONSE, "error": {"code": "c", "message": "The engine died."}},
        },
    ],
)
def test_a_response_that_failed(event):
    with pytest.raises(APIError) as raised:
        begun().add(event)
    assert (raised.value.code, raised.value.message) == ("c", "The engine died.")


@pytest.mark.parametrize("event", [{}, {"type": "response.output_text.delta"}, {"type": "response.failed"}])
def test_what_is_no_event(event):
    with pytest.raises(InvalidAnswer):
        response_accumulator().add(event)
