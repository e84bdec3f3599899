"""`python -m services.gateway --port 8100 --teacher math=http://127.0.0.1:8101 [--teacher …]`, or `--config FILE`."""

from __future__ import annotations

import signal
from types import FrameType

from services.gateway.addresses import resolve
from services.gateway.app import create_app
from services.gateway.config import load
from services.gateway.gateway import Gateway
from services.gateway.keys import load_keys
from services.gateway.server import Server
from shared import log, tracing
from shared.errors import RunFailed, run_main
from shared.service import check_port_free


def main() -> None:
    """Serve until SIGTERM or SIGINT; then refuse what is new, let requests finish, and exit with status 0."""
    log.configure("gateway")
    config = load()
    keys = load_keys(config)
    tracer = tracing.configure("opd-gateway")
    settings = config.gateway
    check_port_free(settings.host, settings.port, setting="gateway.port (--port)")
    gateway = Gateway(config, keys, resolve, tracer)
    server = Server(gateway, create_app(gateway), settings.host, settings.port)

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
