"""The plain ring within one process: what goes in comes out, and what happens at its limits."""

from __future__ import annotations

import numpy as np
import pytest

from streamserve.ipc import layout, ring
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.layout import RingCorrupted, RingStatistics, head_word
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes


def drain(reader: RingReader) -> list[tuple[int, bytes]]:
    """All messages there are, copied."""
    found = [(kind, bytes(payload)) for kind, payload in reader.read()]
    reader.release()
    return found


def test_parts_are_sent_one_behind_the_other(make_ring) -> None:
    ends = make_ring(1024)
    array = np.arange(3, dtype="<u8")
    assert ends.writer.try_push(17, [b"ab", bytearray(b"c"), array.data, memoryview(b"xyz")[1:]])
    assert drain(ends.reader) == [(17, b"abc" + array.tobytes() + b"yz")]


def test_no_parts_make_an_empty_message(make_ring) -> None:
    ends = make_ring(64)
    assert ends.writer.try_push(1, [])
    assert drain(ends.reader) == [(1, b"")]


def test_reads_are_views_into_the_segment(make_ring) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [b"before"])
    ((_, payload),) = ends.reader.read()
    at = bytes(ends.segment.view).index(b"before")
    ends.segment.view[at : at + 6] = b"after!"
    assert bytes(payload) == b"after!"


def test_limit_leaves_the_rest_for_the_next_read(make_ring) -> None:
    ends = make_ring(1024)
    for number in range(5):
        ends.writer.try_push(number + 1, [bytes([number])])
    assert [kind for kind, _ in ends.reader.read(2)] == [1, 2]
    assert [kind for kind, _ in ends.reader.read(256)] == [3, 4, 5]
    assert ends.reader.read() == []


def test_a_full_ring_refuses_until_messages_are_released(make_ring) -> None:
    ends = make_ring(64)
    assert ends.writer.try_push(1, [bytes(24)])
    assert ends.writer.try_push(2, [bytes(24)])
    assert ends.writer.free_bytes == 0
    assert not ends.writer.try_push(3, [])
    assert len(ends.reader.read()) == 2
    assert not ends.writer.try_push(3, [])
    ends.reader.release()
    assert ends.writer.free_bytes == 64
    assert ends.writer.try_push(3, [])
    assert drain(ends.reader) == [(3, b"")]


def test_the_longest_message_fits_an_empty_ring_wherever_it_stands(make_ring) -> None:
    for offset in range(0, 128, 8):
        ends = make_ring(128)
        if offset:
            ends.writer.try_push(1, [bytes(min(offset, 64) - 8)])
        if offset > 64:
            ends.writer.try_push(1, [bytes(offset - 64 - 8)])
        drain(ends.reader)
        longest = bytes(range(ends.writer.max_message))
        assert ends.writer.try_push(2, [longest])
        assert drain(ends.reader) == [(2, longest)]


def test_a_longer_message_is_refused_even_by_an_empty_ring(make_ring) -> None:
    ends = make_ring(1024)
    assert ends.writer.max_message == 504
    with pytest.raises(ValueError, match="begin"):
        ends.writer.try_push(1, [bytes(505)])
    assert ends.writer.try_push(1, [bytes(504)])


def test_a_message_is_one_piece_where_the_ring_wraps(make_ring) -> None:
    ends = make_ring(128)
    for number in range(100):
        message = bytes([number]) * (number % 50)
        assert ends.writer.try_push(1, [message])
        assert drain(ends.reader) == [(1, message)]


