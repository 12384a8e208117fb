"""A notice is read whole or not at all."""

from __future__ import annotations

import pytest

from streamserve.ipc.notice import Notice


def test_a_new_notice_is_empty() -> None:
    with Notice.create("test", 100) as notice:
        assert notice.read() == b""


@pytest.mark.parametrize("text", [b"", b"x", b"y" * 100])
def test_readers_see_what_was_published_last(text: bytes) -> None:
    with Notice.create("test", 100) as notice, Notice.attach(notice.fd) as reader:
        notice.publish(b"something longer or shorter")
        notice.publish(text)
        assert reader.read() == text


def test_a_text_that_does_not_fit_changes_nothing() -> None:
    with Notice.create("test", 10) as notice:
        notice.publish(b"before")
        with pytest.raises(ValueError, match="11 bytes"):
            notice.publish(b"x" * 11)
        assert notice.read() == b"before"


def test_no_text_is_torn(spawn) -> None:
    with Notice.create("test", 5000) as notice:
        seen = {notice.read()}
        spawn("flip_notice.py", [notice.fd])
        while len(seen) < 3:
            seen.add(notice.read())
        for _ in range(20_000):
            seen.add(notice.read())
    assert seen <= {b"", b"a" * 10, b"b" * 5000}


def test_close_twice_is_close_once() -> None:
    notice = Notice.create("test", 10)
    notice.close()
    notice.close()
