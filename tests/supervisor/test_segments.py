"""What all processes share."""

from __future__ import annotations

import contextlib
import json

from streamserve.ipc.notice import Notice
from streamserve.ipc.segment import Segment
from streamserve.supervisor.segments import SharedState


def test_progress_is_there_to_be_read() -> None:
    with contextlib.closing(SharedState(1, 64)) as shared, Notice.attach(shared.progress.fd) as progress:
        assert progress.read() == b""
        shared.report_progress("loading weights", 0.25)
        assert json.loads(progress.read()) == {"stage": "loading weights", "fraction": 0.25}
        shared.report_progress("ü" * 10_000, 1.0)
        assert json.loads(progress.read())["stage"] == "ü" * 200


def test_metrics_have_the_room_that_was_asked_for() -> None:
    with contextlib.closing(SharedState(2, 12_345)) as shared, Segment.attach(shared.metrics.fd) as metrics:
        assert metrics.size == 12_345
        assert bytes(metrics.view) == bytes(12_345)
