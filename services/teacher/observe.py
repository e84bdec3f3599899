"""What is seen of a request from outside: its span, and in the answer's headers what it cost.

The gateway reads the headers, so that it need not decode bodies to know the time that its replicas' engines take.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.tracing import Tracer

_HEADERS = {
    "tokens": "x-tokens",
    "cached_tokens": "x-cached-tokens",
    "queue_ms": "x-queue-ms",
    "engine_ms": "x-engine-ms",
}
_PATHS = ("/logprobs", "/generate")

_usage: ContextVar[dict[str, Any] | None] = ContextVar("usage", default=None)


def note_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Remember what the request that is being answered has cost; returns it as it is."""
    noted = _usage.get()
    if noted is not None:
        noted.update(usage)
    return usage


class Observed:
    """ASGI middleware: a span around every request for work, and `x-…` headers with its usage in the answer."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        usage: dict[str, Any] = {}
        token = _usage.set(usage)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracer.span(f"{scope['method']} {scope['path']}", "server", parent=headers) as span:
            span.set(request_id=scope["state"]["request_id"])

            async def send_with_usage(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", []), *_as_headers(usage)]
                    span.set(status=message["status"], **{name: usage.get(name) for name in _HEADERS})
                    if message["status"] >= 500:
                        span.fail(f"status {message['status']}")
                await send(message)

            try:
                await self._app(scope, receive, send_with_usage)
            finally:
                _usage.reset(token)


def _as_headers(usage: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), str(usage[key]).encode()) for key, name in _HEADERS.items() if key in usage]
