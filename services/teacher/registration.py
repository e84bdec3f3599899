"""A replica that tells gateways where it is, again and again, and says goodbye before it stops.

It is `PUT /replicas/NAME` every third of the lease that the gateway gives, and a DELETE on SIGTERM: the gateway then
sends nothing new, and answers when what it had sent is answered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import NoReturn

import httpx

from services.teacher.config import TeacherConfig
from shared import log
from shared.errors import ConfigError
from shared.service import secret

GOODBYE_S = 3.0
"""Longest time that stopping waits for gateways to have nothing in flight here."""

_TIMEOUT_S = 5.0
_AGAIN_S = 1.0

_log = log.get(__name__)


class Registration:
    """This replica's membership at every gateway in `gateways`.

    Args:
        url: where gateways reach this replica.
        key: the gateways' registration key.
    """

    def __init__(self, gateways: Sequence[str], *, teacher: str, url: str, key: str) -> None:
        self._gateways = gateways
        self._path = f"/replicas/{teacher}"
        self._url = url
        self._instance = uuid.uuid4().hex
        self._headers = {"authorization": f"Bearer {key}"}

    async def run(self) -> None:
        """Keep the membership for ever; a gateway that is away or refuses is logged and asked again."""
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            for gateway in self._gateways:
                tasks.create_task(self._keep(client, gateway))

    async def end(self) -> None:
        """Leave all gateways, once `run` has been cancelled; returns when nothing of theirs is in flight here."""
        async with self._client() as client:
            await asyncio.gather(*(self._leave(client, gateway) for gateway in self._gateways))

    async def _keep(self, client: httpx.AsyncClient, gateway: str) -> NoReturn:
        last_trouble: str | None = None
        while True:
            pause_s, trouble = await self._register(client, gateway)
            if trouble != last_trouble:
                where = log.fields(gateway=gateway, url=self._url)
                if trouble:
                    _log.warning("not_registered: %s", trouble, extra=where)
                else:
                    _log.info("registered", extra=where)
            last_trouble = trouble
            await asyncio.sleep(pause_s)

    async def _register(self, client: httpx.AsyncClient, gateway: str) -> tuple[float, str]:
        """Seconds until the next time, and what was wrong."""
        try:
            body = {"url": self._url, "instance": self._instance}
            answer = await client.put(gateway + self._path, json=body)
            if answer.is_success:
                return float(answer.json()["ttl_s"]) / 3, ""
            return _AGAIN_S, f"it answered {answer.status_code}: {answer.text[:200]}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return _AGAIN_S, f"{type(error).__name__}: {error}"

    async def _leave(self, client: httpx.AsyncClient, gateway: str) -> None:
        headers = {"x-timeout-s": str(GOODBYE_S)}
        try:
            async with asyncio.timeout(GOODBYE_S + 0.5):
                answer = await client.delete(gateway + self._path, params={"url": self._url}, headers=headers)
            _log.info("deregistered", extra=log.fields(gateway=gateway, status=answer.status_code))
        except (httpx.HTTPError, TimeoutError) as error:  # its requests find no connection then, and go elsewhere
            _log.warning(
                "not_deregistered", extra=log.fields(gateway=gateway, reason=f"{type(error).__name__}: {error}")
            )

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=self._headers, timeout=_TIMEOUT_S + GOODBYE_S, trust_env=False)


def registration_of(config: TeacherConfig) -> Registration | None:
    """What the options of this replica ask for; None where it does not register itself.

    Raises:
        ConfigError: the gateways' registration key is missing.
    """
    if not config.gateways:
        return None
    key = secret("OPD_REGISTRATION_KEY")
    if key is None:
        raise ConfigError("--register needs the gateways' key: set OPD_REGISTRATION_KEY or OPD_REGISTRATION_KEY_FILE")
    assert config.advertise is not None  # the configuration's reader saw to it
    return Registration(config.gateways, teacher=config.name, url=config.advertise, key=key)
