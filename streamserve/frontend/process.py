"""The frontend process: `python -m streamserve.frontend.process --bootstrap FD`.

It accepts connections before the model is there (streamserve.frontend.reception) and before the engine has
loaded it, and answers 503 until then. When told to stop (STOP_ORDER; SIGTERM or SIGINT where nobody blocked
them) it answers 503 to what is new, lets streams finish for the drain time, ends the rest with an error event
and exits with 0; the same signal again, or any before it serves, ends it at once. It never outlives the
supervisor (lifeline).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import uvloop

from streamserve.bootstrap import Bootstrap, ReadyPipe, ResolvedModel
from streamserve.config import Config
from streamserve.errors import ConfigError
from streamserve.frontend.api.app import build_app
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import EngineClient
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.metrics import Layout, Metrics, Row
from streamserve.frontend.pump import Pump
from streamserve.frontend.reception import Reception, build_reception
from streamserve.frontend.registry import Registry
from streamserve.frontend.sender import Sender
from streamserve.frontend.server import FrontendServer, build_server
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import ChatTemplate, special_tokens
from streamserve.frontend.text.tokenize import PromptTokenizer, read_json
from streamserve.frontend.tracing import Tracer
from streamserve.ipc.board import StatusBoard
from streamserve.ipc.door import Doors
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.notice import Notice
from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.ipc.segment import Segment
from streamserve.lifeline import watch_lifeline
from streamserve.logs import configure_logging

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2


def build_client(bootstrap: Bootstrap, config: Config, board: StatusBoard, metrics: Metrics) -> EngineClient:
    """The engine client on the inherited channel. Its segments stay mapped until the process ends."""
    (channel,) = bootstrap.channels
    own_bell = Doorbell.attach(channel.frontend_bell)
    writer = RingWriter(Segment.attach(channel.request_ring).view, Doorbell.attach(channel.engine_bell))
    reader = RingReader(Segment.attach(channel.delta_ring).view, Doorbell.attach(channel.engine_bell))
    sender, streams = Sender(writer), StreamTable()
    pump = Pump(reader, sender, board, own_bell, streams, incarnation=channel.incarnation, metrics=metrics)
    # Each frontend has its share of the places; connections spread over them evenly enough.
    admission = Admission(-(-config.server.max_waiting // config.server.api_workers))
    return EngineClient(pump, sender, streams, admission, config.supervisor.heartbeat_timeout)


def build_service(
    bootstrap: Bootstrap, config: Config, model: ResolvedModel, client: EngineClient, registry: Registry
) -> Service:
    """The model's text side, read from its folder.

    Raises:
        ConfigError: a file of the model is missing or cannot be used.
    """
    folder = model.path
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    bos_token = special_tokens(tokenizer_config).get("bos_token")
    tokenizer = PromptTokenizer.load(folder, bos_token)
    seed = config.model.seed
    return Service(
        client=client,
        tokenizer=tokenizer,
        detokenizers=Detokenizers(tokenizer.tokenizer),
        template=ChatTemplate.load(folder, tokenizer_config, config.api.chat_template),
        defaults=SamplingDefaults.of(read_json(folder / "generation_config.json")),
        secret=bytes.fromhex(bootstrap.secret),
        # Each frontend draws another sequence, the same one at every start with the same seed.
        seeds=Random(secrets.token_bytes(16) if seed is None else f"{seed}/{bootstrap.index}"),
        threads=ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize"),
        model_name=model.name,
        created_s=int(time.time()),
        max_body_bytes=config.server.max_body_bytes,
        ping_interval_s=config.server.sse_ping_interval,
        write_timeout_s=config.api.stream_write_timeout,
        body_timeout_s=config.server.body_timeout,
        api=config.api,
        registry=registry,
    )


def build_deployment(
    bootstrap: Bootstrap, config: Config, board: StatusBoard, rows: memoryview
) -> Deployment:
    """What the supervisor has put around this frontend. Its segments stay mapped until the process ends.

    Raises:
        ConfigError: traces are wanted, and the packages for it are not installed.
    """
    endpoint = config.server.otlp_traces_endpoint
    return Deployment(
        server=config.server,
        auth=config.auth,
        keys=KeyRing.of(config.auth),
        board=board,
        progress=Notice.attach(bootstrap.progress),
        rows=rows,
        index=bootstrap.index,
        tracer=None if endpoint is None else Tracer.to(endpoint),
        doors=_doors(bootstrap),
        supervisor=os.getppid(),
    )


def _doors(bootstrap: Bootstrap) -> Doors | None:
    if bootstrap.door < 0:
        return None
    outsides = [socket.socket(fileno=number) for number in bootstrap.outsides]
    return Doors(socket.socket(fileno=bootstrap.door), outsides)


def build_registry(deployment: Deployment, rows: memoryview) -> Registry:
    """The register of live answers, which counts into this frontend's row of `rows`."""
    layout = Layout(deployment.keys.names)
    start = layout.row_bytes * deployment.index
    row = Row(layout, rows[start : start + layout.row_bytes])
    row.take_over(os.getpid())
    return Registry(Metrics(row))


async def model_of(notice: Notice, bell: Doorbell) -> ResolvedModel:
    """The model in `notice`, as soon as it is known; `bell` is rung then."""
    loop, rung = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        bell.clear()
        rung.set()

    loop.add_reader(bell.fileno(), hear)
    try:
        while (model := ResolvedModel.read(notice)) is None:
            await rung.wait()
            rung.clear()
        return model
    finally:
        loop.remove_reader(bell.fileno())


async def serve(bootstrap: Bootstrap, ready: ReadyPipe) -> None:
    """Runs the frontend to its end.

    Raises:
        ConfigError: the model's files cannot be used.
    """
    config = bootstrap.settings()
    listen = socket.socket(fileno=bootstrap.listen)
    notice = Notice.attach(bootstrap.model)
    board = StatusBoard.attach(bootstrap.board)
    rows = Segment.attach(bootstrap.metrics).view
    deployment = build_deployment(bootstrap, config, board, rows)
    registry = build_registry(deployment, rows)
    reception = Reception(build_reception(deployment, registry.metrics), config)
    model = ResolvedModel.read(notice)
    if model is None:
        await reception.open(listen)
        model = await model_of(notice, Doorbell.attach(bootstrap.channels[0].frontend_bell))

    def take_over() -> None:
        reception.close()
        ready.ready({"pid": os.getpid()})

    def build(model: ResolvedModel) -> FrontendServer:
        client = build_client(bootstrap, config, board, registry.metrics)
        service = build_service(bootstrap, config, model, client, registry)
        return build_server(build_app(service, deployment), service, config, take_over)

    # A large vocabulary takes a second to read; in a thread, the reception goes on meanwhile.
    server = await asyncio.to_thread(build, model)
    # What lives now lives for good: keep it out of every later garbage collection.
    gc.collect()
    gc.freeze()
    await server.serve(sockets=[listen])


def main() -> int:
    """Entry point of the process; returns its exit code."""
    bootstrap = Bootstrap.from_argv()
    watch_lifeline(bootstrap.lifeline)
    server = bootstrap.settings().server
    configure_logging(f"frontend {bootstrap.index}", server.log_level, server.log_format)
    # Starts, stops and malformed requests are no news to the operator.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    ready = ReadyPipe(bootstrap.ready)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(bootstrap, ready))
    except ConfigError as error:
        ready.failed(_one_line(error))
        return 2
    except Exception as error:
        logger.exception("the frontend failed")
        ready.failed(f"the frontend failed: {_one_line(error)}")
        return 1
    return 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


if __name__ == "__main__":
    sys.exit(main())
