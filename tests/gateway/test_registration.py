"""Real teacher processes, on a fake engine, that come to a real gateway and leave it while clients ask."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.conftest import Service, free_port, wait_until
from tests.gateway.bed import Bed

BODY = {"model": "math", "token_ids": [[5, 6, 7]], "prompt_len": [1]}
KEYS = {"OPD_REGISTRATION_KEY": "admin", "OPD_API_KEY": "client"}
CLIENT = {"authorization": "Bearer client"}


class Teachers:
    def __init__(self, run_service, bed: Bed, model: Path) -> None:
        self.run, self.bed, self.model = run_service, bed, model

    def start(self, port: int, *gateways: str, env: dict[str, str] = KEYS) -> Service:
        options = ["--name", "math", "--model", self.model, "--port", port, "--dtype", "float32"]
        registers = [part for url in gateways or (self.bed.url,) for part in ("--register", url)]
        return self.run("tests.teacher.fake_teacher", *options, *registers, env=env)


@pytest.fixture
def teachers(run_service, bed: Bed, fake_model: Path) -> Teachers:
    return Teachers(run_service, bed, fake_model)


async def replicas(url: str) -> dict[str, str]:
    """State by address."""
    async with httpx.AsyncClient(headers=CLIENT) as client:
        return {item["replica"]: item["state"] for item in (await client.get(f"{url}/replicas")).json()["replicas"]}


async def wait_replicas(url: str, *ports: int) -> None:
    goal = {f"127.0.0.1:{port}": "ready" for port in ports}

    async def reached() -> bool:
        return await replicas(url) == goal

    await wait_until(reached, 120, f"replicas {goal}")


async def test_teachers_come_and_go_by_themselves_and_no_client_sees_it(bed: Bed, teachers: Teachers):
    first, second = free_port(), free_port()
    leaving = teachers.start(first)  # before there is a gateway
    gateway = await bed.gateway(args=["--teacher", "math=register"], env=KEYS, wait=False)
    await wait_replicas(bed.url, first)
    statuses: list[int] = []
    stop = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            statuses.append((await client.post("/logprobs", json=BODY, timeout=30)).status_code)

    async def more() -> None:
        goal = len(statuses) + 50
        await wait_until(lambda: len(statuses) >= goal, 120, "50 more answers")

    async with httpx.AsyncClient(base_url=bed.url, headers=CLIENT) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(4)]
        await more()
        teachers.start(second)
        await wait_replicas(bed.url, first, second)
        await more()
        assert await asyncio.to_thread(leaving.stop, signal.SIGTERM) == 0
        await wait_replicas(bed.url, second)
        await more()
        stop.set()
        await asyncio.gather(*asking)
    assert set(statuses) == {200}
    assert "attempt_failed" not in gateway.output()
    assert '"event": "deregistered"' in leaving.output() and "admin" not in leaving.output()


async def test_sigterm_waits_for_what_is_in_flight(bed: Bed, teachers: Teachers):
    port = free_port()
    teacher = teachers.start(port)
    await bed.gateway(args=["--teacher", "math=register"], env=KEYS, wait=False)
    await wait_replicas(bed.url, port)
    async with httpx.AsyncClient(base_url=bed.url, headers=CLIENT, timeout=30) as client:
        gate = f"http://127.0.0.1:{port}/gate"
        await client.post(f"{gate}?shut")
        request = asyncio.create_task(client.post("/logprobs", json=BODY))

        async def arrived() -> bool:
            return (await client.post(f"{gate}?shut")).text == "1"

        await wait_until(arrived)
        teacher.process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return await replicas(bed.url) == {f"127.0.0.1:{port}": "draining"}

        await wait_until(draining)
        assert (await client.post("/logprobs", json=BODY)).status_code == 503  # nothing new
        await client.post(f"{gate}?open")
        assert (await request).status_code == 200
    assert await asyncio.to_thread(teacher.stop) == 0


async def test_a_gateway_started_again_knows_its_replicas_soon(bed: Bed, teachers: Teachers):
    port = free_port()
    options = ["--teacher", "math=register", "--set", "gateway.registration_ttl_s=1"]
    gateway = await bed.gateway(args=options, env=KEYS, wait=False)
    teachers.start(port, "http://127.0.0.1:9", bed.url)  # the other gateway is away
    await wait_replicas(bed.url, port)
    gateway.stop(signal.SIGKILL)
    await bed.gateway(args=options, env=KEYS, wait=False)
    await wait_replicas(bed.url, port)


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (["--register", "http://127.0.0.1:8100"], {}, "OPD_REGISTRATION_KEY"),
        (["--register", "127.0.0.1"], KEYS, "write http://HOST:PORT"),
        (["--register", "http://127.0.0.1:8100", "--host", "0.0.0.0"], KEYS, "--advertise http://HOST:PORT"),
    ],
)
async def test_a_registration_that_cannot_work_is_refused(run_service, fake_model: Path, options, env, words):
    name = ["--name", "math", "--model", fake_model, "--port", free_port()]
    service = run_service("tests.teacher.fake_teacher", *name, *options, env=env)
    await wait_until(lambda: service.process.poll() is not None)
    assert service.process.returncode == 2 and words in service.output()
