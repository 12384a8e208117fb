"""Reads checked frames of a broadcast ring: `SEGMENT BELL SPACE_BELL index count`."""

from __future__ import annotations

import sys

from checked_frames import check

from streamserve.ipc.broadcast import BroadcastReader
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.segment import Segment

WAIT_S = 120


def main() -> None:
    segment, own_bell, space_bell, index, count = map(int, sys.argv[1:])
    bell = Doorbell.attach(own_bell)
    reader = BroadcastReader(Segment.attach(segment).view, index, Doorbell.attach(space_bell))
    number = 0
    while number < count:
        for _, payload in reader.read():
            check(payload, number)
            number += 1
        reader.release()
        if number < count and reader.arm():
            assert bell.wait(WAIT_S), "a wake-up was lost"
        reader.disarm()


if __name__ == "__main__":
    main()
