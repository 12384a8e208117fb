"""The health check of the container image, run as the container engine runs it."""

from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

SCRIPT = Path(__file__).parents[2] / "deploy" / "container" / "healthcheck.py"


@contextmanager
def answering(status: int, context: ssl.SSLContext | None = None, body: bytes = b"") -> Iterator[int]:
    """The port of a server that gives /health `status` and `body`, and all else 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def check(**settings: str) -> int:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("STREAMSERVE_")}
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, env=environment | settings, timeout=120, check=False).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_health_decides(status: int, code: int) -> None:
    with answering(status) as port:
        # A proxy of the container's environment is for what lies outside of it.
        assert check(STREAMSERVE_PORT=str(port), http_proxy="http://127.0.0.1:1") == code


@pytest.mark.parametrize(
    ("body", "code"),
    [(b'{"status":"restarting"}', 0), (b'{"status":"dead"}', 1), (b'"restarting"', 1), (b"restarting", 1)],
)
def test_a_server_that_starts_its_engine_again_is_left_to_it(body: bytes, code: int) -> None:
    with answering(503, body=body) as port:
        assert check(STREAMSERVE_PORT=str(port)) == code


def test_nobody_is_there() -> None:
    with answering(200) as port:
        pass
    assert check(STREAMSERVE_PORT=str(port)) == 1


def test_https_whatever_the_certificate_names() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("llm.example.org").configure_cert(context)
    with answering(200, context) as port:
        assert check(STREAMSERVE_PORT=str(port), STREAMSERVE_SSL_CERTFILE="/certificate.pem") == 0
        assert check(STREAMSERVE_PORT=str(port)) == 1