@pytest.mark.parametrize("length", [0, 1, 56, 57, 1000, 10_000])
def test_fragments_are_joined(make_ring, length: int) -> None:
    ends = make_ring(256)
    message = np.random.default_rng(length).bytes(length)
    ends.writer.try_push(1, [b"first"])
    push = ends.writer.begin(2, [message[: length // 3], message[length // 3 :]])
    found: list[tuple[int, bytes]] = []
    while not push.advance():
        assert ends.writer.arm_space() or length < 256
        ends.writer.disarm_space()
        found += drain(ends.reader)
    assert push.advance()
    ends.writer.try_push(3, [b"last"])
    found += drain(ends.reader)
    assert found == [(1, b"first"), (2, message), (3, b"last")]
    for statistics in (ends.writer.statistics(), ends.reader.statistics()):
        assert statistics.messages == 3
        assert statistics.frames == 2 + max(1, -(-length // 60))


def test_a_message_longer_than_the_ring_passes_a_reader_that_releases_only_what_it_gets(make_ring) -> None:
    ends = make_ring(64)
    push = ends.writer.begin(1, [bytes(1000)])
    while not push.advance():
        assert ends.reader.read() == []
    ((_, payload),) = ends.reader.read()
    assert len(payload) == 1000


def test_pieces_read_while_views_are_lent_stay_until_the_release(make_ring) -> None:
    ends = make_ring(256)
    ends.writer.try_push(1, [b"lent"])
    ((_, lent),) = ends.reader.read()
    push = ends.writer.begin(2, [bytes(1000)])
    assert not push.advance()
    assert ends.reader.read() == []
    assert not push.advance()
    assert bytes(lent) == b"lent"
    ends.reader.release()
    assert ends.writer.free_bytes == 256


def test_a_fragmented_message_has_the_ring_to_itself(make_ring) -> None:
    ends = make_ring(64)
    push = ends.writer.begin(1, [bytes(200)])
    with pytest.raises(ValueError, match="advance"):
        ends.writer.try_push(2, [b""])
    with pytest.raises(ValueError, match="already"):
        ends.writer.begin(2, [b""])
    while not push.advance():
        with pytest.raises(ValueError, match="advance"):
            ends.writer.try_push(2, [b""])
        drain(ends.reader)
    drain(ends.reader)
    assert ends.writer.try_push(2, [b""])


def test_only_a_sleeping_reader_is_rung(make_ring) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [b""])
    assert not ends.data_bell.wait(0)
    assert not ends.reader.arm()
    drain(ends.reader)
    assert ends.reader.arm()
    ends.writer.try_push(2, [b""])
    assert ends.data_bell.wait(0)
    ends.writer.try_push(3, [b""])
    assert not ends.data_bell.wait(0)
    drain(ends.reader)
    assert ends.reader.arm()
    ends.reader.disarm()
    ends.writer.try_push(4, [b""])
    assert not ends.data_bell.wait(0)


def test_a_waiting_writer_is_rung_when_half_the_ring_is_free(make_ring) -> None:
    ends = make_ring(256)
    assert not ends.writer.arm_space()
    while ends.writer.try_push(1, [bytes(24)]):
        pass
    assert ends.writer.arm_space()
    for _ in range(3):
        ends.reader.read(1)
        ends.reader.release()
        assert not ends.space_bell.wait(0)
    ends.reader.read(1)
    ends.reader.release()
    assert ends.space_bell.wait(0)
    assert not ends.writer.arm_space()
    ends.reader.read()
    ends.reader.release()
    assert not ends.space_bell.wait(0)


def test_arm_space_and_try_push_agree(make_ring) -> None:
    ends = make_ring(256)
    longest = [bytes(ends.writer.max_message)]
    assert ends.writer.try_push(1, [bytes(16)])
    drain(ends.reader)
    assert ends.writer.try_push(1, [bytes(104)])
    # 144 bytes are free, which is over half, but 120 to the end and 128 from the start are needed.
    assert not ends.writer.try_push(1, longest)
    assert ends.writer.arm_space()
    drain(ends.reader)
    assert ends.space_bell.wait(0)
    assert ends.writer.try_push(1, longest)


def test_statistics_count_messages_and_refusals(make_ring) -> None:
    ends = make_ring(64)
    assert ends.writer.statistics() == RingStatistics(64, 0, 0, 0, 0)
    ends.writer.try_push(1, [bytes(20)])
    ends.writer.try_push(1, [bytes(20)])
    ends.writer.try_push(1, [bytes(20)])
    assert ends.writer.statistics() == RingStatistics(64, 64, 2, 2, 1)
    ends.reader.read(1)
    assert ends.reader.statistics() == RingStatistics(64, 64, 1, 1, 0)
    ends.reader.release()
    assert ends.reader.statistics() == RingStatistics(64, 32, 1, 1, 0)


def test_a_new_reader_gets_again_what_was_not_released(make_ring) -> None:
    ends = make_ring(1024)
    for number in range(3):
        ends.writer.try_push(1, [bytes([number])])
    ends.reader.read(1)
    ends.reader.release()
    ends.reader.read(1)
    heir = RingReader(ends.segment.view, None)
    assert drain(heir) == [(1, b"\1"), (1, b"\2")]


def test_a_new_writer_goes_on_behind_the_last_frame(make_ring) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [b"old"])
    heir = RingWriter(ends.segment.view, ends.data_bell)
    heir.try_push(1, [b"new"])
    assert drain(ends.reader) == [(1, b"old"), (1, b"new")]


def test_a_message_cut_by_the_death_of_its_writer_is_dropped(make_ring) -> None:
    ends = make_ring(256)
    ends.writer.begin(1, [bytes(1000)]).advance()
    assert drain(ends.reader) == []
    heir = RingWriter(ends.segment.view, ends.data_bell)
    heir.try_push(2, [b"short"])
    push = heir.begin(3, [b"long" * 50])
    found: list[tuple[int, bytes]] = []
    while not push.advance():
        found += drain(ends.reader)
    assert found + drain(ends.reader) == [(2, b"short"), (3, b"long" * 50)]


def test_a_message_whose_beginning_went_to_another_reader_is_dropped(make_ring) -> None:
    ends = make_ring(256)
    push = ends.writer.begin(1, [bytes(1000)])
    push.advance()
    ends.reader.read()
    heir = RingReader(ends.segment.view, None)
    while not push.advance():
        assert drain(heir) == []
    ends.writer.try_push(2, [b"next"])
    assert drain(heir) == [(2, b"next")]


def test_nothing_of_an_unpublished_frame_is_seen(make_ring) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [b"whole"])
    data = ends.segment.view[ring_bytes(1024) - 1024 :]
    data[16:40] = bytes(range(24))
    assert drain(ends.reader) == [(1, b"whole")]
    assert ends.reader.arm()


def corrupt_word(ends, word: int, value: int) -> None:
    with ends.segment.view.cast("Q") as words:
        words[word] = value


@pytest.mark.parametrize("tail", [96, 1080, 1 << 63, 8, 24])
def test_a_tail_that_makes_no_sense_is_an_error(make_ring, tail: int) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [bytes(40)])
    drain(ends.reader)
    corrupt_word(ends, layout.TAIL_WORD, tail)
    for _ in range(2):
        with pytest.raises(RingCorrupted):
            ends.reader.read()


@pytest.mark.parametrize(
    "header",
    [
        # Too long: by far, by a byte, as padding.
        b"\xff\xff\xff\xff\1\0\0\0",
        b"\x19\0\0\0\1\0\0\0",
        b"\xf8\xff\0\0\xff\xff\0\0",
        # No kind, unknown flags.
        b"\x18\0\0\0\0\0\0\0",
        b"\x18\0\0\0\1\0\4\0",
    ],
)
def test_a_frame_that_makes_no_sense_is_an_error(make_ring, header: bytes) -> None:
    ends = make_ring(1024)
    ends.writer.try_push(1, [bytes(24)])
    at = ring_bytes(1024) - 1024
    ends.segment.view[at : at + 8] = header
    for _ in range(2):
        with pytest.raises(RingCorrupted):
            ends.reader.read()


def test_a_head_that_makes_no_sense_is_an_error_for_the_writer(make_ring) -> None:
    ends = make_ring(1024)
    corrupt_word(ends, head_word(0), 4096)
    with pytest.raises(RingCorrupted):
        ends.writer.try_push(1, [b""])
    with pytest.raises(RingCorrupted):
        ends.writer.arm_space()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.MAGIC_WORD, 1),
        (layout.VERSION_WORD, 99),
        (layout.CAPACITY_WORD, 1000),
        (layout.CAPACITY_WORD, 4096),
        (layout.NUM_READERS_WORD, 0),
        (layout.TAIL_WORD, 4),
    ],
)
def test_attaching_to_what_is_no_ring_is_an_error(make_ring, word: int, value: int) -> None:
    ends = make_ring(1024)
    corrupt_word(ends, word, value)
    with pytest.raises(RingCorrupted):
        RingWriter(ends.segment.view, ends.data_bell)


