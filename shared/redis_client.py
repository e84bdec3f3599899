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
        client = redis.asyncio.Redis.from_url(
            url,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=8),
            retry_on_error=[redis.exceptions.ConnectionError, redis.exceptions.TimeoutError],
            health_check_interval=30,
            socket_timeout=None,  # blocking reads set their own limit
        )
        await client.ping()
    except (redis.exceptions.RedisError, ValueError, OSError) as error:
        raise ConfigError(f"redis.url {_without_password(url)} does not answer: {error}") from error
    return client


def _without_password(url: str) -> str:
    scheme, sign, rest = url.partition("://")
    return scheme + sign + rest.rpartition("@")[2]
