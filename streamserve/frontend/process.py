"""The frontend process: `python -m streamserve.frontend.process --bootstrap FD`.

It accepts connections before the engine has loaded and answers 503 until then. When told to stop (STOP_ORDER;
SIGTERM or SIGINT where nobody blocked them) it accepts nothing new, lets streams finish for the drain time,
ends the rest with an error event and exits with 0; the same signal again ends it at once. It never outlives
the supervisor (lifeline).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import uvicorn
import uvloop
from starlette.applications import Starlette

from streamserve.bootstrap import STOP_ORDER, Bootstrap, ReadyPipe
from streamserve.config import Config
from streamserve.errors import ConfigError
from streamserve.frontend.api.app import build_app
from streamserve.frontend.api.parameters import SamplingDefaults
from streamserve.frontend.api.service import Service
from streamserve.frontend.client import EngineClient
from streamserve.frontend.limits import Admission
from streamserve.frontend.mailbox import StreamTable
from streamserve.frontend.protocol import LimitedHttpProtocol
from streamserve.frontend.pump import Pump
from streamserve.frontend.sender import Sender
from streamserve.frontend.text.detokenize import Detokenizers
from streamserve.frontend.text.template import ChatTemplate, special_tokens
from streamserve.frontend.text.tokenize import PromptTokenizer, read_json
from streamserve.ipc.board import StatusBoard
from streamserve.ipc.doorbell import Doorbell
from streamserve.ipc.ring import RingReader, RingWriter
from streamserve.ipc.segment import Segment
from streamserve.lifeline import watch_lifeline
from streamserve.logs import configure_logging

logger = logging.getLogger(__name__)

STOP_SIGNALS = (STOP_ORDER, signal.SIGTERM, signal.SIGINT)
KEEP_ALIVE_S = 75
TOKENIZER_THREADS = 2
# After the drain time streams end by themselves with an error event; what is stuck even then is cancelled.
CANCEL_AFTER_S = 3


class FrontendServer(uvicorn.Server):
    """uvicorn with this server's idea of stopping.

    Args:
        config: uvicorn's.
        client: its streams are drained.
        drain_timeout_s: how long they may take.
        on_started: called when connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        client: EngineClient,
        drain_timeout_s: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._client = client
        self._drain_timeout_s = drain_timeout_s
        self._on_started = on_started
        self._received: set[int] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept, and says so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals to stop while it serves; unlike the base class, does not raise them again."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        if number in self._received:
            os._exit(128 + number)
        self._received.add(number)
        if self.should_exit:
            return
        logger.info(
            "stopping: %d streams may take %g s to finish", self._client.num_live, self._drain_timeout_s
        )
        self._client.drain()
        self.should_exit = True
        asyncio.get_running_loop().call_later(
            self._drain_timeout_s, self._client.fail_all, "The server is shutting down."
        )


def build_client(bootstrap: Bootstrap, config: Config) -> EngineClient:
    """The engine client on the inherited channel. Its segments stay mapped until the process ends."""
    (channel,) = bootstrap.channels
    own_bell = Doorbell.attach(channel.frontend_bell)
    writer = RingWriter(Segment.attach(channel.request_ring).view, Doorbell.attach(channel.engine_bell))
    reader = RingReader(Segment.attach(channel.delta_ring).view, Doorbell.attach(channel.engine_bell))
    sender, streams = Sender(writer), StreamTable()
    pump = Pump(reader, sender, StatusBoard.attach(bootstrap.board), own_bell, streams)
    admission = Admission(config.server.max_waiting)
    return EngineClient(pump, sender, streams, admission, config.supervisor.heartbeat_timeout)


def build_service(bootstrap: Bootstrap, config: Config, client: EngineClient) -> Service:
    """The model's text side, read from its folder.

    Raises:
        ConfigError: a file of the model is missing or cannot be used.
    """
    folder = Path(bootstrap.model_path)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    bos_token = special_tokens(tokenizer_config).get("bos_token")
    tokenizer = PromptTokenizer.load(folder, bos_token)
    seed = config.model.seed
    return Service(
        client=client,
        tokenizer=tokenizer,
        detokenizers=Detokenizers(tokenizer.tokenizer),
        template=ChatTemplate.load(folder, tokenizer_config),
        defaults=SamplingDefaults.of(read_json(folder / "generation_config.json")),
        secret=bytes.fromhex(bootstrap.secret),
        # Each frontend draws another sequence, the same one at every start with the same seed.
        seeds=Random(secrets.token_bytes(16) if seed is None else f"{seed}/{bootstrap.index}"),
        threads=ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize"),
        model_name=bootstrap.model_name,
        created_s=int(time.time()),
        max_body_bytes=config.server.max_body_bytes,
        ping_interval_s=config.server.sse_ping_interval,
    )


def build_server(
    app: Starlette, client: EngineClient, drain_timeout_s: float, on_started: Callable[[], None]
) -> FrontendServer:
    """The HTTP server, to be run with `serve(sockets=[…])`."""
    settings = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        loop="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_timeout_s) + CANCEL_AFTER_S,
    )
    return FrontendServer(settings, client, drain_timeout_s, on_started)


def serve(bootstrap: Bootstrap, ready: ReadyPipe) -> None:
    """Runs the frontend to its end.

    Raises:
        ConfigError: the model's files cannot be used.
    """
    config = bootstrap.settings()
    listen = socket.socket(fileno=bootstrap.listen)
    client = build_client(bootstrap, config)
    app = build_app(build_service(bootstrap, config, client))
    facts = {"pid": os.getpid()}
    server = build_server(app, client, config.supervisor.drain_timeout, lambda: ready.ready(facts))
    # What lives now lives for good: keep it out of every later garbage collection.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listen]))


def main() -> int:
    """Entry point of the process; returns its exit code."""
    bootstrap = Bootstrap.from_argv()
    watch_lifeline(bootstrap.lifeline)
    configure_logging(f"frontend {bootstrap.index}", bootstrap.settings().server.log_level)
    # Starts, stops and malformed requests are no news to the operator.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    ready = ReadyPipe(bootstrap.ready)
    try:
        serve(bootstrap, ready)
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