def test_a_closed_segment_holds_no_ring(make_ring) -> None:
    ends = make_ring(64)
    ends.segment.close()
    with pytest.raises(RingCorrupted):
        RingReader(ends.segment.view, None)


@pytest.mark.parametrize("capacity", [0, 32, 63, 96, 1 << 32])
def test_capacity_must_be_a_power_of_two_in_range(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ring_bytes(capacity)


def test_formatting_needs_the_whole_segment() -> None:
    with pytest.raises(ValueError, match="needs a segment"):
        format_ring(memoryview(bytearray(ring_bytes(64) - 1)), 64)


def test_works_with_the_fences_of_other_machines(make_ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "TOTAL_STORE_ORDER", False)
    monkeypatch.setattr(ring, "TOTAL_STORE_ORDER", False)
    ends = make_ring(128)
    for number in range(50):
        assert ends.reader.arm()
        assert ends.writer.try_push(1, [bytes([number])])
        assert ends.data_bell.wait(0)
        assert drain(ends.reader) == [(1, bytes([number]))]


def test_an_exception_inside_the_fence_does_not_lock_it(make_ring, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = make_ring(128)
    lock = ends.writer._lock

    def interrupted() -> None:
        lock()
        raise KeyboardInterrupt

    monkeypatch.setattr(ends.writer, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ends.writer.try_push(1, [b"a"])
    monkeypatch.undo()
    assert ends.writer.try_push(1, [b"b"])
    assert drain(ends.reader) == [(1, b"a"), (1, b"b")]


def test_ring_for_one_takes_one_bell() -> None:
    view = memoryview(bytearray(layout.segment_bytes(64, 2)))
    layout.format_segment(view, 64, 2)
    with Doorbell.create() as bell, pytest.raises(ValueError, match="2 readers"):
        RingWriter(view, bell)
