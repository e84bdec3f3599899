"""The HTTP server of one gateway, and how it leaves: no client's request is cut off.

    SIGTERM ─▶ what is new gets 503 and its connection closed ─▶ it stops accepting ─▶ requests in flight finish
               (for LEAVE_S, or until no client is connected)                         (for DRAIN_S)

A server that closes its connections at once closes some of them under a request that is on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from fastapi import FastAPI

from services.gateway.gateway import Gateway

LEAVE_S = 1.0
"""Time that clients have to hear that this gateway leaves."""

DRAIN_S = 10
"""Time that requests in flight have to finish after that."""

KEEPALIVE_S = 30
"""Idle connections stay open for longer than clients keep them, so that none is closed under a request."""

_POLL_S = 0.02


class Server(uvicorn.Server):
    """Serves `app` until `should_exit` is set."""

    def __init__(self, gateway: Gateway, app: FastAPI, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody asks for the client's address
                timeout_keep_alive=KEEPALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it is to exit."""
        self._gateway.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while self.server_state.connections:
                    await asyncio.sleep(_POLL_S)
        await super().shutdown(sockets)
