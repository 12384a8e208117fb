"""A scripted OpenAI-compatible server for the command-line clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Records each request body and lets the script answer it."""

    server: ScriptedServer

    def do_GET(self) -> None:
        self.send_json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.answers.pop(0)(self)

    def send_json(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def send(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


class ScriptedServer(ThreadingHTTPServer):
    """Gives the `answers` in turn; `requests` are the paths and bodies that came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, Any]] = []
        # Set by an answer that noticed its client's departure.
        self.client_left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        pass


def event(body: Any) -> str:
    return f"data: {json.dumps(body)}\n\n"


def chat_answer(*pieces: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin_stream()
        handler.send(
            ": ping\n\n" + event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        )
        for piece in pieces:
            handler.send(event({"choices": [{"index": 0, "delta": {"content": piece}}]}))
        handler.send(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        handler.send(event({"choices": [], "usage": {"total_tokens": 3}}) + "data: [DONE]\n\n")

    return answer


def text_answer(*pieces: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin_stream()
        for piece in pieces:
            handler.send(event({"choices": [{"index": 0, "text": piece}]}))
        handler.send("data: [DONE]\n\n")

    return answer


def endless_answer(piece: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin_stream()
        handler.send(event({"choices": [{"index": 0, "delta": {"content": piece}}]}))
        handler.rfile.read(1)
        handler.server.client_left.set()

    return answer
