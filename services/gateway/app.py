"""The gateway's HTTP interface: POST /logprobs and /generate for all teachers, and what probes and people ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from services.gateway import admin, docs, routing
from services.gateway.gateway import Gateway, problem_response
from shared.errors import Problem


class _PassedOn(APIRoute):
    """In /docs like any other route; its endpoint wants the request as it is, so nothing is looked up for it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def create_app(gateway: Gateway) -> FastAPI:
    """The application; connections and probes begin with its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(title="opd gateway", description=__doc__, lifespan=lifespan, redoc_url=None)
    passed = APIRouter(route_class=_PassedOn)

    @passed.post("/logprobs", openapi_extra=docs.LOGPROBS, responses=docs.RESPONSES)
    async def logprobs(request: Request) -> Response:
        """Score token ids or a text with the teacher that `model` or the header `x-teacher` names."""
        return await gateway.serve(request)

    @passed.post("/generate", openapi_extra=docs.GENERATE, responses=docs.RESPONSES)
    async def generate(request: Request) -> Response:
        """Greedy continuations of token ids by the teacher that `model` or the header `x-teacher` names."""
        return await gateway.serve(request)

    app.include_router(passed)

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Alive: the process answers and its background probes run."""
        alive = gateway.membership is not None and not gateway.membership.done()
        return JSONResponse({"status": "alive" if alive else "probes ended"}, 200 if alive else 503)

    @app.get("/readyz", responses=docs.UNREADY)
    async def readyz() -> JSONResponse:
        """Ready: every teacher has at least one replica that serves."""
        ready, reason = gateway.readiness()
        return JSONResponse({"ready": ready, "reason": reason}, 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(gateway.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/info", responses=docs.INFO_RESPONSES)
    async def info(request: Request) -> dict[str, Any]:
        """All teachers, their replicas and states."""
        gateway.keys.identify(request.headers)
        return {"teachers": {name: pool.describe() for name, pool in gateway.pools.items()}}

    @app.get("/info/{teacher}", responses=docs.INFO_RESPONSES)
    async def teacher_info(teacher: str, request: Request) -> dict[str, Any]:
        """One teacher."""
        gateway.keys.identify(request.headers)
        return routing.find_pool(gateway.pools, teacher).describe()

    admin.add_routes(app, gateway)
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def on_problem(request: Request, error: Problem) -> JSONResponse:
        return problem_response(error)

    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        document = {"type": "about:blank", "title": error.detail, "status": error.status_code}
        return JSONResponse(document, error.status_code, error.headers, media_type=Problem.content_type)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        return problem_response(Problem("opd:internal", "the gateway failed; its log has the traceback"))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)
