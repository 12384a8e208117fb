"""Pushes messages into a ring, in pieces, and stays: `SEGMENT DATA_BELL SPACE_BELL kind file...`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingWriter
from streamserve.ipc.segment import Segment

WAIT_S = 120


def main() -> None:
    segment, data_bell, space_bell, kind = map(int, sys.argv[1:5])
    bell = Doorbell.attach(space_bell)
    writer = RingWriter(Segment.attach(segment).view, Doorbell.attach(data_bell))
    for message in [Path(name).read_bytes() for name in sys.argv[5:]]:
        push = writer.begin(kind, [message])
        while not push.advance():
            if writer.arm_space():
                assert bell.wait(WAIT_S), "the reader never made room"
            writer.disarm_space()
    signal.pause()


if __name__ == "__main__":
    main()
