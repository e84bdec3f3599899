"""Spans of requests, sent to an OpenTelemetry collector where one is configured; otherwise nothing is imported or done.

The standard environment variables say where: OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
(OTLP over HTTP, protobuf), and all others that the SDK knows. Traces cross processes in W3C's `traceparent`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from shared.errors import ConfigError

Kind = Literal["server", "client"]
Value = str | int | float | bool

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """One piece of work. This one is of no trace: it keeps nothing."""

    def set(self, **attributes: Value | None) -> None:
        """Add attributes, named `opd.NAME` in the trace; None is left out."""

    def fail(self, reason: str) -> None:
        """Mark the work as failed."""

    def headers(self) -> dict[str, str]:
        """What a request made in the course of this work carries."""
        return {}


class Tracer:
    """Makes spans. This one is off: traces of others pass through it unchanged."""

    @contextmanager
    def span(self, name: str, kind: Kind, parent: Mapping[str, str] | None = None) -> Iterator[Span]:
        """A span for as long as the block runs.

        Args:
            parent: headers of the request that this work answers; without it the span around this one is the parent.
        """
        yield Span()

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The trace of a request that is passed on, where it has a well-formed one."""
    text = headers.get("traceparent", "")
    return {"traceparent": text} if _TRACEPARENT.fullmatch(text) else {}


def configure(service: str, **resource: str) -> Tracer:
    """The tracer of this process.

    Args:
        service: its name in traces, unless OTEL_SERVICE_NAME gives another.
        resource: further attributes of the process.

    Raises:
        ConfigError: a collector is configured, and the packages to reach it are missing or speak another protocol.
    """
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    named = [name for name in endpoints if os.environ.get(name)]
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Tracer()
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(name, "http/protobuf") != "http/protobuf":
            raise ConfigError(f"{name}={os.environ[name]}: traces are sent as http/protobuf only (port 4318 as a rule)")
    try:
        from shared.otel import OtelTracer
    except ImportError as error:
        raise ConfigError(
            f"{named[0]} is set, but {error.name} is not installed: pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http (the extra `otel` of {service}), or unset it"
        ) from error
    return OtelTracer(service, resource)
