"""Users that chat, over server-sent events and over WebSockets."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import gevent
import orjson
from gevent.lock import RLock
from gevent.pool import Pool
from locust import User, task

from loadtest.load.answers import Answer
from loadtest.load.arrivals import Arrivals, PoissonArrivals, ThinkTime
from loadtest.load.mixes import Question
from loadtest.load.recorder import Recorder
from loadtest.load.session import Session, headers_of
from loadtest.load.sse import SseClient, StreamFailed
from loadtest.load.websocket import WebSocketClient
from streamserve.bench.http import Address

# After a failure that says nothing of when to come back.
_BACK_OFF_S = 1.0


class ChatUser(User):
    """Asks, one thing after the other or at times that do not depend on the answers.

    Attributes:
        transport: its name in locust's tables.
        path: of the endpoint.
        session: what all users share.
    """

    abstract = True
    transport: ClassVar[str]
    path: ClassVar[str]
    session: ClassVar[Session]

    def on_start(self) -> None:
        """Waits for its own first moment if the loop is open, so that users do not all begin at once."""
        settings = self.session.settings
        self._rng = self.session.rng()
        self._recorder = Recorder(self.environment, self.transport)
        self._address = Address.of(self.environment.host or "", self.path)
        self._headers = headers_of(settings)
        self._open = Pool(settings.max_open)
        self._back_off_s = 0.0
        self._arrivals: Arrivals = ThinkTime(settings.think_time_s, self._rng)
        if settings.is_open_loop:
            self._arrivals = PoissonArrivals(settings.request_rate, self._rng)
            gevent.sleep(self._arrivals.pause(time.monotonic()))

    def on_stop(self) -> None:
        """Drops what is under way."""
        self._open.kill()
        self.close()

    def wait_time(self) -> float:
        """Seconds until the next request; in a closed loop a user who was refused comes back when told to."""
        pause_s = self._arrivals.pause(time.monotonic())
        return pause_s if self.session.settings.is_open_loop else max(pause_s, self._back_off_s)

    @task
    def chat(self) -> None:
        """The next request."""
        late_s = self._arrivals.lateness(time.monotonic())
        question = self.session.mix.draw(self._rng)
        if not self.session.settings.is_open_loop:
            self._ask(question, late_s)
        elif self._open.free_count():
            self._open.spawn(self._ask, question, late_s)
        else:
            problem = StreamFailed(f"{self._open.size} requests of this user are open (--max-open)")
            self._recorder.request(question.kind, 0.0, 0, problem)

    def _ask(self, question: Question, late_s: float) -> None:
        body = question.body(self.session.model, self.session.settings.stops_at_eos)
        # From when it was due: a client that is behind must not make the server look faster than its users
        # would find it.
        sent = time.perf_counter() - late_s
        problem: Exception | None = None
        num_bytes = 0
        try:
            num_bytes = self.stream(body, Answer(sent, self._recorder))
        except StreamFailed as error:
            problem = error
            self._back_off_s = _BACK_OFF_S if error.retry_after_s is None else error.retry_after_s
        else:
            self._back_off_s = 0.0
        self._recorder.request(question.kind, (time.perf_counter() - sent) * 1000.0, num_bytes, problem)

    def stream(self, body: dict[str, Any], answer: Answer) -> int:
        """Sends a request, reads its answer, and returns how many bytes that had.

        Raises:
            StreamFailed: there is no whole answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Closes its connections."""


class SseUser(ChatUser):
    """Chats over server-sent events; a connection for each request that is open."""

    transport = "SSE"
    path = "/v1/chat/completions"

    def on_start(self) -> None:
        self._idle: list[SseClient] = []
        super().on_start()

    def stream(self, body: dict[str, Any], answer: Answer) -> int:
        timeout_s = self.session.settings.timeout_s
        client = self._idle.pop() if self._idle else SseClient(self._address, self._headers, timeout_s)
        try:
            return client.ask(orjson.dumps(body), answer)
        finally:
            # After a failure too: a refusal leaves the connection open, and else it has none.
            self._idle.append(client)

    def close(self) -> None:
        for client in self._idle:
            client.close()


class WebSocketUser(ChatUser):
    """Chats over one WebSocket, however many requests are open."""

    transport = "WS"
    path = "/v1/ws"

    def on_start(self) -> None:
        self._client: WebSocketClient | None = None
        self._connecting = RLock()
        super().on_start()

    def stream(self, body: dict[str, Any], answer: Answer) -> int:
        # Requests of an open loop come while others wait for the connection.
        with self._connecting:
            if self._client is None or not self._client.is_open:
                self._client = WebSocketClient(self._address, self._headers, self.session.settings.timeout_s)
        return self._client.ask(body, answer)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
