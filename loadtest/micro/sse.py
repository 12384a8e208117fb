"""How many tokens a second one frontend process turns into SSE events.

`python -m loadtest.micro.sse`

The whole path of a token through a frontend: step frame in the ring → pump → mailbox → detokeniser → chunk →
response → HTTP chunk, into a transport that only counts. The engine is a loop that sends the next step when
every stream has written out the last one, so no two tokens are ever merged into one event. Three ways from
the mailbox to the transport are measured in turns, and the medians of their ratios printed:

    streamserve   the application
    pydantic      a plain Starlette application: for each chunk a model of OpenAI's own package, which are
                  pydantic's, in a StreamingResponse
    prebuilt      no HTTP at all: each stream writes the same bytes to its transport at every token
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from random import Random
from typing import Any

import numpy as np
import orjson
import uvicorn
import uvloop
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from uvicorn.server import ServerState

from streamserve.config import ServerConfig
from streamserve.frontend.api.app import build_app
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import EngineClient, Generation
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.protocol import HeadLimits, LimitedHttpProtocol
from streamserve.frontend.pump import Pump
from streamserve.frontend.sender import Sender
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import CHATML, ChatTemplate
from streamserve.frontend.text.tokenize import PromptTokenizer
from streamserve.ipc.board import EngineState, StatusBoard
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter, format_ring, ring_bytes
from streamserve.ipc.segment import Segment
from streamserve.messages import Finish, Kind, StepTokens, decode_add, encode_json, encode_step
from streamserve.sampling import SamplingParams

NUM_STREAMS = 64
NUM_STEPS = 200
NUM_ROUNDS = 25
LEAST_GAIN, MOST_COST = 4.0, 1.5
RING_CAPACITY = 1 << 20
TEXT = "the quick brown fox jumps over the lazy dog, and then some more words of no great meaning"
EPOCH = 1
PATH = "/v1/chat/completions"
BODY = orjson.dumps(
    {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 1 << 19}
)
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"bench","choices":[{"index":0,"delta":{"content":" fox"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


class NullTransport(asyncio.Transport):
    """Counts what would go to the network."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.num_bytes = 0

    def write(self, data: Any) -> None:
        """Hot: once an event."""
        self.num_writes += 1
        self.num_bytes += len(data)

    def is_closing(self) -> bool:
        """It never is."""
        return False

    def close(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""

    def pause_reading(self) -> None:
        """Nothing comes."""

    def resume_reading(self) -> None:
        """Nothing comes."""


def pydantic_app(service: Service) -> Starlette:
    """What one would write first."""

    async def chat(http: Request) -> StreamingResponse:
        await http.json()
        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def chunks() -> AsyncIterator[str]:
        detokenizer = service.detokenizers.start()
        async with aclosing(service.client.generate(_generation())) as deltas:
            async for delta in deltas:
                content = ChoiceDelta(content=detokenizer.decode(delta.tokens))
                choice = Choice(index=0, delta=content, logprobs=None, finish_reason=None)
                chunk = ChatCompletionChunk(
                    id="chatcmpl-0123456789abcdef0123456789abcdef",
                    object="chat.completion.chunk",
                    created=1700000000,
                    model="bench",
                    choices=[choice],
                )
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"

    return Starlette(routes=[Route(PATH, chat, methods=["POST"])])


def _generation() -> Generation:
    return Generation(np.zeros(8, np.int32), SamplingParams(1 << 19))


class Bench:
    """A frontend and the engine's ends of its rings, in one process."""

    def __init__(self) -> None:
        tokenizer = _make_tokenizer()
        self._words = tokenizer.encode(TEXT).ids
        segments = [Segment.create("bench", ring_bytes(RING_CAPACITY)) for _ in range(2)]
        for segment in segments:
            format_ring(segment.view, RING_CAPACITY)
        requests, deltas = (segment.view for segment in segments)
        frontend_bell, engine_bell = Doorbell.create(), Doorbell.create()
        board = StatusBoard.create()
        board.publish(EPOCH, EngineState.READY)
        self._requests = RingReader(requests, frontend_bell)
        self._deltas = RingWriter(deltas, frontend_bell)
        sender, self._streams = Sender(RingWriter(requests, engine_bell)), StreamTable()
        pump = Pump(RingReader(deltas, engine_bell), sender, board, frontend_bell, self._streams)
        self.client = EngineClient(pump, sender, self._streams, Admission(1024), 30.0)
        self.service = Service(
            client=self.client,
            tokenizer=PromptTokenizer(tokenizer),
            detokenizers=Detokenizers(tokenizer),
            template=ChatTemplate(CHATML, {}),
            defaults=SamplingDefaults(),
            secret=bytes(32),
            seeds=Random(0),
            threads=ThreadPoolExecutor(1),
            model_name="bench",
            created_s=0,
            max_body_bytes=1 << 20,
            ping_interval_s=15.0,
        )

    def hello(self) -> None:
        """Says what an engine says when it is ready."""
        facts = {
            "epoch": EPOCH,
            "pid": os.getpid(),
            "incarnation": 0,
            "model": "bench",
            "max_model_len": 1 << 20,
            "vocab_size": 400,
            "block_size": 16,
            "num_blocks": 1 << 20,
            "kv_capacity_tokens": 1 << 24,
            "max_num_seqs": NUM_STREAMS,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "eos_token_ids": [0],
        }
        assert self._deltas.try_push(Kind.HELLO, encode_json(EPOCH, facts))

    async def receive_adds(self) -> np.ndarray[Any, Any]:
        """The stream numbers of all requests, once they are here."""
        streams: list[int] = []
        while len(streams) < NUM_STREAMS:
            await asyncio.sleep(0)
            for kind, payload in self._requests.read():
                if kind == Kind.ADD:
                    streams.append(decode_add(payload).stream)
            self._requests.release()
        return np.array(streams, dtype="<u8")

    def send_step(self, streams: np.ndarray[Any, Any], step: int, finish: Finish = Finish.NONE) -> None:
        """One token for each stream."""
        token = self._words[step % len(self._words)]
        finishes = np.full(len(streams), finish, "u1") if finish else None
        out = StepTokens(step, streams, np.full(len(streams), token, "<i4"), finish=finishes)
        assert self._deltas.try_push(Kind.STEP, encode_step(EPOCH, out))

    async def events(self, app: Any, header: str = "") -> float:
        """Tokens a second, as SSE chat streams of `app` through uvicorn's HTTP protocol.

        Args:
            app: the application.
            header: one more line in the head of each request.
        """
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        settings.load()
        state, limits = ServerState(), HeadLimits.of(ServerConfig())
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n{header}\r\n".encode()
        )
        transports = []
        for _ in range(NUM_STREAMS):
            protocol = LimitedHttpProtocol(config=settings, server_state=state, app_state={}, limits=limits)
            transports.append(NullTransport())
            protocol.connection_made(transports[-1])
            protocol.data_received(head + BODY)
        rate = await self._run(lambda: sum(transport.num_writes for transport in transports))
        await _until(lambda: not state.tasks)
        return rate

    async def prebuilt(self) -> float:
        """Tokens a second, each written as the same bytes by the task that takes it from its mailbox."""
        transports = [NullTransport() for _ in range(NUM_STREAMS)]
        event = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)

        async def write(transport: NullTransport) -> None:
            async with aclosing(self.client.generate(_generation())) as deltas:
                async for _ in deltas:
                    transport.write(event)

        async with asyncio.TaskGroup() as group:
            for transport in transports:
                group.create_task(write(transport))
            return await self._run(lambda: sum(transport.num_writes for transport in transports))

    async def _run(self, count: Callable[[], int]) -> float:
        """Steps in lock-step with the consumers; `count` grows by one for each token that is through."""
        streams = await self.receive_adds()
        # The first step also makes headers and role chunks.
        self.send_step(streams, 0)
        await _until(lambda: count() >= NUM_STREAMS and not self.client.admission.waiting)
        await asyncio.sleep(0.01)
        start_count = count()
        begin = time.perf_counter()
        for step in range(1, NUM_STEPS + 1):
            self.send_step(streams, step)
            goal = start_count + step * NUM_STREAMS
            while count() < goal:  # noqa: ASYNC110  (polled on purpose: nothing else is to be measured)
                await asyncio.sleep(0)
        seconds = time.perf_counter() - begin
        self.send_step(streams, 0, Finish.LENGTH)
        await _until(lambda: not self._streams)
        return NUM_STEPS * NUM_STREAMS / seconds


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  (as above)
        await asyncio.sleep(0)


