"""One gateway process: the pools, the connections to their replicas, and the way of a scoring request through them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from services.gateway import routing
from services.gateway.addresses import Resolve
from services.gateway.config import GatewayConfig
from services.gateway.keys import Keys
from services.gateway.members import Members
from services.gateway.metrics import GatewayMetrics
from services.gateway.pool import Pool
from services.gateway.proxy import Inbound, Proxy
from services.gateway.replica import Replica
from services.gateway.split import Splitter
from services.gateway.upstream import Answer, ReplicaClient
from shared import aio, log
from shared.errors import Problem
from shared.tracing import Span, Tracer, passed_on

_FORWARDED = ("content-type", "accept")
_RETURNED = ("content-type", "retry-after")
_CLIENT_GONE = 499  # nobody reads it; the number is nginx's, for the metrics

ResultT = TypeVar("ResultT")

_log = log.get(__name__)


class Gateway:
    """State of one gateway process: the pools, connections to replicas, metrics."""

    def __init__(self, config: GatewayConfig, keys: Keys, resolve: Resolve, tracer: Tracer) -> None:
        settings = config.gateway
        self.tracer = tracer
        self.settings = settings
        self.keys = keys
        self.pools = {name: Pool(name, []) for name in config.teachers}
        self.metrics = GatewayMetrics(self.pools, keys.clients)
        self.members = Members(
            config.teachers,
            self.pools,
            self.metrics,
            settings,
            connect=lambda url: ReplicaClient(url, keys.upstream, tracer),
            resolve=resolve,
        )
        proxy = Proxy(
            self.members.clients,
            self.metrics,
            request_timeout_s=settings.request_timeout_s,
            retry_after_s=settings.probe_interval_s,
            hedge_quantile=settings.hedge_quantile,
        )
        self.splitter = Splitter(proxy, self.metrics)
        self.membership: asyncio.Task[None] | None = None
        self._is_leaving = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Members, their connections and probes."""
        if not self.keys.is_on:
            _log.warning("no_authentication", extra=log.fields(mend="set OPD_API_KEY or OPD_API_KEY_FILE"))
        else:
            _log.info("authentication", extra=log.fields(keys=sorted(self.keys.clients)))
        self.membership = asyncio.create_task(self.members.run())
        self.membership.add_done_callback(_report_end)
        await asyncio.sleep(0)  # lets it add the members that the configuration names
        _log.info("started", extra=log.fields(teachers={name: len(pool.replicas) for name, pool in self.pools.items()}))
        try:
            yield
        finally:
            await aio.end([self.membership])
            _log.info("stopped")

    def leave(self) -> None:
        """From now on new requests are refused, and every connection is closed with its next answer."""
        self._is_leaving = True
        _log.info("leaving")

    async def serve(self, request: Request) -> Response:
        """Read the body, find the teacher, and pass on what one of its replicas answers."""
        headers = request.headers
        request_id = routing.request_id(headers) or uuid.uuid4().hex
        name = f"{request.method} {request.scope['path']}"
        with log.bound(request_id=request_id), self.tracer.span(name, "server", parent=headers) as span:
            span.set(request_id=request_id)
            response = await self._serve(request, request_id, span)
            span.set(status=response.status_code)
            if self._is_leaving:
                response.headers["connection"] = "close"
            if response.status_code >= 500:
                span.fail(f"status {response.status_code}")
            return response

    async def _serve(self, request: Request, request_id: str, span: Span) -> Response:
        headers = request.headers
        started = time.monotonic()
        teacher = key = ""
        status = 500
        try:
            client = self.keys.identify(headers)
            key = client.name
            with client.request():
                limit_s = routing.timeout_s(headers, client.request_timeout_s)
                if named := headers.get(routing.TEACHER_HEADER):
                    teacher = routing.find_pool(self.pools, named).name
                body = await _read_body(request, client.max_body_bytes, limit_s)
                if self._is_leaving:
                    raise Problem("opd:unavailable", "this gateway is stopping: ask another one", retry_after_s=1.0)
                route = routing.read(headers, body)
                pool = routing.find_pool(self.pools, route.teacher)
                teacher = pool.name
                span.set(teacher=teacher, key=key, bytes=len(body))
                inbound = _inbound(request, request_id, body, route, deadline=started + limit_s)
                self.metrics.request_bytes.labels(teacher).inc(len(body))
                outcome = await _unless_gone(request.receive, self.splitter.forward(pool, inbound))
            if outcome is None:
                raise ClientDisconnect
            answer, replicas = outcome
            status = answer.status
            self.metrics.answer_bytes.labels(teacher).inc(len(answer.body))
            return _answer_response(answer, replicas, request_id)
        except Problem as problem:
            status = problem.status
            return problem_response(problem, {routing.REQUEST_ID_HEADER: request_id})
        except ClientDisconnect:
            status = _CLIENT_GONE
            self.metrics.disconnects.labels(teacher).inc()
            return Response(status_code=_CLIENT_GONE)
        finally:
            self.metrics.responses.labels(teacher, str(status)).inc()
            self.metrics.key_requests.labels(key, str(status)).inc()
            self.metrics.request_seconds.labels(teacher).observe(time.monotonic() - started)

    def readiness(self) -> tuple[bool, str]:
        """Ready when every teacher has a replica that serves; else which have none and why."""
        if self._is_leaving:
            return False, "this gateway is stopping"
        missing = [pool for pool in self.pools.values() if not pool.is_ready]
        if not missing:
            return True, "every teacher has a replica that serves"
        parts = []
        for pool in missing:
            whys = [f"{replica.name} {replica.state.value}: {replica.trouble}" for replica in pool.replicas]
            why = ", ".join(whys) or "none is known yet"
            parts.append(f"teacher {pool.name!r} has no replica that serves ({why})")
        return False, "; ".join(parts)


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    """RFC 9457 problem details."""
    return JSONResponse(
        problem.to_dict(), problem.status, problem.headers() | (headers or {}), media_type=Problem.content_type
    )


def _inbound(request: Request, request_id: str, body: bytes, route: routing.Route, deadline: float) -> Inbound:
    headers = request.headers
    return Inbound(
        path=request.scope["path"],
        request_id=request_id,
        body=body,
        headers={name: headers[name] for name in _FORWARDED if name in headers}
        | passed_on(headers)
        | {routing.REQUEST_ID_HEADER: request_id},
        num_tokens=routing.num_tokens(headers, len(body)),
        deadline=deadline,
        prefix_key=route.prefix_key,
    )


async def _read_body(request: Request, max_bytes: int, limit_s: float) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem("opd:media-type", "compressed bodies are not served: send it without content-encoding")
    declared = request.headers.get("content-length", "")
    too_large = Problem("opd:too-large", f"the body is larger than the {max_bytes} bytes that are taken")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise Problem("opd:deadline", f"the body did not arrive within {limit_s:g} s") from None
    return b"".join(chunks)


def _answer_response(answer: Answer, replicas: list[Replica], request_id: str) -> Response:
    headers = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
    headers |= {routing.REQUEST_ID_HEADER: request_id, "x-replica": ", ".join(replica.name for replica in replicas)}
    return Response(answer.body, answer.status, headers)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The work's result, or None when the client hangs up first: the work is then cancelled, at the replica too."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _report_end(task: asyncio.Task[None]) -> None:
    """Probes and changes of members run for ever; without them no replica comes back, and /healthz says so."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("membership_ended", exc_info=error)
