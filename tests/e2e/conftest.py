"""One tiny-model server for every end-to-end test of the session."""

from __future__ import annotations

import pytest
from server import running_server


@pytest.fixture(scope="session")
def tiny_server(tiny_model):
    """A server on the tiny model, in float32, with a KV cache that holds a 50,000-token prompt."""
    with running_server(
        str(tiny_model),
        "--dtype=float32",
        "--served-model-name=tiny",
        "--num-gpu-blocks-override=5000",
        "--max-num-seqs=16",
        "--max-body-bytes=2M",
        env={"OMP_NUM_THREADS": "2"},
    ) as server:
        yield server
