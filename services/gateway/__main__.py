"""`python -m services.gateway --port 8100 --teacher math=http://127.0.0.1:8101 [--teacher …]`, or `--config FILE`."""

from __future__ import annotations

import signal
from types import FrameType

import uvicorn

from services.gateway.app import create_app
from services.gateway.config import load
from services.gateway.keys import load_keys
from shared import log, tracing
from shared.errors import RunFailed, run_main
from shared.service import check_port_free

DRAIN_S = 10
"""Time that requests in flight have to finish after SIGTERM."""

KEEPALIVE_S = 30
"""Idle connections stay open for longer than clients keep them, so that none is closed under a request."""


def main() -> None:
    """Serve until SIGTERM or SIGINT; then stop accepting, let requests finish, and exit with status 0."""
    log.configure("gateway")
    config = load()
    keys = load_keys(config)
    tracer = tracing.configure("opd-gateway")
    settings = config.gateway
    check_port_free(settings.host, settings.port, setting="gateway.port (--port)")
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config, keys, tracer=tracer),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )

    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn raises the signal again once it has stopped: with a handler of ours that is an exit with status 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    server.run()
    tracer.close()
    if not server.started:
        raise RunFailed("the gateway did not start: see the log above")


if __name__ == "__main__":
    run_main(main)
