"""Pushes checked frames into a ring: `SEGMENT DATA_BELL SPACE_BELL first count shortest longest`."""

from __future__ import annotations

import sys

from checked_frames import FrameMaker

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingWriter
from streamserve.ipc.segment import Segment

WAIT_S = 120


def main() -> None:
    segment, data_bell, space_bell, first, count, shortest, longest = map(int, sys.argv[1:])
    bell = Doorbell.attach(space_bell)
    writer = RingWriter(Segment.attach(segment).view, Doorbell.attach(data_bell))
    frames = FrameMaker(first, shortest, longest, first)
    for _ in range(count):
        parts = frames.next()
        while not writer.try_push(1, parts):
            if writer.arm_space():
                assert bell.wait(WAIT_S), "the reader never made room"
            writer.disarm_space()


if __name__ == "__main__":
    main()
