"""A trace span for each exchange, for whoever collects them over OTLP. Needs the extra `otel`.

A caller's `traceparent` is taken up, so that the span hangs below the caller's own. Nothing of what was said
is in it.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from streamserve import __version__
from streamserve.errors import ConfigError


class Tracer:
    """Makes the spans of one frontend.

    Args:
        processor: an OpenTelemetry SpanProcessor, where finished spans go.
    """

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "streamserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("streamserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """A tracer whose spans go to a collector, in batches and from a thread of their own.

        Args:
            endpoint: URL of the collector's OTLP/HTTP traces, such as http://127.0.0.1:4318/v1/traces.

        Raises:
            ConfigError: the packages for it are not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "--otlp-traces-endpoint: OpenTelemetry is not installed: pip install 'streamserve[otel]'."
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def begin(self, scope: Scope) -> Any:
        """The span of an exchange that begins."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        return self._tracer.start_span(
            scope.get("method", "WS"), self._propagator.extract(carrier), self._server_kind
        )

    def end(self, span: Any, scope: Scope, template: str, status: int, attributes: dict[str, str]) -> None:
        """The exchange is over.

        Args:
            span: from `begin`.
            scope: of the exchange.
            template: the route that answered.
            status: of the answer.
            attributes: what else there is to say.
        """
        method = scope.get("method", "WS")
        span.update_name(f"{method} {template}")
        span.set_attributes(
            {
                "http.request.method": method,
                "http.route": template,
                "http.response.status_code": status,
                **attributes,
            }
        )
        if status >= 500:
            span.set_status(self._failed)
        span.end()

    def close(self) -> None:
        """Sends what is still there."""
        self._provider.shutdown()