def _make_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


async def _measure() -> bool:
    """Prints rates and ratios; returns whether both are as they should be."""
    bench = Bench()
    bench.client.start()
    bench.hello()
    await _until(lambda: bench.client.is_healthy)
    ours, plain = build_app(bench.service), pydantic_app(bench.service)
    ways: dict[str, Callable[[], Awaitable[float]]] = {
        "streamserve": lambda: bench.events(ours),
        "pydantic": lambda: bench.events(plain),
        "prebuilt": bench.prebuilt,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_ROUNDS):
        for name, run in ways.items():
            gc.collect()
            rates[name].append(await run())
    bench.client.stop()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"{machine}, {NUM_STREAMS} streams, {NUM_ROUNDS} rounds")
    for name, measured in rates.items():
        median = statistics.median(measured)
        print(
            f"{name:>12}: {median:9,.0f} tokens/s (from {min(measured):,.0f} to {max(measured):,.0f}), "
            f"{1e6 / median:.1f} µs each"
        )
    faster = _ratio(rates["streamserve"], rates["pydantic"])
    slower = _ratio(rates["prebuilt"], rates["streamserve"])
    print(f"{faster:.2f} times the rate of pydantic, {slower:.2f} times the time of prebuilt")
    passed = faster >= LEAST_GAIN and slower <= MOST_COST
    print("PASS" if passed else "FAIL", f"(bars: at least {LEAST_GAIN:g}, at most {MOST_COST:g})")
    return passed


def _ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of what was measured one right after the other."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def main() -> int:
    """Measures and reports; exit code 1 where a bar is not met."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 0 if runner.run(_measure()) else 1


if __name__ == "__main__":
    sys.exit(main())
