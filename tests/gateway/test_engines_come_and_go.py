"""Real vLLM teachers under load: one is killed and comes back, one joins, one drains. No client sees an error."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest

from shared.client import LogprobsClient
from shared.wire import LogprobsRequest
from tests.conftest import REPO, Service, free_port, wait_until
from tests.gateway.bed import Bed

pytestmark = pytest.mark.engine

KEY = {"OPD_REGISTRATION_KEY": "admin"}
START_S = 150.0


class Engines:
    """Starts teachers that register themselves with the bed's gateway."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def start(self, port: int) -> Service:
        args = ("--name", "math", "--model", REPO / "assets/demo/teacher-math", "--dtype", "float32")
        return self._bed.run("services.teacher", *args, "--port", port, "--register", self._bed.url, env=KEY)

    async def wait_states(self, *states: str) -> None:
        async def reached() -> bool:
            return sorted(await self._bed.states()) == sorted(states)

        await wait_until(reached, START_S, f"replicas {states}")

    async def answered(self, port: int) -> float:
        """Requests that the gateway had answered by the replica at `port`."""
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{self._bed.url}/metrics")).text
        start = f'opd_gateway_attempts_total{{outcome="answered",replica="127.0.0.1:{port}",'
        return next((float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(start)), 0.0)

    async def wait_share(self, *ports: int, count: int = 40) -> None:
        """Wait until each replica has answered so many more requests: the load is spread over all of them."""
        goals = {port: await self.answered(port) + count for port in ports}

        async def reached() -> bool:
            return all([await self.answered(port) >= goal for port, goal in goals.items()])

        await wait_until(reached, START_S, f"{count} more answers from each of {ports}")


@asynccontextmanager
async def steady_scores(url: str, clients: int = 6) -> AsyncIterator[Counter[str]]:
    """Clients that ask without a pause and compare each answer with the first one for the same request."""
    results: Counter[str] = Counter()
    stop, numbers = asyncio.Event(), itertools.count()
    expected: dict[int, np.ndarray] = {}

    async def ask(client: httpx.AsyncClient) -> None:
        # plain httpx, without any retry of its own
        while not stop.is_set():
            number = next(numbers) % 50
            ids = [1 + number, 2, 3, 4, 5, 6]
            body = {"model": "math", "token_ids": [ids, [*ids, 7]], "prompt_len": [3, 3], "top_k": 2}
            try:
                response = await client.post(f"{url}/logprobs", json=body, timeout=60)
                if response.status_code != 200:
                    results[f"{response.status_code} {response.text[:300]}"] += 1
                    continue
                logprobs = np.array(response.json()["results"][0]["logprobs"])
            except httpx.HTTPError as error:
                results[type(error).__name__] += 1
                continue
            same = np.allclose(logprobs, expected.setdefault(number, logprobs), atol=1e-3)
            results["good" if same else "different logprobs"] += 1

    async with httpx.AsyncClient() as client:
        tasks = [asyncio.create_task(ask(client)) for _ in range(clients)]
        try:
            yield results
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def test_engines_die_return_join_and_drain_and_no_client_sees_it(bed: Bed):
    await bed.gateway(wait=False, env=KEY, args=["--teacher", "math=register"])
    engines, ports = Engines(bed), [free_port() for _ in range(3)]
    first, second = engines.start(ports[0]), engines.start(ports[1])
    await engines.wait_states("ready", "ready")
    async with steady_scores(bed.url) as results:
        await engines.wait_share(ports[0], ports[1])
        second.stop(signal.SIGKILL)
        await engines.wait_share(ports[0])
        second = engines.start(ports[1])
        third = engines.start(ports[2])
        await engines.wait_states("ready", "ready", "ready")
        await engines.wait_share(*ports)
        assert await asyncio.to_thread(first.stop) == 0  # SIGTERM: it withdraws, finishes, ends
        await engines.wait_states("ready", "ready")
        await engines.wait_share(ports[1], ports[2])
        assert third.process.poll() is None and second.process.poll() is None
    assert set(results) == {"good"}, results
    async with LogprobsClient(bed.url, None, connections=1, timeout_s=20) as client:
        response = await client.score(LogprobsRequest(token_ids=[[1, 2, 3, 4, 5, 6]], prompt_len=[3], top_k=2), "math")
    assert response.results[0].top_ids.shape == (3, 2)
