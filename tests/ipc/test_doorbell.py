"""Doorbells: rung before or after the wait, once or often, from anywhere."""

from __future__ import annotations

import asyncio
import os
import select
import threading

import pytest

from streamserve.ipc.doorbell import Doorbell


@pytest.fixture
def bell():
    with Doorbell.create() as bell:
        yield bell


def test_silence_runs_into_the_time_limit(bell: Doorbell) -> None:
    assert not bell.wait(0)
    assert not bell.wait(0.001)


def test_many_rings_are_one_wake_up(bell: Doorbell) -> None:
    for _ in range(3):
        bell.ring()
    assert bell.wait(None)
    assert not bell.wait(0)


def test_clear_forgets_and_may_find_nothing(bell: Doorbell) -> None:
    bell.ring()
    bell.clear()
    bell.clear()
    assert not bell.wait(0)


def test_a_full_counter_stays_rung(bell: Doorbell) -> None:
    os.eventfd_write(bell.fileno(), (1 << 64) - 2)
    bell.ring()
    assert bell.wait(0)


def test_ringing_wakes_who_waits(bell: Doorbell) -> None:
    with Doorbell.create() as answer:

        def reply() -> None:
            for _ in range(200):
                assert bell.wait(60)
                answer.ring()

        thread = threading.Thread(target=reply)
        thread.start()
        for _ in range(200):
            bell.ring()
            assert answer.wait(60)
        thread.join()


def test_is_readable_while_rung(bell: Doorbell) -> None:
    assert select.select([bell], [], [], 0)[0] == []
    bell.ring()
    assert select.select([bell], [], [], 0)[0] == [bell]


async def test_wakes_an_event_loop(bell: Doorbell) -> None:
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    loop.add_reader(bell.fileno(), woken.set)
    try:
        bell.ring()
        await asyncio.wait_for(woken.wait(), 60)
    finally:
        loop.remove_reader(bell.fileno())


def test_attaching_borrows_the_descriptor(bell: Doorbell) -> None:
    other = Doorbell.attach(bell.fileno())
    other.ring()
    other.close()
    assert bell.wait(0)


def test_close_closes_once() -> None:
    before = os.listdir("/proc/self/fd")
    bell = Doorbell.create()
    bell.close()
    bell.close()
    assert os.listdir("/proc/self/fd") == before
