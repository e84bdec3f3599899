"""What every service needs around its own work: a stop signal, health and metrics endpoints, the API key.

The teacher and the gateway serve HTTP anyway and mount the same answers in their own apps; the rollout worker and the
trainer use `HealthServer`, a few lines over asyncio, so that neither depends on a web framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import prometheus_client
import psutil

from shared import log
from shared.errors import ConfigError

Readiness = Callable[[], tuple[bool, str]]
"""Returns (ready, reason); the reason is shown to people either way."""

_LOG = log.get(__name__)
_WATCH_S = 1.0
STOP_WITHIN_S = 12.0


def api_key() -> str | None:
    """The key that services show each other, from OPD_API_KEY_FILE or OPD_API_KEY; None means no authentication.

    Raises:
        ConfigError: the named file cannot be read or is empty.
    """
    return secret("OPD_API_KEY")


def secret(name: str) -> str | None:
    """A secret from the file that the environment variable NAME_FILE names, or from NAME itself; None without either.

    Raises:
        ConfigError: the named file cannot be read or is empty.
    """
    path = os.environ.get(f"{name}_FILE")
    if path:
        try:
            key = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name}_FILE={path} cannot be read: {error.strerror}") from error
        if not key:
            raise ConfigError(f"{name}_FILE={path} is empty: write the key into it")
        return key
    return os.environ.get(name) or None


def check_port_free(host: str, port: int, *, setting: str) -> None:
    """Raises ConfigError when the port cannot be bound; `setting` names the option to change."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it or change {setting}"
            ) from error


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; call it inside the running loop.

    A process that has not ended `STOP_WITHIN_S` later, because Redis or a peer is gone, is ended as it is: leases run
    out by themselves and nothing unacknowledged is lost.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not event.is_set():
            event.set()
            last_resort = threading.Timer(STOP_WITHIN_S, _give_up_stopping)
            last_resort.daemon = True
            last_resort.start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    return event


def _give_up_stopping() -> None:
    _LOG.error("stop_took_too_long", extra=log.fields(limit_s=STOP_WITHIN_S))
    leave(1)


def leave(status: int) -> NoReturn:
    """End the process now. Tearing an interpreter with torch and vLLM down takes seconds and does nothing for us."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with(pid: int) -> None:
    """End this process when process `pid` is gone: an engine whose owner was killed waits for ever otherwise."""
    owner = psutil.Process(pid)

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="opd-watchdog", daemon=True).start()


class HealthServer:
    """Serves GET /healthz, /readyz and /metrics for a process that has no other HTTP interface."""

    def __init__(self, host: str, port: int, ready: Readiness) -> None:
        self._host = host
        self._port = port
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> HealthServer:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=16_384)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                status, content_type, body = self._answer(method, target.split("?", 1)[0])
                writer.write(
                    f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
                    "connection: close\r\n\r\n".encode()
                    + (b"" if method == "HEAD" else body)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, ConnectionError, TimeoutError):
            return  # a client that sends no HTTP request gets no answer; nothing of ours is lost
        finally:
            writer.close()

    def _answer(self, method: str, path: str) -> tuple[str, str, bytes]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"GET only\n"
        if path == "/healthz":
            return "200 OK", "application/json", b'{"status":"alive"}\n'
        if path == "/readyz":
            ready, reason = self._ready()
            body = json.dumps({"ready": ready, "reason": reason}).encode() + b"\n"
            return ("200 OK" if ready else "503 Service Unavailable"), "application/json", body
        if path == "/metrics":
            return "200 OK", prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest()
        return "404 Not Found", "text/plain", b"known paths: /healthz /readyz /metrics\n"


@contextlib.contextmanager
def health_thread(host: str, port: int, ready: Readiness) -> Iterator[None]:
    """Health endpoints from a thread of their own, for a process whose main thread computes for seconds on end."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with HealthServer(host, port, ready):
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=5)
