"""Sends back what comes: `INCOMING OUTGOING OWN_BELL PEER_BELL count`. Sleeps whenever there is nothing."""

from __future__ import annotations

import sys

from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.ipc.segment import Segment

WAIT_S = 120


def main() -> None:
    incoming, outgoing, own_bell, peer_bell, count = map(int, sys.argv[1:])
    bell, peer = Doorbell.attach(own_bell), Doorbell.attach(peer_bell)
    reader = RingReader(Segment.attach(incoming).view, None)
    writer = RingWriter(Segment.attach(outgoing).view, peer)
    while count:
        for kind, payload in reader.read():
            assert writer.try_push(kind, [payload])
            count -= 1
        reader.release()
        if count and reader.arm():
            assert bell.wait(WAIT_S), "a wake-up was lost"
        reader.disarm()


if __name__ == "__main__":
    main()
