"""The tracer behind `shared.tracing`, on the OpenTelemetry SDK. Imported only where a collector is configured."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.tracing import Kind, Span, Tracer, Value

CLOSE_S = 2.0
"""Longest time that the end of a process waits for a collector."""

_KINDS = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}
_PROPAGATOR = TraceContextTextMapPropagator()


class _OtelSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: Value | None) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(f"opd.{name}", value)

    def fail(self, reason: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, reason[:200])

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier


class OtelTracer(Tracer):
    """Spans of this process, sent in batches by a thread of their own; a collector that is away costs them alone."""

    def __init__(self, service: str, resource: Mapping[str, str]) -> None:
        # the environment's own attributes (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) come last and win
        named = Resource({"service.name": service, **{f"opd.{name}": value for name, value in resource.items()}})
        self._provider = TracerProvider(
            resource=Resource.create().merge(named).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("opd")

    @contextmanager
    def span(self, name: str, kind: Kind, parent: Mapping[str, str] | None = None) -> Iterator[Span]:
        context = None if parent is None else _PROPAGATOR.extract(parent)
        with self._tracer.start_as_current_span(name, context=context, kind=_KINDS[kind]) as span:
            yield _OtelSpan(span)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
