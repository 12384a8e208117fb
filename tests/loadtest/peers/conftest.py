"""A made-up server as a peer, and the tiny model in a cache of the tests' own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.peers.models import ServedModel, prepare_model
from loadtest.peers.servers import completion
from loadtest.peers.workload import Limits

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@dataclass(frozen=True)
class FakePeer:
    """The made-up server, with flags of its own."""

    name: str = "fake"
    flags: tuple[str, ...] = ()
    absent: str = ""
    health: str = "/health"

    def missing(self) -> str:
        return self.absent

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        return [sys.executable, str(FAKE_SERVER), "--port", str(port), *self.flags]

    def environment(self, limits: Limits) -> dict[str, str]:
        return {}

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        return completion(model.name, prompt, max_tokens)


@pytest.fixture(scope="session")
def fake_peer() -> type[FakePeer]:
    return FakePeer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare_model("tiny")
