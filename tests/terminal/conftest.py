from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from terminal.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()
