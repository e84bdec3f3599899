"""Starts a real gateway and real stand-in replicas, and keeps clients asking."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.conftest import Service, free_port, wait_until

BODY = {"model": "math", "token_ids": [[1, 2, 3, 4]], "prompt_len": [2]}


@dataclass
class Stand:
    """A stand-in replica process and its controls."""

    service: Service
    port: int
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def behave(self, name: str) -> None:
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self.url}/behave?{name}")).raise_for_status()

    async def counts(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.url}/counts")).json()


@dataclass
class Bed:
    """Starts replicas and one gateway."""

    run: Callable[..., Service]
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def replica(
        self, behaviour: str = "good", port: int | None = None, fingerprint: str = "f1", host: str = "127.0.0.1"
    ) -> Stand:
        port = port or free_port()
        service = self.run("tests.gateway.stand_in", port, "math", fingerprint, behaviour, host)
        stand = Stand(service, port, host)
        await service.wait_ready(f"{stand.url}/counts")
        return stand

    async def gateway(
        self,
        *ports: int,
        wait: bool = True,
        timeout_s: float = 20.0,
        env: dict[str, str] | None = None,
        args: Sequence[str] = (),
        port: int | None = None,
    ) -> Service:
        """The gateway at `url`; others beside it get a `port` of their own."""
        port = port or self.port
        teachers = [part for port in ports for part in ("--teacher", f"math=http://127.0.0.1:{port}")]
        settings = [f"gateway.request_timeout_s={timeout_s}", "gateway.probe_interval_s=0.2"]
        overrides = [part for text in settings for part in ("--set", text)]
        service = self.run("services.gateway", "--port", port, *teachers, *overrides, *args, env=env)
        await service.wait_ready(f"http://127.0.0.1:{port}/healthz")
        if wait:
            await self.wait_states(*["ready"] * len(ports), port=port)
        return service

    async def states(self, port: int | None = None) -> list[str]:
        async with httpx.AsyncClient() as client:
            info = (await client.get(f"http://127.0.0.1:{port or self.port}/info/math")).json()
        return [replica["state"] for replica in info["replicas"]]

    async def wait_states(self, *states: str, port: int | None = None) -> None:
        async def reached() -> bool:
            return await self.states(port) == list(states)

        await wait_until(reached, 40, f"replicas {states}")


@asynccontextmanager
async def steady_load(url: str, clients: int = 8) -> AsyncIterator[Counter[int | str]]:
    """Clients that ask without a pause, each time with another prompt.

    Yields what they got so far: statuses, or the names of connection errors.
    """
    results: Counter[int | str] = Counter()
    stop = asyncio.Event()

    numbers = itertools.count()

    async def ask(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            body = BODY | {"token_ids": [[next(numbers), 2, 3, 4]]}
            try:
                response = await client.post(f"{url}/logprobs", json=body, timeout=60)
                assert response.status_code != 200 or response.json()["results"][0]["logprobs"] == [-3.0, -4.0]
                results[response.status_code] += 1
            except httpx.HTTPError as error:
                results[type(error).__name__] += 1

    async with httpx.AsyncClient() as client:
        tasks = [asyncio.create_task(ask(client)) for _ in range(clients)]
        try:
            yield results
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def more(results: Counter[int | str], count: int = 50) -> None:
    """Wait until the load has had `count` more good answers."""
    goal = results[200] + count
    await wait_until(lambda: results[200] >= goal, 40, f"{count} more answers; so far {dict(results)}")


async def counted(stand: Stand, name: str, at_least: int) -> bool:
    return (await stand.counts()).get(name, 0) >= at_least
