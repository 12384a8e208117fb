"""Publishes two texts in turns until killed: `NOTICE`."""

from __future__ import annotations

import sys

from streamserve.ipc.notice import Notice


def main() -> None:
    notice = Notice.attach(int(sys.argv[1]))
    while True:
        notice.publish(b"a" * 10)
        notice.publish(b"b" * 5000)


if __name__ == "__main__":
    main()
