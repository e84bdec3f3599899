"""`python -m services.teacher --name math --model PATH --port 8101`, or `--config FILE --name math [--replica 1]`.

Exit status: 0 after SIGTERM or SIGINT, 2 when it refuses to start, 1 when the engine dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn

from services.teacher.app import create_app
from services.teacher.config import TeacherConfig, load
from services.teacher.processes import end_children
from services.teacher.registration import Registration, registration_of
from services.teacher.service import TeacherService
from services.teacher.vllm_scorer import VllmScorer
from shared import aio, log, tracing
from shared.errors import ConfigError, EngineDied, run_main
from shared.service import api_key, stop_event
from shared.tracing import Tracer

_log = log.get(__name__)
_DRAIN_S = 5
_KEEPALIVE_S = 30  # longer than clients keep idle connections, so that none is closed under a request
_ENGINE_POLL_S = 0.5


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: `serve` below decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serve until a signal; raises ConfigError before the engine starts where it can."""
    config = load()
    log.configure(f"teacher/{config.name}")
    registration = registration_of(config)
    tracer = tracing.configure("opd-teacher", teacher=config.name)
    service = TeacherService(config, VllmScorer(config.teacher))
    key = api_key()
    with contextlib.closing(_listen(config)) as listener:
        try:
            asyncio.run(serve(service, key, listener, registration, tracer))
        finally:
            tracer.close()
            end_children()


async def serve(
    service: TeacherService,
    key: str | None,
    listener: socket.socket,
    registration: Registration | None = None,
    tracer: Tracer | None = None,
) -> None:
    """HTTP from the first moment (not ready), the engine beside it, until a signal or the engine's death.

    Raises:
        RunFailed: the engine did not start, or has died.
    """
    stop = stop_event()
    server = _Server(
        uvicorn.Config(
            create_app(service, key, tracer),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=_KEEPALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    engine = asyncio.create_task(_run_engine(service))
    stopping = asyncio.create_task(stop.wait())
    membership = asyncio.create_task(registration.run()) if registration else None
    try:
        await asyncio.wait((serving, engine, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (engine, serving):
            if task.done():
                task.result()  # raises: neither ends by itself but by failing
    finally:
        is_starting = not service.engine_up and not engine.done()
        _log.info("stopping", extra=log.fields(queued_tokens=service.admission.tokens))
        if registration and membership:  # first of all: nothing new comes, and what is in flight finishes
            await aio.end([membership])
            await registration.end()
        service.stopping = True
        server.should_exit = True
        await asyncio.wait((serving,), timeout=_DRAIN_S + 1)
        if is_starting:
            # The thread that starts the engine cannot be interrupted, and must not start another process.
            service.scorer.abandon()
            os._exit(0)
        for task in (engine, stopping):
            task.cancel()
        if service.engine_up:
            await service.close()


async def _run_engine(service: TeacherService) -> None:
    """Start the engine, then watch it; returns by exception only."""
    await service.start()
    watching = asyncio.create_task(service.canary.watch(lambda: service.rest.is_awake))
    try:
        while service.scorer.alive:
            await asyncio.sleep(_ENGINE_POLL_S)
            if watching.done():
                watching.result()
    finally:
        watching.cancel()
    raise EngineDied("the engine has died; its own messages are above")


def _listen(config: TeacherConfig) -> socket.socket:
    host, port = config.teacher.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses the port or change "
            f"teachers.{config.name}.ports (--port)"
        ) from error
    # Accepted connections inherit it. Without it Nagle and delayed acknowledgements hold every body back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    run_main(main)
