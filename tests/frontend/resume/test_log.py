"""The log of a stream against a list of everything that was ever written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamserve.frontend.resume.log import EVENT_BYTES, EventLog

EVENTS = st.binary(max_size=40)
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.lists(EVENTS, min_size=1, max_size=5)),
    st.tuples(st.just("drop"), st.integers(0, 2000), st.integers(0, 60)),
    st.tuples(st.just("after"), st.integers(0, 60), st.integers(0, 300)),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_it_holds_what_a_list_would_hold(operations: list[tuple]) -> None:
    log, everything, num_gone = EventLog(), [], 0
    for operation in operations:
        match operation:
            case ("append", batch):
                size = log.append(batch)
                everything += batch
                assert size == sum(len(event) + EVENT_BYTES for event in batch)
            case ("drop", num_bytes, up_to):
                freed = log.drop(num_bytes, up_to)
                gone = everything[num_gone : log.first - 1]
                assert freed == sum(len(event) + EVENT_BYTES for event in gone)
                # No more than was asked for but by a part of one event, and none that is still needed.
                assert freed - num_bytes < len(gone[-1]) + EVENT_BYTES if gone else freed == 0
                assert not gone or log.first - 1 <= up_to
                assert freed >= num_bytes or log.first > min(up_to, len(everything))
                num_gone = log.first - 1
            case ("after", number, max_bytes) if log.first - 1 <= number <= log.last:
                found = log.after(number, max_bytes)
                assert found == everything[number : number + len(found)]
                assert bool(found) == (number < len(everything))
                assert len(found) <= 1 or sum(map(len, found)) <= max_bytes
        assert log.last == len(everything)
        assert log.num_bytes == sum(len(event) + EVENT_BYTES for event in everything[num_gone:])
