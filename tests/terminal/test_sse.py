from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.terminal.sse import Event, EventDecoder


def decode(*chunks: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.decode(chunk)]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [Event("message", "a")]),
        (b"data:a\n\n", [Event("message", "a")]),
        (b"data:  a\n\n", [Event("message", " a")]),
        (b"data: a\ndata: b\n\n", [Event("message", "a\nb")]),
        (b"data\n\n", [Event("message", "")]),
        (b": ping\n\ndata: a\n\n", [Event("message", "a")]),
        (b"data: a\n: in between\ndata: b\n\n", [Event("message", "a\nb")]),
        (b"event: error\ndata: x\n\ndata: y\n\n", [Event("error", "x"), Event("message", "y")]),
        (b"event: empty\n\ndata: y\n\n", [Event("message", "y")]),
        (b"id: 1:2\nretry: 5\ndata: a\n\n", [Event("message", "a")]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [Event("message", text) for text in "abc"]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event("message", "a")]),
        (b"data: cut off\n", []),
        (b"data: \xe2\x82\xac\n\n", [Event("message", "€")]),
        (b"data: a:b: c\n\n", [Event("message", "a:b: c")]),
        (b"data: \xe2\x80\xa8\x0b\x0c\n\n", [Event("message", "\u2028\x0b\x0c")]),
    ],
)
def test_streams(stream: bytes, expected: list[Event]) -> None:
    assert decode(stream) == expected
    assert decode(*(stream[at : at + 1] for at in range(len(stream)))) == expected


@given(
    st.lists(
        st.sampled_from([b"data: a", b"data:", b"event: e", b": c", b"\r", b"\n", b"\r\n", "€".encode()])
    ),
    st.data(),
)
def test_it_does_not_matter_how_a_stream_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert decode(*chunks) == decode(stream)
