"""Spans of exchanges, for those who collect them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from streamserve.errors import ConfigError
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.keys import KeyRing
from streamserve.frontend.tracing import Tracer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def frontend(run_harness: Any, exporter: InMemorySpanExporter) -> Any:
    around = Deployment(keys=KeyRing(["alice:sk-alice"]), tracer=Tracer(SimpleSpanProcessor(exporter)))
    async with run_harness(deployment=around) as frontend:
        yield frontend


async def test_a_request_is_a_span_below_that_of_its_caller(frontend: Any, exporter: Any) -> None:
    headers = {"traceparent": PARENT, "Authorization": "Bearer sk-alice", "X-Request-Id": "mine"}
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    await frontend.http.post("/v1/completions?x=1", json=body, headers=headers)
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:032x}" in PARENT
    assert f"{span.parent.span_id:016x}" in PARENT
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "streamserve.request_id": "mine",
        "streamserve.key": "alice",
    }
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("parent", [b"", b"00-x", b"\xff\xfe", PARENT.encode() * 100])
async def test_a_parent_that_is_none_begins_a_trace(frontend: Any, exporter: Any, parent: bytes) -> None:
    await frontend.http.get("/nowhere", headers={b"traceparent": parent})
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.name == "GET none"
    assert span.attributes["http.response.status_code"] == 401


async def test_only_our_faults_are_errors(
    frontend: Any, exporter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any) -> None:
        raise RuntimeError("x")

    monkeypatch.setattr(type(frontend.service.registry), "all", broken)
    frontend.http._transport.raise_app_exceptions = False
    await frontend.http.get("/v1/streams", headers={"Authorization": "Bearer sk-alice"})
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_without_the_packages_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'streamserve\[otel\]'"):
        Tracer.to("http://127.0.0.1:4318/v1/traces")


def test_nothing_of_it_is_imported_unasked() -> None:
    code = (
        "import sys, streamserve.frontend.process\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
