"""What all processes share: rings, bells and the status board, made once by the supervisor.

                 frontend i                       engine
request ring i   writes, sleeps on its bell       reads, sleeps on the engine bell
delta ring i     reads, sleeps on its bell        writes, sleeps on the engine bell
status board     reads, woken by its bell         —                 (the supervisor writes)
progress         reads when it is asked           —                 (the supervisor writes)
metrics          writes row i, reads all          —
"""

from __future__ import annotations

import contextlib
import json

from streamserve.bootstrap import Channel
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.notice import Notice
from streamserve.ipc.ring import format_ring, ring_bytes
from streamserve.ipc.segment import Segment

# A prompt of 128k tokens with its block hashes is 0.7 MB: several of the longest fit at once.
REQUEST_RING_BYTES = 4 * 2**20
# A token is some 17 bytes in a STEP frame: 4 MiB hold a quarter of a million before the engine has to wait.
DELTA_RING_BYTES = 4 * 2**20
PROGRESS_BYTES = 4096
_MAX_STAGE_CHARS = 200


class SharedState:
    """The segments and bells of one server, open until `close`.

    Args:
        num_frontends: how many channels to make.
        metrics_bytes: for the rows of all frontends.

    Raises:
        ConfigError: there is not enough memory.
    """

    def __init__(self, num_frontends: int, metrics_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            self.board = StatusBoard.create()
            undo.callback(self.board.close)
            self.progress = Notice.create("streamserve-progress", PROGRESS_BYTES)
            undo.callback(self.progress.close)
            self.metrics = Segment.create("streamserve-metrics", metrics_bytes)
            undo.callback(self.metrics.close)
            self._engine_bell = Doorbell.create()
            undo.callback(self._engine_bell.close)
            self._frontend_bells = [Doorbell.create() for _ in range(num_frontends)]
            for bell in self._frontend_bells:
                undo.callback(bell.close)
            self.channels = tuple(
                Channel(
                    request_ring=_create_ring(undo, f"requests-{index}", REQUEST_RING_BYTES),
                    delta_ring=_create_ring(undo, f"deltas-{index}", DELTA_RING_BYTES),
                    frontend_bell=bell.fileno(),
                    engine_bell=self._engine_bell.fileno(),
                )
                for index, bell in enumerate(self._frontend_bells)
            )
            self._resources = undo.pop_all()

    def publish(self, epoch: int, state: EngineState) -> None:
        """Puts the engine's state on the board and wakes every frontend to read it."""
        self.board.publish(epoch, state)
        for bell in self._frontend_bells:
            bell.ring()

    def report_progress(self, what: str, fraction: float) -> None:
        """Shows how far the engine's start is, from 0 to 1."""
        self.progress.publish(json.dumps({"stage": what[:_MAX_STAGE_CHARS], "fraction": fraction}).encode())

    def close(self) -> None:
        """Closes the supervisor's descriptors; the memory goes when the last child has gone."""
        self._resources.close()


def _create_ring(undo: contextlib.ExitStack, name: str, capacity: int) -> int:
    segment = Segment.create(f"streamserve-{name}", ring_bytes(capacity))
    undo.callback(segment.close)
    format_ring(segment.view, capacity)
    return segment.fd
