"""HTTP plumbing of the teacher: bounded bodies, keys, deadlines, request ids, problem answers."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import uuid
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import log
from shared.errors import Problem

REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-timeout-s"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_TIMEOUT_S = 3600.0

Result = TypeVar("Result")


def problem_response(problem: Problem) -> Response:
    """The answer for a problem."""
    body = json.dumps(problem.to_dict(), indent=2) + "\n"
    return Response(body, problem.status, problem.headers(), media_type=Problem.content_type)


def authorize(request: Request, key: str | None) -> None:
    """Problem 401 unless the request shows the key; no key means that authentication is off."""
    if key is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), key.encode()):
        raise Problem("opd:unauthorized", "send the key as `authorization: Bearer KEY`")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, refused with Problem 413 as soon as it is known to be too large."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem("opd:media-type", "compressed bodies are not served; send it without content-encoding")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise Problem("opd:too-large", f"the body has {declared[:20]} bytes, at most {max_bytes} are accepted")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Problem("opd:too-large", f"the body has more than {max_bytes} bytes")
    return bytes(body)


def timeout_s(request: Request) -> float | None:
    """Seconds that the client will wait, from its header; None without one."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise Problem("opd:malformed", f"{TIMEOUT_HEADER} must be a number of seconds up to {_MAX_TIMEOUT_S:g}")
    return value


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away, or the caller is.

    The body must have been read: the next message on the connection is then its end.

    Raises:
        ClientDisconnect: nobody waits for an answer any more.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait((working, gone))
        if not working.cancelled():
            working.exception()  # looked at, even when nobody waits for it any more


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestIds:
    """ASGI middleware: every answer carries the client's request id, or one made up for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (REQUEST_ID_HEADER.encode(), request_id.encode())
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        with log.bound(request_id=request_id):
            await self._app(scope, receive, send_with_id)
