"""Models that are made once a session and shared by every room's tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import hypothesis
import pytest
from server import running_server

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# As in the engine process: with idle threads that spin, two test processes on one machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton kernels run in its interpreter, on any processor; Triton reads this as it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 2-layer Llama with a byte-level tokenizer."""
    from tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def cpp_compiler() -> str:
    """Its path; what compiles a model on a CPU skips without."""
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        pytest.skip("no C++ compiler here; install g++")
    return found


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A STREAMSERVE_CACHE that no earlier session has left anything in."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2_float32() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32, converted from its GGUF once a machine."""
    from streamserve.artifacts.resolve import resolve_model
    from streamserve.config import ModelConfig

    return resolve_model(ModelConfig(dtype="float32"), lambda what, fraction: None).path


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
        # As the tests in a browser call it where it must not be the machine's own.
        "--allowed-hosts=plain.test",
        env={"OMP_NUM_THREADS": "2"},
    ) as server:
        yield server
