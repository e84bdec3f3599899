"""HTTP to one replica: send bytes, read a bounded answer, ask how it is.

An answer is read in full before the client sees its first byte: a replica that dies midway can then be replaced by
another without the client noticing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from services.gateway.transport import ReplicaTransport
from shared.tracing import Tracer

PATHS = ("/logprobs", "/generate")
"""Endpoints of a replica to which requests are passed on."""

MAX_ANSWER_BYTES = 256 * 2**20
CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 5.0

_MAX_PROBE_BYTES = 2**20
_MAX_COMPLAINT_BYTES = 2**16


class AttemptError(Exception):
    """No usable answer came back.

    Attributes:
        is_timeout: the time given to the attempt ran out.
    """

    def __init__(self, reason: str, *, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_timeout = is_timeout


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer of a replica, body untouched."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def complaint(self) -> str:
        """What a body that is no scores says: the detail of a problem, the reason of /readyz, else its beginning."""
        try:
            fields = json.loads(self.body[:_MAX_COMPLAINT_BYTES])
            return str(fields.get("detail") or fields["reason"])[:300]
        except (ValueError, RecursionError, AttributeError, LookupError):
            return self.body[:200].decode(errors="replace")


class ReplicaClient:
    """Connections to one replica. Its address comes from the configuration alone: nothing of a request changes it.

    Args:
        url: scheme, host and port.
        key: the key that this gateway shows to the replica, or None.
        tracer: makes a span of every attempt; None switches traces off.
    """

    def __init__(self, url: str, key: str | None, tracer: Tracer | None = None) -> None:
        base = httpx.URL(url)
        self._name = base.netloc.decode()
        self._tracer = tracer or Tracer()
        self._urls = {path: base.copy_with(path=path) for path in (*PATHS, "/readyz", "/info")}
        self._headers = {"accept-encoding": "identity"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        # without a client around it: no redirects, cookies or proxies
        self._transport = ReplicaTransport(base)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        """POST to one of `PATHS`, answered in full within `timeout_s`.

        Raises:
            AttemptError: no connection, no complete answer in time, or one that is not a teacher's.
            AnswerTooLarge: over MAX_ANSWER_BYTES; another replica would say the same.
        """
        with self._tracer.span(f"attempt {path}", "client") as span:
            span.set(replica=self._name)
            answer = await self._exchange(
                "POST", path, {**headers, **span.headers()}, body, timeout_s, MAX_ANSWER_BYTES
            )
            span.set(status=answer.status)
            if answer.status == 200:
                _check_map(answer)
            elif not 400 <= answer.status < 600:
                raise AttemptError(f"it answered with HTTP status {answer.status}")
        return answer

    async def is_ready(self) -> tuple[bool, str]:
        """GET /readyz: (ready, what it says). Raises AttemptError when it does not answer."""
        answer = await self._get("/readyz")
        return answer.status == 200, f"/readyz says {answer.status}: {answer.complaint}"

    async def info(self) -> dict[str, Any]:
        """GET /info. Raises AttemptError when it is not a map with a fingerprint."""
        answer = await self._get("/info")
        if answer.status != 200:
            raise AttemptError(f"/info says {answer.status}: {answer.complaint}")
        try:
            info = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise AttemptError("/info is not JSON") from error
        if not isinstance(info, dict) or not isinstance(info.get("fingerprint"), str):
            raise AttemptError("/info has no fingerprint")
        return info

    async def _get(self, path: str) -> Answer:
        return await self._exchange("GET", path, {}, None, PROBE_TIMEOUT_S, _MAX_PROBE_BYTES)

    async def _exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout_s: float, max_bytes: int
    ) -> Answer:
        request = httpx.Request(
            method,
            self._urls[path],
            headers={**headers, **self._headers},
            content=body,
            extensions={
                "timeout": {"connect": min(CONNECT_TIMEOUT_S, timeout_s), "read": timeout_s},
                "max_bytes": max_bytes,
            },
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.TimeoutException as error:
            raise AttemptError(str(error), is_timeout=True) from error
        except httpx.HTTPError as error:
            raise AttemptError(f"{type(error).__name__}: {error}") from error
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers.raw}
        return Answer(response.status_code, headers, b"".join([chunk async for chunk in response.stream]))


def _check_map(answer: Answer) -> None:
    """AttemptError for what is no map in the codec it claims: an error page, a truncated proxy answer, noise."""
    media_type = answer.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    first = answer.body[:1]
    if media_type == "application/json":
        is_map = first == b"{"
    elif media_type in ("application/msgpack", "application/x-msgpack"):
        is_map = bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))
    else:
        raise AttemptError(f"it answered 200 with content-type {media_type[:60]!r}")
    if not is_map:
        raise AttemptError(f"it answered 200 with a body that is no {media_type} map")
