"""Streams of another frontend, read through its door: two frontends in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from resume_script import END, Script

from streamserve.errors import EngineUnavailable
from streamserve.frontend.api.problems import Told
from streamserve.frontend.resume import neighbours as neighbours_module
from streamserve.frontend.resume.errors import StreamExists, StreamNotFound
from streamserve.frontend.resume.neighbours import Neighbours
from streamserve.frontend.resume.reading import Ending, Reading
from streamserve.frontend.resume.store import StreamStore
from streamserve.frontend.resume.stream import KeptStream
from streamserve.ipc.door import Doors, make_door

WAIT_S = 60.0


class Place:
    """One frontend."""

    def __init__(self, doors: Doors, index: int) -> None:
        self.others: list[Place] = []
        self.store = StreamStore(window_s=3600.0)
        self.neighbours = Neighbours(self.store, self, doors, index)

    async def relay(self, body: Any) -> Any | None:
        await asyncio.sleep(0)
        answers = [other.neighbours.answer(body) for other in self.others]
        return next((answer for answer in answers if answer is not None), None)

    def open(self, answer_id: str = "cmpl-one", tenant: str = "") -> tuple[Script, KeptStream]:
        script = Script(answer_id)
        claim = self.neighbours.claim(answer_id, tenant)
        stream = self.store.open(script, tenant, names_events=True, is_elsewhere=claim)
        assert stream is not None
        return script, stream


@pytest.fixture
async def places() -> AsyncIterator[list[Place]]:
    doors = [make_door() for _ in range(2)]
    outsides = [outside for _, outside in doors]
    built = [Place(Doors(inside, outsides), index) for index, (inside, _) in enumerate(doors)]
    for place, other in (built, built[::-1]):
        place.others = [other]
        place.neighbours.start()
    yield built
    for place in built:
        await place.neighbours.stop()
        await place.store.close()
    for side in (side for door in doors for side in door):
        side.close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)


async def rest(reading: Reading) -> tuple[list[bytes], Ending]:
    events: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            piece = await reading.read()
            assert piece.first == len(events) + 1 or not piece.events
            events += piece.events
            if piece.ending is not None:
                return events, piece.ending


async def test_it_reads_as_at_home(places: list[Place]) -> None:
    here, there = places
    script, stream = there.open()
    reading = await here.neighbours.read("cmpl-one", "", 0)
    assert reading.names_events
    assert reading.stream_id == "cmpl-one"
    script.give([b'{"a":1}', b"{}"])
    assert (await reading.read()).events == [b'{"a":1}', b"{}"]
    large = b"x" * 1_000_000
    script.give([large], END)
    assert (await reading.read())[:2] == (3, [large])
    assert (await reading.read()).ending == Ending(4, None)
    reading.close()
    await until(lambda: not stream.has_reader)
    for after, is_known in ((3, False), (4, True)):
        again = await here.neighbours.read("cmpl-one", "", after)
        piece = await again.read()
        assert (piece.events, piece.ending, piece.is_known) == ([], Ending(4, None), is_known)
        again.close()


async def test_a_failure_comes_over_whole(places: list[Place]) -> None:
    here, there = places
    script, _ = there.open()
    script.give([b"{}"], EngineUnavailable("It is gone."))
    reading = await here.neighbours.read("cmpl-one", "", 0)
    _, ending = await rest(reading)
    reading.close()
    assert ending.problem is not None
    assert (ending.problem.status, ending.problem.message) == (503, "It is gone.")
    assert ("Retry-After", "5") in ending.problem.headers


async def test_a_failure_before_the_first_event_is_raised(places: list[Place]) -> None:
    here, there = places
    script, _ = there.open()
    reading = await here.neighbours.read("cmpl-one", "", 0)
    script.give(EngineUnavailable("It is gone."))
    with pytest.raises(Told) as told:
        await reading.read()
    reading.close()
    assert told.value.problem.status == 503


async def test_a_client_that_leaves_leaves_the_stream(places: list[Place]) -> None:
    here, there = places
    script, stream = there.open()
    reading = await here.neighbours.read("cmpl-one", "", 0)
    await until(lambda: stream.has_reader)
    reading.close()
    await until(lambda: not stream.has_reader)
    assert not script.is_cancelled
    again = await here.neighbours.read("cmpl-one", "", 0)
    again.cancel()
    events, ending = await rest(again)
    again.close()
    assert (events, ending.problem) == ([b"cancelled"], None)


async def test_the_newest_has_it_wherever_it_comes_in(places: list[Place]) -> None:
    here, there = places
    script, stream = there.open()
    far = await here.neighbours.read("cmpl-one", "", 0)
    near = stream.attach(0)
    with pytest.raises(Told) as told:
        await far.read()
    far.close()
    assert told.value.problem.code == "stream_taken"
    script.give([b"{}"], END)
    assert (await rest(near))[0] == [b"{}"]


@pytest.mark.parametrize(("tenant", "after", "status"), [("", 7, 400), ("bob", 0, 404)])
async def test_what_is_refused_there_is_refused_here(
    places: list[Place], tenant: str, after: int, status: int
) -> None:
    here, there = places
    script, stream = there.open()
    script.give([b"{}"])
    await until(lambda: stream.log.last == 1)
    with pytest.raises((Told, StreamNotFound)) as refused:
        await here.neighbours.read("cmpl-one", tenant, after)
    error = refused.value
    assert (error.problem.status if isinstance(error, Told) else error.status) == status
    assert not stream.has_reader


async def test_a_frontend_that_goes_breaks_what_it_feeds(places: list[Place]) -> None:
    here, there = places
    there.open()
    reading = await here.neighbours.read("cmpl-one", "", 0)
    await there.neighbours.stop()
    with pytest.raises(EngineUnavailable):
        await reading.read()
    reading.close()
    there.neighbours.start()


async def test_one_that_does_not_answer_is_not_waited_for(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = places
    script, stream = there.open()
    await there.neighbours.stop()
    monkeypatch.setattr(neighbours_module, "ANSWER_TIMEOUT_S", 0.01)
    with pytest.raises(EngineUnavailable):
        await here.neighbours.read("cmpl-one", "", 0)
    # Nor when so many wait at the door that no more fit.
    for _ in range(2000):
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(here.neighbours.read("cmpl-one", "", 0), WAIT_S)
        monkeypatch.setattr(neighbours_module, "ANSWER_TIMEOUT_S", 0.0)
    there.neighbours.start()
    monkeypatch.setattr(neighbours_module, "ANSWER_TIMEOUT_S", WAIT_S)
    # What waited too long is passed over, and whoever comes now gets in.
    near = stream.attach(0)
    for _ in range(100):
        await asyncio.sleep(0.001)
    script.give([b"{}"], END)
    assert (await rest(near))[0] == [b"{}"]
    near.close()
    reading = await here.neighbours.read("cmpl-one", "", 0)
    assert (await rest(reading))[0] == [b"{}"]
    reading.close()


async def test_a_request_that_comes_twice_runs_in_one_place(places: list[Place]) -> None:
    here, there = places
    first, old = here.open()
    first.give([b"{}"])
    await until(lambda: old.log.last == 1)
    second, new = there.open()
    second.give([b"{}"])
    with pytest.raises(StreamExists):
        await new.attach(0).read()
    assert here.store.find("cmpl-one", "") is old
    assert there.store.find("cmpl-one", "") is None
    await until(lambda: second.num_closed == 1)


async def test_of_two_at_one_moment_one_goes_on(places: list[Place]) -> None:
    for _ in range(3):
        pairs = [place.open() for place in places]
        outcomes = []
        for script, _ in pairs:
            script.give([b"{}"], END)
        for _, stream in pairs:
            outcomes.append((await asyncio.gather(rest(stream.attach(0)), return_exceptions=True))[0])
        assert outcomes[0] == ([b"{}"], Ending(2, None))
        assert isinstance(outcomes[1], StreamExists)
        await places[0].store.close()
