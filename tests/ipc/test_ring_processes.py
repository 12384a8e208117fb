"""The ring between processes: nothing lost, torn or reordered, no wake-up missed, whoever is killed."""

from __future__ import annotations

import random

from ipc.programs.checked_frames import check

from streamserve.ipc.ring import RingReader

WAIT_S = 120
NUM_FRAMES = 1_000_000
NUM_ECHOES = 5_000
NUM_KILLS = 8


def read_checked(reader: RingReader, number: int) -> int:
    """Checks all frames there are, from `number` on; the number of the next one."""
    for _, payload in reader.read():
        check(payload, number)
        number += 1
    reader.release()
    return number


def test_a_million_frames_come_whole_and_in_order(make_ring, spawn) -> None:
    ends = make_ring(1 << 14)
    child = spawn("push_frames.py", ends.descriptors(), 0, NUM_FRAMES, 8, 64)
    number = 0
    while number < NUM_FRAMES:
        number = read_checked(ends.reader, number)
        if number < NUM_FRAMES and ends.reader.arm():
            assert ends.data_bell.wait(WAIT_S), "a wake-up was lost"
        ends.reader.disarm()
    assert child.wait(WAIT_S) == 0
    assert ends.reader.arm()
    assert ends.reader.statistics().messages == NUM_FRAMES


def test_a_killed_producer_leaves_only_whole_frames(make_ring, spawn) -> None:
    chance = random.Random(5)
    # Frames of half the ring and a reader that keeps up: the producer is nearly always inside a copy.
    ends = make_ring(1 << 17)
    number = 0
    for _ in range(NUM_KILLS):
        child = spawn("push_frames.py", ends.descriptors(), number, 1 << 40, 1, 60_000)
        enough = number + chance.randrange(1, 300)
        while number < enough:
            number = read_checked(ends.reader, number)
            if ends.reader.arm():
                assert ends.data_bell.wait(WAIT_S)
            ends.reader.disarm()
        child.kill()
        child.wait(WAIT_S)
        while not ends.reader.arm():
            number = read_checked(ends.reader, number)
        ends.reader.disarm()
    assert ends.reader.statistics().messages == number


def test_no_wake_up_is_lost_when_both_sides_sleep_all_the_time(make_ring, spawn) -> None:
    there, back = make_ring(256), make_ring(256)
    descriptors = (
        there.segment.fd,
        back.segment.fd,
        there.data_bell.fileno(),
        back.data_bell.fileno(),
    )
    child = spawn("echo_frames.py", descriptors, NUM_ECHOES)
    for number in range(NUM_ECHOES):
        message = b"%d" % number
        assert there.writer.try_push(1, [message])
        while back.reader.arm():
            assert back.data_bell.wait(WAIT_S), "a wake-up was lost"
        ((_, payload),) = back.reader.read()
        assert payload == message
        back.reader.release()
    assert child.wait(WAIT_S) == 0


def test_both_ends_of_a_ring_that_is_nearly_always_full_keep_waking_each_other(make_ring, spawn) -> None:
    count = 20_000
    ends = make_ring(128)
    child = spawn("push_frames.py", ends.descriptors(), 0, count, 0, 30)
    number = 0
    while number < count:
        number = read_checked(ends.reader, number)
        if number < count and ends.reader.arm():
            assert ends.data_bell.wait(WAIT_S), "a wake-up was lost"
        ends.reader.disarm()
    assert child.wait(WAIT_S) == 0
