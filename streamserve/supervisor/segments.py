"""What all processes share: rings, bells and the status board, made once by the supervisor.

                 frontend i                       engine
request ring i   writes, sleeps on its bell       reads, sleeps on the engine bell
delta ring i     reads, sleeps on its bell        writes, sleeps on the engine bell
status board     reads, woken by its bell         —                 (the supervisor writes)
model            waits for it, by its bell        the same          (the supervisor writes)
progress         reads when it is asked           —                 (the supervisor writes)
metrics          writes row i, reads all          —
door i           listens inside, all others knock  —                (several frontends only)

Between the death of a frontend and the start of its successor the supervisor has its end of the request ring,
and its metrics row.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace

from streamserve.bootstrap import Channel, ResolvedModel
from streamserve.frontend.metrics import Layout, Row
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.ipc.door import make_door
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.notice import Notice
from streamserve.ipc.ring import RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import Kind, encode_handover

# A prompt of 128k tokens with its block hashes is 0.7 MB: several of the longest fit at once.
REQUEST_RING_BYTES = 4 * 2**20
# A token is some 17 bytes in a STEP frame: 4 MiB hold a quarter of a million before the engine has to wait.
DELTA_RING_BYTES = 4 * 2**20
PROGRESS_BYTES = 4096
# A path and a few words.
MODEL_BYTES = 16384
_MAX_STAGE_CHARS = 200


class SharedState:
    """The segments and bells of one server, open until `close`.

    Args:
        num_frontends: how many channels to make.
        layout: of the frontends' metrics rows.

    Attributes:
        channels: of each frontend; for the process that holds it now or is the next to.
        outsides: of the doors of all frontends, by index; none if there is but one.

    Raises:
        ConfigError: there is not enough memory.
    """

    def __init__(self, num_frontends: int, layout: Layout) -> None:
        self._layout = layout
        with contextlib.ExitStack() as undo:
            self.board = StatusBoard.create()
            undo.callback(self.board.close)
            self.model = Notice.create("streamserve-model", MODEL_BYTES)
            undo.callback(self.model.close)
            self.progress = Notice.create("streamserve-progress", PROGRESS_BYTES)
            undo.callback(self.progress.close)
            self.metrics = Segment.create("streamserve-metrics", layout.segment_bytes(num_frontends))
            undo.callback(self.metrics.close)
            self._engine_bell = Doorbell.create()
            undo.callback(self._engine_bell.close)
            self._frontend_bells = [Doorbell.create() for _ in range(num_frontends)]
            for bell in self._frontend_bells:
                undo.callback(bell.close)
            indices = range(num_frontends)
            self._requests = [_create_ring(undo, f"requests-{i}", REQUEST_RING_BYTES) for i in indices]
            deltas = [_create_ring(undo, f"deltas-{i}", DELTA_RING_BYTES) for i in indices]
            self.channels = [
                Channel(requests.fd, deltas.fd, bell.fileno(), self._engine_bell.fileno())
                for requests, deltas, bell in zip(self._requests, deltas, self._frontend_bells, strict=True)
            ]
            # A frontend that is alone needs none.
            doors = [make_door() for _ in indices] if num_frontends > 1 else []
            for side in itertools.chain.from_iterable(doors):
                undo.callback(side.close)
            self._insides = [inside.fileno() for inside, _ in doors]
            self.outsides = tuple(outside.fileno() for _, outside in doors)
            self._resources = undo.pop_all()

    def inside(self, index: int) -> int:
        """The inside of a frontend's door, whichever process it is; -1 if there is none."""
        return self._insides[index] if self._insides else -1

    def publish(self, epoch: int, state: EngineState) -> None:
        """Puts the engine's state on the board and wakes every frontend to read it."""
        self.board.publish(epoch, state)
        self._wake_frontends()

    def publish_model(self, model: ResolvedModel) -> None:
        """Tells engine and frontends what they serve, those that start later as well."""
        model.publish(self.model)
        self._engine_bell.ring()
        self._wake_frontends()

    def report_progress(self, what: str, fraction: float) -> None:
        """Shows how far the start is, from 0 to 1."""
        self.progress.publish(json.dumps({"stage": what[:_MAX_STAGE_CHARS], "fraction": fraction}).encode())

    def hand_over(self, index: int, epoch: int) -> bool:
        """Makes the channel and the metrics row of a dead frontend those of its successor.

        The engine learns of it in the request ring, whose only producer is this process until the successor
        starts: what lies before the HANDOVER frame is the dead one's, and all that follows the successor's.

        Args:
            index: of the frontend. Its process must have been reaped.
            epoch: of the engine.

        Returns:
            False if the ring has no room yet; the engine has not been told then.

        Raises:
            RingCorrupted: the dead one has left a ring that cannot be used.
        """
        row_bytes = self._layout.row_bytes
        row = Row(self._layout, self.metrics.view[index * row_bytes : (index + 1) * row_bytes])
        row.take_over(pid=0)
        channel = self.channels[index]
        successor = replace(channel, incarnation=channel.incarnation + 1)
        writer = RingWriter(self._requests[index].view, self._engine_bell)
        is_told = writer.try_push(Kind.HANDOVER, encode_handover(epoch, successor.incarnation))
        # In any case: the dead one may have been about to, and the engine's sign that it sleeps is gone then.
        self._engine_bell.ring()
        if is_told:
            self.channels[index] = successor
            row.counter("streamserve:frontend_restarts").add()
        return is_told

    def _wake_frontends(self) -> None:
        for bell in self._frontend_bells:
            bell.ring()

    def close(self) -> None:
        """Closes the supervisor's descriptors; the memory goes when the last child has gone."""
        self._resources.close()


def _create_ring(undo: contextlib.ExitStack, name: str, capacity: int) -> Segment:
    segment = Segment.create(f"streamserve-{name}", ring_bytes(capacity))
    undo.callback(segment.close)
    format_ring(segment.view, capacity)
    return segment
