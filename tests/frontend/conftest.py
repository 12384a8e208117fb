"""A whole frontend in one process: the real application over real rings, and an engine that is a script."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from streamserve.config import ApiConfig, Config, ServerConfig, SupervisorConfig, TlsConfig
from streamserve.frontend.api.app import build_app
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import EngineClient
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.metrics import Layout, Metrics, Row
from streamserve.frontend.pump import Pump
from streamserve.frontend.registry import Registry
from streamserve.frontend.sender import Sender
from streamserve.frontend.server import FrontendServer, build_server
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import CHATML, ChatTemplate
from streamserve.frontend.text.tokenize import PromptTokenizer
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import (
    AddRequest,
    Finish,
    Kind,
    Logprobs,
    StepTokens,
    decode_abort,
    decode_add,
    decode_call,
    encode_begun,
    encode_call,
    encode_json,
    encode_prompt_logprobs,
    encode_step,
    epoch_of,
)

WAIT_S = 60.0

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "one two three four five six seven eight nine ten",
    "user assistant system hello world, how are you today?",
    "def f():\n    return 1\n",
]


def byte_level_tokenizer() -> Any:
    """A small byte-level BPE: every string can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("日本", special=False), AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback_tokenizer(*, strip: int = 1) -> Any:
    """The SentencePiece kind: words with ▁ for a space, and a token for each byte."""
    words = ["▁the", "▁", "▁fox", "a", "b", "▁▁", "é", "語", "▁a"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", strip, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Any:
    return byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def make_fallback_tokenizer() -> Callable[..., Any]:
    return byte_fallback_tokenizer


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer: Any) -> Path:
    """What a frontend reads of a model."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@dataclass(eq=False)
class Running:
    """A request in the fake engine."""

    request: AddRequest
    script: list[int]
    num_sent: int
    has_begun: bool = False


def echo(request: AddRequest) -> list[int]:
    """The prompt again and again."""
    return [int(token) for token in request.tokens[: request.num_prompt]]


Odds = tuple[float, list[tuple[int, float]]]


def likely(token: int) -> Odds:
    """The token itself is the likeliest, then those with the next ids."""
    return -0.5, [((token + rank) % 400, -0.5 * (rank + 1)) for rank in range(20)]


@dataclass
class FakeEngine:
    """Answers ADDs by a script, over real rings, on the test's own event loop.

    Attributes:
        script: output tokens of a request, repeated when they run out.
        odds: log probabilities where a token is: its own, and (id, log probability) of the likeliest.
        is_automatic: steps whenever there is something to run; else the test calls `step()`.
    """

    reader: RingReader
    writer: RingWriter
    bell: Doorbell
    board: StatusBoard
    facts: dict[str, Any]
    memory: tuple[memoryview, memoryview]
    frontend_bell: Doorbell
    script: Callable[[AddRequest], list[int]] = echo
    odds: Callable[[int], Odds] = likely
    is_automatic: bool = True
    answers_pings: bool = True
    tokens_per_step: int = 1
    max_running: int = 64
    cached_tokens: int = 0
    adds: list[AddRequest] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    live: list[Running] = field(default_factory=list)
    num_steps: int = 0
    _waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop | None = None
    _is_ticking: bool = False

    @property
    def epoch(self) -> int:
        return int(self.facts["epoch"])

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.bell.fileno(), self._wake)
        self._wake()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.bell.fileno())
            self._loop = None

    def hello(self, **changes: Any) -> None:
        self.facts.update(changes)
        assert self.writer.try_push(Kind.HELLO, encode_json(self.epoch, self.facts))
        self.board.publish(self.epoch, EngineState.READY)

    def die(self, ring: Doorbell) -> None:
        """It ends, and no other will come."""
        self.stop()
        self.live.clear()
        self.board.publish(self.epoch, EngineState.DEAD)
        ring.ring()

    def crash(self, ring: Doorbell) -> None:
        """It ends, and another will come."""
        self.stop()
        self.live.clear()
        self.facts["epoch"] += 1
        self.board.publish(self.epoch, EngineState.STARTING)
        ring.ring()

    def succeed(self) -> None:
        """The next one is there, on the rings as they are."""
        requests, deltas = self.memory
        self.reader = RingReader(requests, self.frontend_bell)
        self.writer = RingWriter(deltas, self.frontend_bell)
        self.adds.clear()
        self.aborts.clear()
        self.hello()
        self.start()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something has come or gone such that `holds()`."""
        if not holds():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((holds, future))
            await asyncio.wait_for(future, WAIT_S)

    def step(self) -> bool:
        """One step of everything that runs; False if nothing does."""
        rows = self.live[: self.max_running]
        if not rows:
            return False
        self.num_steps += 1
        streams, counts, finishes, tokens, cached = [], [], [], [], []
        num_top = [row.request.params.logprobs for row in rows if row.request.params.logprobs is not None]
        self.begin([row.request.stream for row in rows if not row.has_begun])
        for row in rows:
            is_first = not row.has_begun
            row.has_begun = True
            if is_first and row.request.params.prompt_logprobs is not None:
                self._push_prompt_logprobs(row.request, row.request.params.prompt_logprobs)
            new, finish = self._next(row)
            streams.append(row.request.stream)
            counts.append(len(new))
            finishes.append(finish)
            tokens += new
            cached.append(self.cached_tokens if is_first else 0)
            if finish:
                self.live.remove(row)
        logprobs = self._logprobs(tokens, max(num_top)) if num_top else None
        self.push_step(streams, counts, finishes, tokens, cached if any(cached) else None, logprobs=logprobs)
        self._changed()
        return True

    def begin(self, streams: list[int]) -> None:
        """Says that these begin to run."""
        if streams:
            frame = encode_begun(self.epoch, streams, time.monotonic_ns())
            assert self.writer.try_push(Kind.BEGUN, frame)

    def push_step(
        self,
        streams: list[int],
        counts: list[int],
        finishes: list[int],
        tokens: list[int],
        cached: list[int] | None = None,
        epoch: int | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        out = StepTokens(
            self.num_steps,
            np.array(streams, dtype="<u8"),
            np.array(tokens, dtype="<i4"),
            np.array(counts, dtype="<u4"),
            np.array(finishes, dtype="u1"),
            None if cached is None else np.array(cached, dtype="<u4"),
            logprobs,
        )
        assert self.writer.try_push(Kind.STEP, encode_step(self.epoch if epoch is None else epoch, out))

    def _logprobs(self, tokens: list[int], num_top: int) -> Logprobs:
        odds = [self.odds(token) for token in tokens]
        top = [candidates[:num_top] for _, candidates in odds]
        return Logprobs(
            np.array([chosen for chosen, _ in odds], dtype="<f4"),
            np.array([[token for token, _ in row] for row in top], dtype="<i4").reshape(len(tokens), num_top),
            np.array([[value for _, value in row] for row in top], dtype="<f4").reshape(len(tokens), num_top),
        )

    def _push_prompt_logprobs(self, request: AddRequest, num_top: int) -> None:
        """In two frames, as a prompt in two chunks would have them."""
        tokens = [int(token) for token in request.tokens[1:]]
        middle = len(tokens) // 2
        for start, part in ((1, tokens[:middle]), (1 + middle, tokens[middle:])):
            if part:
                frame = encode_prompt_logprobs(
                    self.epoch, request.stream, start, self._logprobs(part, num_top)
                )
                assert self.writer.try_push(Kind.PROMPT_LOGPROBS, frame)

    def finish(self, stream: int, finish: Finish) -> None:
        """Ends one stream without a token."""
        self.live = [row for row in self.live if row.request.stream != stream]
        self.push_step([stream], [0], [finish], [])

    def _next(self, row: Running) -> tuple[list[int], int]:
        params = row.request.params
        new: list[int] = []
        for _ in range(self.tokens_per_step):
            token = row.script[row.num_sent % len(row.script)]
            new.append(token)
            row.num_sent += 1
            is_eos = token in self.facts["eos_token_ids"] and not params.ignore_eos
            if (is_eos or token in params.stop_token_ids) and row.num_sent >= params.min_tokens:
                return new, Finish.STOP
            if row.num_sent >= params.max_tokens:
                return new, Finish.LENGTH
        return new, Finish.NONE

    def _wake(self) -> None:
        self.bell.clear()
        self.reader.disarm()
        while True:
            messages = self.reader.read()
            for kind, payload in messages:
                if epoch_of(payload) == self.epoch:
                    self._handle(kind, payload)
            self.reader.release()
            if not messages and self.reader.arm():
                break
        self._changed()
        if self.is_automatic and not self._is_ticking:
            self._tick()

    def _tick(self) -> None:
        self._is_ticking = self._loop is not None and self.is_automatic and self.step()
        if self._is_ticking and self._loop is not None:
            self._loop.call_soon(self._tick)

    def _handle(self, kind: int, payload: memoryview) -> None:
        if kind == Kind.ADD:
            request = decode_add(payload)
            self.adds.append(request)
            self.live.append(Running(request, self.script(request), len(request.tokens) - request.num_prompt))
        elif kind == Kind.ABORT:
            gone = decode_abort(payload)
            self.aborts += gone
            self.live = [row for row in self.live if row.request.stream not in gone]
        elif kind == Kind.CALL:
            call_id, body = decode_call(payload)
            self.calls.append(body)
            if self.answers_pings:
                reply = {"ok": True, "stats": self.statistics()}
                assert self.writer.try_push(Kind.STATS, encode_json(self.epoch, self.statistics()))
                assert self.writer.try_push(Kind.REPLY, encode_call(self.epoch, call_id, reply))

    def statistics(self) -> dict[str, int]:
        """The body of a STATS frame (streamserve.messages)."""
        running = len(self.live[: self.max_running])
        parts = ("schedule", "execute", "settle")
        return {
            "running": running,
            "waiting": len(self.live) - running,
            "num_blocks": int(self.facts["num_blocks"]),
            "free_blocks": int(self.facts["num_blocks"]),
            **dict.fromkeys(("prefix_queries", "prefix_hits", "preemptions", "expired"), 0),
            **dict.fromkeys(("prompt_tokens", "generation_tokens"), 0),
            "steps": self.num_steps,
            "step_tokens": 3 * self.num_steps,
            "step_tokens_le_1": 0,
            "step_tokens_le_8": self.num_steps,
            **{f"{part}_ns": 1_000_000 for part in parts},
            **{f"last_{part}_ns": 1000 for part in parts},
        }

    def _changed(self) -> None:
        for holds, future in self._waiters:
            if not future.done() and holds():
                future.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]


