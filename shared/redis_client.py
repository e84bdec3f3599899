"""The one way to a Redis client."""

from __future__ import annotations

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from shared.errors import ConfigError


async def connect(url: str | None) -> redis.asyncio.Redis:
    """A connected client that retries dropped connections.

    Raises:
        ConfigError: no url, or nothing answers there.
    """
    if url is None:
        raise ConfigError("redis.url is not set: give one (redis://host:6379/0), or start the run with `opd up`")
    try:
        async with redis.asyncio.Redis.from_url(url, socket_timeout=10, retry=None) as first_look:
            await first_look.ping()  # without tries over again: a wrong url is said at once
        return redis.asyncio.Redis.from_url(
            url,
            # About a minute: a Redis that restarts has to read its append-only file.
            retry=Retry(ExponentialBackoff(cap=2.0, base=0.05), retries=35),
            retry_on_error=[
                redis.exceptions.ConnectionError,
                redis.exceptions.TimeoutError,
                redis.exceptions.BusyLoadingError,
            ],
            health_check_interval=30,
            socket_timeout=30,  # longer than any blocking read; a host that vanished must not be waited for for ever
            socket_keepalive=True,
        )
    except (redis.exceptions.RedisError, ValueError, OSError) as error:
        raise ConfigError(f"redis.url {_without_password(url)} does not answer: {error}") from error


def _without_password(url: str) -> str:
    scheme, sign, rest = url.partition("://")
    return scheme + sign + rest.rpartition("@")[2]
