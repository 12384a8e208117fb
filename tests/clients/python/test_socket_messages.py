"""Which message of a WebSocket is for which stream, without a socket."""

from __future__ import annotations

import json
from queue import SimpleQueue

import pytest

from streamserve_client import APIError, BadRequest, ConnectionFailed, InvalidAnswer, RateLimited
from streamserve_client.endpoints import CHAT
from streamserve_client.place import Place
from streamserve_client.socket_messages import Multiplexer

CALL = CHAT.call([], {}, None)


def opened(streams, place=None):
    inbox = SimpleQueue()
    stream_id, message = streams.open(CALL, place or Place(CALL, is_kept=False), inbox)
    assert json.loads(message)["id"] == stream_id
    return stream_id, inbox


def hear(streams, **message):
    streams.take(json.dumps(message))


def waiting(inbox):
    items = []
    while not inbox.empty():
        items.append(inbox.get_nowait())
    return items


def test_each_stream_gets_its_own():
    streams = Multiplexer()
    (one, first), (two, second) = opened(streams), opened(streams)
    assert one != two
    hear(streams, id=two, type="chunk", chunk={"n": 2})
    hear(streams, id=one, type="result", result={"n": 1})
    hear(streams, id=one, type="done")
    hear(streams, id=two, type="error", error={"message": "Busy.", "status": 429, "retry_after": 3})
    assert waiting(first) == [{"n": 1}, None]
    chunk, error = waiting(second)
    assert chunk == {"n": 2}
    assert isinstance(error, RateLimited)
    assert error.retry_after_s == 3
    assert streams.leave(one) is streams.leave(two) is None


def test_who_leaves_early_says_so_and_hears_no_more():
    streams = Multiplexer()
    one, first = opened(streams)
    assert json.loads(streams.leave(one)) == {"type": "cancel", "id": one}
    assert streams.leave(one) is None
    for message in ({"type": "chunk", "chunk": {}}, {"type": "done"}):
        hear(streams, id=one, **message)
    assert waiting(first) == []
    assert opened(streams)[0] != one


@pytest.mark.parametrize("num_pongs", [0, 1, 2])
def test_an_error_without_an_id_is_for_the_request_that_is_looked_at(num_pongs):
    streams = Multiplexer()
    inboxes = [opened(streams)[1] for _ in range(3)]
    for _ in range(num_pongs):
        hear(streams, type="pong")
    hear(streams, type="error", error={"message": "Too deep.", "status": 400})
    for number, inbox in enumerate(inboxes):
        items = waiting(inbox)
        assert [type(item) for item in items] == ([BadRequest] if number == num_pongs else [])


def test_a_message_that_closes_the_connection_is_the_fault_of_one_request():
    streams = Multiplexer()
    inboxes = [opened(streams)[1] for _ in range(3)]
    hear(streams, type="pong")
    streams.lose("the server closed the connection", 1009)
    for inbox, kind in zip(inboxes, (ConnectionFailed, BadRequest, ConnectionFailed), strict=True):
        (error,) = waiting(inbox)
        assert type(error) is kind
        assert isinstance(error, APIError) == (kind is BadRequest)
        if isinstance(error, APIError):
            assert (error.status, error.code) == (413, "body_too_large")


def test_a_lost_connection_takes_no_more_streams():
    streams = Multiplexer()
    streams.lose("gone")
    stream_id, inbox = opened(streams)
    assert [type(item) for item in waiting(inbox)] == [ConnectionFailed]
    assert streams.leave(stream_id) is None


@pytest.mark.parametrize("text", ["{", "[]", b"binary"])
def test_what_is_no_message(text):
    with pytest.raises(InvalidAnswer):
        Multiplexer().take(text)


def test_messages_of_a_newer_server_are_passed_over():
    streams = Multiplexer()
    stream_id, inbox = opened(streams)
    hear(streams, id=stream_id, type="news", news={})
    hear(streams, type="pong")
    hear(streams, type="pong")
    hear(streams, type="error", error={"message": "For nobody."})
    assert waiting(inbox) == []