@dataclass
class Harness:
    """A frontend and its engine."""

    engine: FakeEngine
    client: EngineClient
    pump: Pump
    sender: Sender
    streams: StreamTable
    service: Service
    app: Starlette
    http: httpx.AsyncClient
    frontend_bell: Doorbell
    engine_bell: Doorbell
    segments: list[Segment]

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def until(self, holds: Callable[[], bool]) -> None:
        """Lets everything run until `holds()`."""
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110  (what is waited for has no event, on purpose)
                await asyncio.sleep(0)

    async def until_health(self, status: int, word: str) -> None:
        """Lets everything run until /health answers so."""
        async with asyncio.timeout(WAIT_S):
            while True:
                response = await self.http.get("/health")
                if (response.status_code, response.json()["status"]) == (status, word):
                    return
                await asyncio.sleep(0)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.service.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.service.tokenizer.tokenizer.decode(ids)
        return text

    def say(self, text: str) -> None:
        """Makes the engine answer `text` and stop."""
        ids = [*self.encode(text), self.engine.facts["eos_token_ids"][0]]
        self.engine.script = lambda _request: ids

    @asynccontextmanager
    async def served(
        self, drain_timeout_s: float = 5.0, tls: TlsConfig | None = None, **server: Any
    ) -> AsyncIterator[str]:
        """The app on a real socket, under options of `ServerConfig`; gives the base URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        started = asyncio.Event()
        config = Config(
            server=ServerConfig(**server),
            tls=tls or TlsConfig(),
            supervisor=SupervisorConfig(drain_timeout=drain_timeout_s),
        )
        running = build_server(self.app, self.service, config, started.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(running.serve(sockets=[listener]))
            await asyncio.wait_for(started.wait(), WAIT_S)
            self.server: FrontendServer = running
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                running.should_exit = True
                # A test that left a stream open does not wait for it.
                running.force_exit = True


def sse_events(text: str) -> list[Any]:
    """The events of an SSE body: parsed JSON, or the string "[DONE]"."""
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block, "an event is one line"
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@pytest.fixture
def events() -> Callable[[str], list[Any]]:
    return sse_events


@pytest.fixture
def turns_during() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Does some work in a thread: how many turns the event loop gets meanwhile, and the work's result.

    Nobody is made to give up the interpreter here, so there are turns only where the work drops the lock.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    turns: list[int] = []

    async def measure(work: Callable[[], Any]) -> tuple[int, Any]:
        turns.append(0)

        def run() -> tuple[int, Any]:
            before = turns[-1]
            result = work()
            return turns[-1] - before, result

        with ThreadPoolExecutor(1) as threads:
            working = asyncio.get_running_loop().run_in_executor(threads, run)
            while not working.done():
                turns[-1] += 1
                # Long enough for the thread to get the lock.
                await asyncio.sleep(0.0005)
            return await working

    yield measure
    sys.setswitchinterval(interval_s)


def registry_of(deployment: Deployment | None) -> Registry:
    """What counts into the row of a deployment's frontend, as the process has it."""
    if deployment is None:
        return Registry()
    layout = Layout(deployment.keys.names)
    memory = deployment.rows or memoryview(bytearray(layout.row_bytes))
    start = layout.row_bytes * deployment.index
    return Registry(Metrics(Row(layout, memory[start : start + layout.row_bytes])))


