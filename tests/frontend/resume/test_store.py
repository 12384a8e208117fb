"""Kept streams and their store: who gets what, what is kept for how long, and what makes room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resume_script import END, Script

from streamserve.errors import EngineUnavailable, InvalidRequest, Overloaded
from streamserve.frontend.metrics import Metrics
from streamserve.frontend.resume import stream as stream_module
from streamserve.frontend.resume.errors import EventsGone, StreamExists, StreamNotFound, StreamTaken
from streamserve.frontend.resume.reading import Ending
from streamserve.frontend.resume.store import StreamStore
from streamserve.frontend.resume.stream import KeptStream, Reader

WAIT_S = 60.0
FOREVER_S = 3600.0


class House:
    """A store, and streams in it."""

    def __init__(self, **options: Any) -> None:
        self.metrics = Metrics()
        options = {"window_s": FOREVER_S, **options}
        self.store = StreamStore(metrics=self.metrics, **options)

    def open(
        self, answer_id: str = "cmpl-one", tenant: str = "", **options: Any
    ) -> tuple[Script, KeptStream]:
        script = Script(answer_id)
        stream = self.store.open(script, tenant, names_events=False, **options)
        assert stream is not None, "no room"
        return script, stream

    @property
    def numbers(self) -> dict[str, float]:
        resume = self.metrics.resume
        self.store.sample()
        return {
            name: getattr(resume, name).value
            for name in ("detached", "num_bytes", "resumed", "expired", "refused")
        }


@pytest.fixture
async def house() -> AsyncIterator[House]:
    built = House()
    yield built
    await built.store.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MERGE_S", 0.001)


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)


async def rest(reader: Reader) -> tuple[list[bytes], Ending]:
    """All that follows."""
    events: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            piece = await reader.read()
            events += piece.events
            if piece.ending is not None:
                return events, piece.ending


async def test_a_stream_is_read_to_its_end(house: House) -> None:
    script, stream = house.open()
    script.give([b"a", b"b"], [b"c"], END)
    reader = stream.attach(0)
    assert await rest(reader) == ([b"a", b"b", b"c"], Ending(4, None))
    reader.close()
    assert script.num_closed == 1
    assert house.numbers["detached"] == 0


async def test_events_go_to_whoever_is_diverted_in_the_same_turn(house: House) -> None:
    script, stream = house.open()
    reader, taken = stream.attach(0), []

    def take(first: int, batch: list[bytes]) -> bool:
        taken.append((first, batch))
        return len(taken) < 2

    reader.divert(take, lambda: None)
    reading = asyncio.create_task(rest(reader))
    await asyncio.sleep(0)
    script.give([b"a"], [b"b"])
    await until(lambda: len(taken) == 2)
    script.give([b"c"], END)
    assert (await reading)[1] == Ending(4, None)
    # After it had wanted no more it was asked again: nothing came twice, and nothing was left out.
    assert [event for _, batch in taken for event in batch] == [b"a", b"b", b"c"]
    assert [first for first, _ in taken] == [1, 2, 3]


async def test_nothing_is_handed_over_before_whoever_is_full_asks_again(house: House) -> None:
    script, stream = house.open()
    reader, taken = stream.attach(0), []

    def take(first: int, batch: list[bytes]) -> bool:
        taken.append((first, batch))
        return False

    reader.divert(take, lambda: None)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    script.give([b"a"])
    assert await reading == (2, [], None, False)
    script.give([b"b"], [b"c"])
    await until(lambda: stream.log.last == 3)
    # They are written down, and wait.
    assert taken == [(1, [b"a"])]
    assert await reader.read() == (2, [b"b", b"c"], None, False)


async def test_what_was_missed_comes_to_who_comes_back(house: House) -> None:
    script, stream = house.open()
    reader = stream.attach(0)
    script.give([b"a"])
    await reader.read()
    reader.close()
    assert house.numbers["detached"] == 1
    script.give([b"b"], [b"c"])
    await until(lambda: stream.log.last == 3)
    again = stream.attach(1)
    assert house.numbers["detached"] == 0
    script.give([b"d"], END)
    assert await rest(again) == ([b"b", b"c", b"d"], Ending(5, None))
    again.close()
    for after, expected in ((0, [b"a", b"b", b"c", b"d"]), (3, [b"d"]), (4, []), (5, [])):
        last = stream.attach(after)
        assert await rest(last) == (expected, Ending(5, None))
        last.close()


@pytest.mark.parametrize(("after", "is_known"), [(2, False), (3, True)])
async def test_an_ending_that_was_had_is_known(house: House, after: int, is_known: bool) -> None:
    script, stream = house.open()
    script.give([b"a", b"b"], END)
    await until(lambda: stream.ending is not None)
    piece = await stream.attach(after).read()
    assert (piece.events, piece.ending, piece.is_known) == ([], Ending(3, None), is_known)


async def test_there_is_nothing_after_what_is_not_there_yet(house: House) -> None:
    script, stream = house.open()
    with pytest.raises(InvalidRequest):
        stream.attach(1)
    script.give([b"a"], END)
    await until(lambda: stream.ending is not None)
    with pytest.raises(InvalidRequest):
        stream.attach(3)


async def test_the_newest_connection_has_the_stream(house: House) -> None:
    script, stream = house.open()
    old = stream.attach(0)
    waiting = asyncio.create_task(old.read())
    await asyncio.sleep(0)
    lost: list[bool] = []
    old.divert(lambda _first, _batch: True, lambda: lost.append(True))
    new = stream.attach(0)
    with pytest.raises(StreamTaken):
        await waiting
    assert lost == [True]
    # What the old one does now is nothing to the stream.
    old.cancel()
    old.close()
    script.give([b"a"], END)
    assert await rest(new) == ([b"a"], Ending(2, None))
    assert not script.is_cancelled


async def test_an_error_after_the_first_event_is_the_ending(house: House) -> None:
    script, stream = house.open()
    script.give([b"a"], EngineUnavailable("gone"))
    events, ending = await rest(stream.attach(0))
    assert events == [b"a"]
    assert ending.problem is not None
    assert (ending.number, ending.problem.status) == (2, 503)
    assert house.store.find("cmpl-one", "") is stream


async def test_an_error_before_it_leaves_nothing(house: House) -> None:
    script, stream = house.open()
    reader = stream.attach(0)
    script.give(Overloaded("full"))
    with pytest.raises(Overloaded):
        await reader.read()
    reader.close()
    assert house.store.find("cmpl-one", "") is None
    assert len(house.store) == 0
    house.open()


async def test_an_id_is_taken_once_for_each_caller(house: House) -> None:
    script, mine = house.open(tenant="alice")
    with pytest.raises(StreamExists):
        house.open(tenant="alice")
    _, other = house.open(tenant="bob")
    assert house.store.find("cmpl-one", "alice") is mine
    assert house.store.find("cmpl-one", "bob") is other
    assert house.store.find("cmpl-one", "carol") is None
    assert house.store.find("cmpl-one", None) is other
    script.give([b"a"], END)
    await until(lambda: mine.ending is not None)
    with pytest.raises(StreamExists):
        house.open(tenant="alice")


async def test_a_request_that_is_known_elsewhere_ends() -> None:
    house, answer = House(), asyncio.get_running_loop().create_future()

    async def is_elsewhere() -> bool:
        return await answer

    script, stream = house.open(is_elsewhere=is_elsewhere)
    reader = stream.attach(0)
    script.give([b"a"])
    reading = asyncio.create_task(reader.read())
    await until(script._items.empty)
    # Nothing is shown before that is known.
    assert not reading.done()
    answer.set_result(True)
    with pytest.raises(StreamExists):
        await reading
    await until(lambda: script.num_closed == 1)
    assert len(house.store) == 0


async def test_who_does_not_come_back_is_not_waited_for() -> None:
    house = House(window_s=0.01)
    script, stream = house.open()
    reader = stream.attach(0)
    script.give([b"a"])
    await reader.read()
    reader.close()
    await until(lambda: script.num_closed == 1)
    assert house.store.find("cmpl-one", "") is None
    assert house.numbers == {"detached": 0, "num_bytes": 0, "resumed": 0, "expired": 1, "refused": 0}
    assert len(house.store) == 0


async def test_a_stream_that_has_ended_is_kept_and_then_forgotten() -> None:
    house = House(window_s=0.01)
    script, stream = house.open()
    reader = stream.attach(0)
    script.give([b"a"], END)
    await rest(reader)
    await asyncio.sleep(0.05)
    # Somebody has it still.
    assert house.store.find("cmpl-one", "") is stream
    reader.close()
    await until(lambda: house.store.find("cmpl-one", "") is None)
    assert house.numbers["expired"] == house.numbers["num_bytes"] == 0


async def test_a_server_that_stops_aborts_what_runs(house: House) -> None:
    detached, _ = house.open("cmpl-detached")
    attached, stream = house.open("cmpl-attached")
    fresh, _ = house.open("cmpl-fresh")
    await asyncio.sleep(0)
    reading = asyncio.create_task(stream.attach(0).read())
    await asyncio.sleep(0)
    await house.store.close()
    assert detached.num_closed == attached.num_closed == fresh.num_closed == 1
    with pytest.raises(StreamNotFound):
        await reading
    assert len(house.store) == 0


async def test_nothing_is_kept_without_a_window() -> None:
    assert House(window_s=0).store.open(Script(), "", names_events=False) is None


class TestRoom:
    SIZE = 1000 + 64

    def fill(self, **options: Any) -> House:
        return House(max_bytes=80 * self.SIZE, **options)

    async def ended(self, house: House, answer_id: str, num_events: int) -> KeptStream:
        script, stream = house.open(answer_id)
        script.give([bytes(1000)] * num_events, END)
        await until(lambda: stream.ending is not None)
        return stream

    async def test_ended_streams_go_oldest_first(self) -> None:
        house = self.fill()
        for number in range(10):
            await self.ended(house, f"cmpl-{number}", 9)
        kept = [number for number in range(10) if house.store.find(f"cmpl-{number}", "")]
        assert kept == list(range(10 - len(kept), 10))
        assert 6 <= len(kept) <= 8
        assert house.store.num_bytes == house.numbers["num_bytes"] == len(kept) * 9 * self.SIZE

    async def test_one_that_is_read_stays(self) -> None:
        house = self.fill()
        reader = (await self.ended(house, "cmpl-first", 9)).attach(0)
        for number in range(20):
            await self.ended(house, f"cmpl-{number}", 9)
        assert house.store.find("cmpl-first", "") is not None
        assert len((await rest(reader))[0]) == 9
        reader.close()
        assert house.store.num_bytes <= 80 * self.SIZE

    async def test_a_running_stream_drops_what_its_reader_has(self) -> None:
        house = self.fill()
        script, stream = house.open()
        reader = stream.attach(0)
        for number in range(100):
            script.give([b"%1000d" % number])
            assert (await reader.read()).events == [b"%1000d" % number]
            assert stream.log.num_bytes <= 11 * self.SIZE
        # The newest are there, the others are not.
        reader.close()
        with pytest.raises(EventsGone):
            stream.attach(50)
        again = stream.attach(97)
        script.give(END)
        assert await rest(again) == ([b"%1000d" % number for number in (97, 98, 99)], Ending(101, None))
        await house.store.close()

    async def test_one_without_a_reader_keeps_all_and_writes_no_more(self) -> None:
        house = self.fill()
        script, stream = house.open()
        for number in range(100):
            script.give([b"%1000d" % number])
        script.give(END)
        await until(lambda: stream.log.num_bytes >= 10 * self.SIZE)
        await asyncio.sleep(0.05)
        assert stream.log.num_bytes <= 11 * self.SIZE
        assert house.store.num_bytes <= 80 * self.SIZE
        events, ending = await rest(stream.attach(0))
        assert events == [b"%1000d" % number for number in range(100)]
        assert ending == Ending(101, None)

    async def test_a_new_stream_without_room_is_not_kept(self) -> None:
        house = self.fill()
        for number in range(8):
            script, stream = house.open(f"cmpl-{number}")
            script.give([bytes(1000)] * 11)
            await until(lambda stream=stream: stream.log.last == 11)
        assert house.store.open(Script("cmpl-more"), "", names_events=False) is None
        assert house.numbers["refused"] == 1
        await house.store.close()
        assert house.numbers["num_bytes"] == 0

    async def test_there_are_only_so_many(self) -> None:
        house = House(max_streams=3)
        for number in range(3):
            house.open(f"cmpl-{number}")
        assert house.store.open(Script("cmpl-more"), "", names_events=False) is None
        await house.store.close()
        for number in range(10):
            await self.ended(house, f"cmpl-{number}", 1)
        assert len(house.store) == 3
        await house.store.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(1, 3)),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.integers(0, 5)),
        st.tuples(st.just("turns"), st.integers(0, 4)),
    ),
    max_size=40,
)


@given(STEPS)
def test_however_often_it_is_cut_every_event_comes_once(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_cut(steps))


async def _cut(steps: list[tuple[str, int]]) -> None:
    house, num_given, heard = House(), 0, list[tuple[int, bytes]]()
    script, stream = house.open()

    def take(first: int, batch: list[bytes]) -> bool:
        heard.extend(enumerate(batch, first))
        return len(heard) % 3 > 0

    reader = stream.attach(0)
    for kind, count in steps:
        if kind == "give":
            script.give([b"%d" % (num_given + at + 1) for at in range(count)])
            num_given += count
        elif kind == "turns":
            for _ in range(count):
                await asyncio.sleep(0)
        elif kind == "read":
            reading = asyncio.create_task(reader.read())
            for _ in range(count):
                await asyncio.sleep(0)
            reading.cancel()
            (found,) = await asyncio.gather(reading, return_exceptions=True)
            if not isinstance(found, BaseException):
                heard.extend(enumerate(found.events, found.first))
        else:
            # As a lost connection does: what was under way is lost, and asked for again.
            if count > 2:
                reader.close()
            del heard[len(heard) - min(count, len(heard)) :]
            reader = stream.attach(len(heard))
            if count % 2:
                reader.divert(take, lambda: None)
    script.give(END)
    while True:
        piece = await reader.read()
        heard.extend(enumerate(piece.events, piece.first))
        if piece.ending is not None:
            break
    assert heard == [(number, b"%d" % number) for number in range(1, num_given + 1)]
    if num_given:
        assert piece.ending.number == num_given + 1
    await house.store.close()
    assert script.num_closed == 1