def test_a_kept_stream_is_gone_on_with_on_another_connection():
    place = Place(CALL, is_kept=True)
    first, second = Multiplexer(), Multiplexer()
    inbox = SimpleQueue()
    place.turn()
    stream_id, message = first.open(CALL, place, inbox)
    body = json.loads(message)["body"]
    assert (body["request_id"], body["stream_options"]["resumable"]) == (place.request_id, True)
    hear(first, id=stream_id, type="accepted", stream="chatcmpl-x")
    hear(first, id=stream_id, type="chunk", chunk={"a": 1}, n=1)
    first.lose("broken")
    assert waiting(inbox)[0] == {"a": 1}
    place.turn()
    stream_id, message = second.open(CALL, place, inbox)
    assert json.loads(message) == {"type": "resume", "id": stream_id, "stream": "chatcmpl-x", "after": 1}
    hear(second, id=stream_id, type="chunk", chunk={"a": 2}, n=2)
    hear(second, id=stream_id, type="done", n=3)
    assert waiting(inbox) == [{"a": 2}, None]
    assert place.num_events == 3


@pytest.mark.parametrize(("number", "is_its_own"), [({"n": 2}, True), ({}, False)])
def test_an_error_is_a_kept_streams_own_if_it_has_a_number(number, is_its_own):
    streams, place = Multiplexer(), Place(CALL, is_kept=True)
    place.turn()
    stream_id, inbox = opened(streams, place)
    hear(streams, id=stream_id, type="accepted", stream=place.name)
    hear(streams, id=stream_id, type="chunk", chunk={}, n=1)
    hear(streams, id=stream_id, type="error", error={"message": "No.", "status": 503}, **number)
    error = waiting(inbox)[-1]
    assert place.is_attached is is_its_own
    assert place.can_return(error) is not is_its_own


def test_who_leaves_a_kept_stream_has_nothing_to_come_back_to():
    streams, place = Multiplexer(), Place(CALL, is_kept=True)
    place.turn()
    stream_id, _ = opened(streams, place)
    assert place.may_exist
    assert json.loads(streams.leave(stream_id)) == {"type": "cancel", "id": stream_id}
    assert not place.may_exist


def test_a_stream_that_is_come_back_to_has_the_name_that_it_was_asked_for_with():
    place = Place(CALL, is_kept=True)
    streams = Multiplexer()
    place.turn()
    opened(streams, place)
    streams.lose("broken")
    for number in (1, 2):
        streams = Multiplexer()
        place.turn()
        inbox = SimpleQueue()
        stream_id, message = streams.open(CALL, place, inbox)
        asked = {"id": stream_id, "type": "resume", "stream": place.name, "after": number - 1}
        assert json.loads(message) == asked
        for again in range(1, number + 1):
            hear(streams, id=stream_id, type="chunk", n=again, chunk={"n": again})
        assert waiting(inbox) == [{"n": number}]
        streams.lose("broken")
        assert place.can_return(ConnectionFailed("broken"))


def test_a_missing_message_is_a_lost_connection():
    place = Place(CALL, is_kept=True)
    streams = Multiplexer()
    place.turn()
    stream_id, inbox = opened(streams, place)
    hear(streams, id=stream_id, type="accepted", stream="chatcmpl-x")
    hear(streams, id=stream_id, type="chunk", n=2, chunk={})
    (error,) = waiting(inbox)
    assert isinstance(error, ConnectionFailed)
    assert place.name == "chatcmpl-x"


@pytest.mark.parametrize(
    "message",
    [
        {"id": 1, "type": "chunk"},
        {"id": 1, "type": "chunk", "chunk": None},
        {"id": 1, "type": "result", "result": "x"},
    ],
)
def test_a_message_without_an_object_is_none(message):
    streams = Multiplexer()
    opened(streams)
    with pytest.raises(InvalidAnswer):
        hear(streams, **message)


def test_strange_messages_are_passed_over():
    streams = Multiplexer()
    _, inbox = opened(streams)
    for stream_id in ([1], {}, "1", 1.5):
        hear(streams, id=stream_id, type="chunk", chunk={})
    hear(streams, id=1, type="error", error={"status": "busy", "retry_after": "soon"})
    (error,) = waiting(inbox)
    assert (error.status, error.retry_after_s) == (None, None)


def test_what_cannot_be_sent_is_not_counted_on():
    streams = Multiplexer()
    with pytest.raises(UnicodeEncodeError):
        streams.open(CHAT.call("\ud800", {}, None), Place(CALL, is_kept=True), SimpleQueue())
    assert streams.leave(1) is None