MakeHarness = Callable[..., Harness]


@pytest.fixture
def make_harness(tokenizer: Any) -> Iterator[MakeHarness]:
    """Builds harnesses that are not started yet; closes them."""
    closers: list[Callable[[], None]] = []

    def make(
        *,
        ring_capacity: int = 1 << 20,
        max_waiting: int = 1024,
        heartbeat_timeout_s: float = 30.0,
        template: str = CHATML,
        defaults: SamplingDefaults | None = None,
        max_body_bytes: int = 1 << 20,
        ping_interval_s: float = 15.0,
        write_timeout_s: float = 120.0,
        body_timeout_s: float = 120.0,
        with_tokenizer: Any = None,
        deployment: Deployment | None = None,
        api: ApiConfig | None = None,
        **facts: Any,
    ) -> Harness:
        rings = [Segment.create("test", ring_bytes(ring_capacity)) for _ in range(2)]
        for ring in rings:
            format_ring(ring.view, ring_capacity)
        bells = [Doorbell.create() for _ in range(2)]
        board = StatusBoard.create()
        requests, deltas = rings
        frontend_bell, engine_bell = bells
        known = with_tokenizer or tokenizer
        engine = FakeEngine(
            RingReader(requests.view, frontend_bell),
            RingWriter(deltas.view, frontend_bell),
            engine_bell,
            board,
            {
                "epoch": 1,
                "pid": os.getpid(),
                "incarnation": 0,
                "model": "tiny",
                "max_model_len": 512,
                "vocab_size": 512,
                "block_size": 16,
                "num_blocks": 64,
                "kv_capacity_tokens": 1024,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 512,
                "enable_prefix_caching": True,
                "eos_token_ids": [known.token_to_id("<|im_end|>") or 2],
                **facts,
            },
            (requests.view, deltas.view),
            frontend_bell,
        )
        sender, streams = Sender(RingWriter(requests.view, engine_bell)), StreamTable()
        registry = registry_of(deployment)
        pump = Pump(
            RingReader(deltas.view, engine_bell),
            sender,
            board,
            frontend_bell,
            streams,
            metrics=registry.metrics,
        )
        client = EngineClient(pump, sender, streams, Admission(max_waiting), heartbeat_timeout_s)
        threads = ThreadPoolExecutor(2)
        service = Service(
            client=client,
            tokenizer=PromptTokenizer(known, "<|im_start|>"),
            detokenizers=Detokenizers(known),
            template=ChatTemplate(template, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
            defaults=defaults or SamplingDefaults(),
            secret=bytes(32),
            seeds=Random(0),
            threads=threads,
            model_name="tiny",
            created_s=1700000000,
            max_body_bytes=max_body_bytes,
            ping_interval_s=ping_interval_s,
            write_timeout_s=write_timeout_s,
            api=api or ApiConfig(),
            body_timeout_s=body_timeout_s,
            registry=registry,
        )
        app = build_app(service, deployment)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=WAIT_S
        )
        closers.extend([threads.shutdown, board.close, *[part.close for part in (*rings, *bells)]])
        return Harness(
            engine, client, pump, sender, streams, service, app, http, frontend_bell, engine_bell, rings
        )

    yield make
    for close in closers:
        close()


@pytest.fixture
def run_harness(make_harness: MakeHarness) -> Callable[..., Any]:
    """Builds and runs a harness as an async context; checks at the end that nothing is left in it."""

    @asynccontextmanager
    async def run(*, says_hello: bool = True, **options: Any) -> AsyncIterator[Harness]:
        harness = make_harness(**options)
        harness.engine.start()
        if says_hello:
            harness.engine.hello()
        harness.client.start()
        try:
            yield harness
            assert len(harness.streams) == 0, "a stream is left"
            assert harness.client.admission.waiting == 0, "a place in the queue is left"
        finally:
            await harness.http.aclose()
            harness.client.stop()
            harness.engine.stop()

    return run


@pytest.fixture
async def frontend(run_harness: Callable[..., Any]) -> AsyncIterator[Harness]:
    """A running frontend with a ready engine."""
    async with run_harness() as harness:
        yield harness
