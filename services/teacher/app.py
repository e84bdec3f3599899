"""The teacher's HTTP interface: POST /logprobs and /generate, and what probes and people ask about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.teacher import docs, http
from services.teacher.observe import Observed
from services.teacher.service import Race, TeacherService
from shared import log
from shared.errors import Problem
from shared.tracing import Tracer
from shared.wire import choose_accept

RequestT = TypeVar("RequestT")

_log = log.get(__name__)
_CLIENT_GONE = 499  # nobody reads this status; it is for the metrics


def create_app(service: TeacherService, key: str | None, tracer: Tracer | None = None) -> FastAPI:
    """The application; starting and stopping the service is up to the caller.

    Args:
        key: what clients must show; None switches authentication off.
        tracer: makes a span of every request; None switches traces off.
    """
    app = FastAPI(title=f"opd teacher {service.config.name}", description=__doc__, redoc_url=None)

    @app.post("/logprobs", openapi_extra=docs.LOGPROBS, responses=docs.RESPONSES)
    async def logprobs(request: Request) -> Response:
        """Logprobs of response tokens, and of the most likely ids at each of them."""
        return await _answer(service, key, request, service.parse, service.answer)

    @app.post("/generate", openapi_extra=docs.GENERATE, responses=docs.GENERATE_RESPONSES)
    async def generate(request: Request) -> Response:
        """Greedy continuations of prompts."""
        return await _answer(service, key, request, service.parse_generate, service.generate)

    @app.post("/sleep", responses=docs.REST_RESPONSES)
    async def sleep(request: Request) -> dict[str, str]:
        """Let requests in flight finish, then give the accelerator's memory back. 503 to requests from now on."""
        http.authorize(request, key)
        return await service.sleep()

    @app.post("/wake", responses=docs.REST_RESPONSES)
    async def wake(request: Request) -> dict[str, str]:
        """Take requests again, once the canary sequence has its recorded logprobs."""
        http.authorize(request, key)
        return await service.wake()

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Alive: the process answers and its engine has not died."""
        alive = service.scorer.alive
        return JSONResponse({"status": "alive" if alive else "engine dead"}, 200 if alive else 503)

    @app.get("/readyz", responses=docs.UNREADY)
    async def readyz() -> JSONResponse:
        """Able to score: the canary sequence has its recorded logprobs."""
        ready, reason = service.readiness()
        return JSONResponse({"ready": ready, "reason": reason}, 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        service.metrics.ready.set(service.readiness()[0])
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/info", responses=docs.INFO_RESPONSES)
    async def info(request: Request) -> dict[str, Any]:
        """Model, fingerprint, vocabulary, limits."""
        http.authorize(request, key)
        return service.describe()

    _add_error_handlers(app)
    app.add_middleware(Observed, tracer=tracer or Tracer())
    app.add_middleware(http.RequestIds)
    return app


async def _answer(
    service: TeacherService,
    key: str | None,
    request: Request,
    parse: Callable[[bytes, str, str | None], RequestT],
    work: Callable[[RequestT, str, Race], Awaitable[tuple[bytes, str]]],
) -> Response:
    """The answer to one request, counted; every failure becomes a problem document."""
    response = await _work(service, key, request, parse, work)
    service.metrics.requests.labels(response.status_code).inc()
    return response


async def _work(
    service: TeacherService,
    key: str | None,
    request: Request,
    parse: Callable[[bytes, str, str | None], RequestT],
    work: Callable[[RequestT, str, Race], Awaitable[tuple[bytes, str]]],
) -> Response:
    limit_s = None
    try:
        http.authorize(request, key)
        limit_s = http.timeout_s(request)
        service.check_serving()
        async with asyncio.timeout(limit_s):
            body = await http.read_body(request, service.limits.max_body_bytes)
            content_type = request.headers.get("content-type", "")
            parsed = parse(body, content_type, request.headers.get("x-teacher"))
            accept = choose_accept(request.headers.get("accept", ""), content_type)

            def race(engine_work: Awaitable[Any]) -> Awaitable[Any]:
                return http.until_disconnect(request, engine_work)

            content, media_type = await work(parsed, accept, race)
        return Response(content, media_type=media_type)
    except Problem as problem:
        return http.problem_response(problem)
    except TimeoutError:
        detail = f"not done within the {limit_s:g} s that {http.TIMEOUT_HEADER} gives"
        return http.problem_response(Problem("opd:deadline", detail))
    except ClientDisconnect:
        service.metrics.aborted.inc()
        return Response(status_code=_CLIENT_GONE)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_problem(request: Request, error: Problem) -> Response:
        return http.problem_response(error)

    async def on_http(request: Request, error: HTTPException) -> Response:
        document = {"type": "about:blank", "title": error.detail, "status": error.status_code}
        return JSONResponse(document, error.status_code, error.headers, media_type=Problem.content_type)

    async def on_bug(request: Request, error: Exception) -> Response:
        _log.error("bug", exc_info=error, extra=log.fields(path=request.url.path))
        return http.problem_response(Problem("opd:internal", "the teacher failed; its log has the traceback"))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)
