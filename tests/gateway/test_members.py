"""Replicas join and leave while clients ask: behind a DNS name, by registration, by hand. No client sees an error."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from services.gateway.addresses import resolve
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.keys import Keys
from shared.tracing import Tracer
from tests.conftest import Service, free_port, wait_until
from tests.gateway.bed import BODY, Bed, counted, more, steady_load

ADMIN = {"authorization": "Bearer admin"}
REGISTER = ("--teacher", "math=register")


class Names:
    """A resolver that the test controls."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | Exception = list(addresses)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append((name, port))
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses

    async def asked_again(self) -> None:
        """Return once a lookup that began after this call has been acted on."""
        goal = len(self.asked) + 2
        await wait_until(lambda: len(self.asked) >= goal, what="the name is looked up again")


@asynccontextmanager
async def in_process(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client,
    ):
        yield client


def app_of(teachers: dict[str, list[str]], names: Names) -> FastAPI:
    settings = {"probe_interval_s": 0.1, "dns_interval_s": 0.05, "registration_ttl_s": 0.5}
    config = GatewayConfig.model_validate({"gateway": settings, "teachers": teachers})
    return create_app(Gateway(config, Keys(config.gateway), names, Tracer()))


async def members(client: httpx.AsyncClient) -> dict[str, tuple[str, str]]:
    """Origin and state by address."""
    found = (await client.get("/replicas")).json()["replicas"]
    return {item["replica"]: (item["origin"], item["state"]) for item in found}


async def wait_members(client: httpx.AsyncClient, expected: dict[str, tuple[str, str]]) -> None:
    async def reached() -> bool:
        return await members(client) == expected

    await wait_until(reached, 40, f"members {expected}")


async def lookups(client: httpx.AsyncClient, result: str) -> float:
    """How often the name was looked up with that result."""
    start = f'opd_gateway_dns_lookups_total{{name="teacher-math",result="{result}",teacher="math"}} '
    found = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(start)]
    return float(found[0].removeprefix(start)) if found else 0.0


async def test_every_address_behind_a_name_is_followed(bed: Bed):
    port = free_port()
    stands = [await bed.replica(port=port, host=f"127.0.0.{number}") for number in (2, 3, 4)]
    names = Names("127.0.0.2")
    at = [f"127.0.0.{number}:{port}" for number in (2, 3, 4)]
    ready = ("dns", "ready")
    async with in_process(app_of({"math": [f"dns+http://teacher-math:{port}"]}, names)) as client:
        await wait_members(client, {at[0]: ready})
        assert names.asked[0] == ("teacher-math", port)
        names.addresses = ["127.0.0.4", "127.0.0.2", "127.0.0.3"]
        await wait_members(client, dict.fromkeys(at, ready))

        for trouble in ([], OSError("no such host"), TimeoutError(), UnicodeError("label too long")):
            names.addresses = trouble
            await names.asked_again()
            assert await members(client) == dict.fromkeys(at, ready)  # the last known ones stay
            assert (await client.post("/logprobs", json=BODY)).status_code == 200
        assert await lookups(client, "failed") >= 3 * 2 and await lookups(client, "empty") >= 2

        await stands[0].behave("hold")
        bodies = [{**BODY, "token_ids": [[prompt, 2, 3, 4]]} for prompt in range(24)]  # each has a home of its own
        held = [asyncio.create_task(client.post("/logprobs", json=body)) for body in bodies]
        await wait_until(lambda: counted(stands[0], "in_flight", 1))
        names.addresses = ["127.0.0.3"]
        await wait_members(client, {at[0]: ("dns", "draining"), at[1]: ready})
        assert (await client.post("/logprobs", json=BODY)).status_code == 200  # by the one that stayed
        await stands[0].behave("good")
        assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
        await wait_members(client, {at[1]: ready})
        metrics = (await client.get("/metrics")).text
        assert at[1] in metrics and at[0] not in metrics and at[2] not in metrics
        assert 'opd_gateway_replicas_left_total{reason="left_dns",teacher="math"} 2.0' in metrics

        names.addresses = OSError("the resolver is away")
        stands[1].service.stop(signal.SIGKILL)
        await wait_members(client, {at[1]: ("dns", "ejected")})  # it may come back: only the name says who has left
        failed = await lookups(client, "failed")
        await names.asked_again()
        assert await lookups(client, "failed") > failed and await members(client) == {at[1]: ("dns", "ejected")}
        names.addresses = ["127.0.0.2"]
        await wait_members(client, {at[0]: ready})


async def test_two_teachers_behind_one_address_do_not_share_it(bed: Bed):
    stand = await bed.replica()
    teachers = {"math": [stand.url], "chat": [f"dns+http://chat:{stand.port}"]}
    names = Names("127.0.0.1")
    async with in_process(app_of(teachers, names)) as client:
        await names.asked_again()
        await wait_members(client, {f"127.0.0.1:{stand.port}": ("config", "ready")})


async def test_localhost_resolves_to_one_address():
    assert await resolve("localhost", 80) in (["127.0.0.1"], ["::1"])


async def put(url: str, replica: str, instance: str = "", key: dict[str, str] = ADMIN) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        body = {"url": replica} | ({"instance": instance} if instance else {})
        return await client.put(f"{url}/replicas/math", json=body, headers=key)


async def delete(url: str, replica: str, wait_s: float | None = None) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        headers = ADMIN if wait_s is None else {**ADMIN, "x-timeout-s": str(wait_s)}
        return await client.delete(f"{url}/replicas/math", params={"url": replica}, headers=headers, timeout=30)


async def registering_gateway(bed: Bed, *settings: str) -> Service:
    args = [*REGISTER, *(part for text in settings for part in ("--set", text))]
    return await bed.gateway(args=args, env={"OPD_REGISTRATION_KEY": "admin"}, wait=False)


async def test_replicas_register_and_drain_under_load_and_no_client_sees_it(bed: Bed):
    first, second, third = [await bed.replica("slow") for _ in range(3)]
    gateway = await registering_gateway(bed)
    answer = await put(bed.url, first.url)
    assert (answer.status_code, answer.json()["origin"], answer.json()["ttl_s"]) == (201, "registered", 15.0)
    assert answer.json()["state"] == "starting"
    assert (await put(bed.url, second.url)).status_code == 201
    assert (await put(bed.url, second.url)).status_code == 200  # renewed
    await bed.wait_states("ready", "ready")
    async with steady_load(bed.url) as results:
        await more(results)
        assert (await put(bed.url, third.url)).status_code == 201
        await bed.wait_states("ready", "ready", "ready")
        gone = await delete(bed.url, first.url, wait_s=10)
        assert (gone.status_code, gone.json()["in_flight"], gone.json()["state"]) == (200, 0, "draining")
        assert (await first.counts())["in_flight"] == 0
        first.service.stop(signal.SIGKILL)  # nobody is there any more to notice
        await wait_until(lambda: counted(third, "answered", 20), what="the new one takes its share")
        await more(results)
        assert await bed.states() == ["ready", "ready"]
        back = await bed.replica("slow", port=first.port)
        answer = await put(bed.url, back.url)
        assert (answer.status_code, answer.json()["state"]) == (201, "starting")
        await bed.wait_states("ready", "ready", "ready")
        await more(results)
    assert set(results) == {200}
    assert "attempt_failed" not in gateway.output() and "admin" not in gateway.output()


async def test_a_registration_that_is_not_renewed_ends(bed: Bed):
    stand = await bed.replica("hold")
    await registering_gateway(bed, "gateway.registration_ttl_s=1")
    await put(bed.url, stand.url)
    await bed.wait_states("ready")
    async with httpx.AsyncClient(base_url=bed.url) as client:
        request = asyncio.create_task(client.post("/logprobs", json=BODY))
        await wait_until(lambda: counted(stand, "in_flight", 1))
        await bed.wait_states("draining")
        assert (await client.get("/readyz")).status_code == 503
        await stand.behave("good")
        assert (await request).status_code == 200
        await bed.wait_states()
        metrics = (await client.get("/metrics")).text
    assert 'opd_gateway_replicas_left_total{reason="lease_expired",teacher="math"} 1.0' in metrics
    assert str(stand.port) not in metrics
    assert (await put(bed.url, stand.url)).status_code == 201
    await bed.wait_states("ready")


async def test_a_process_removed_by_hand_stays_away_and_its_successor_may_come(bed: Bed):
    stand = await bed.replica()
    await registering_gateway(bed)
    await put(bed.url, stand.url, "a1")
    assert (await delete(bed.url, stand.url)).status_code == 200
    again = await put(bed.url, stand.url, "a1")
    assert (again.status_code, again.json()["type"]) == (409, "opd:conflict")
    assert (await put(bed.url, stand.url, "a2")).status_code == 201
    await bed.wait_states("ready")


async def test_only_the_registration_key_changes_members(bed: Bed):
    stand, other = await bed.replica(), await bed.replica()
    env = {"OPD_REGISTRATION_KEY": "admin", "OPD_API_KEY": "client"}
    chat = ("--teacher", f"chat={other.url}", "--set", 'gateway.registration_hosts=["127.0.0.0/8", "teacher-*"]')
    gateway = await bed.gateway(stand.port, args=chat, env=env, wait=False)
    client_key = {"authorization": "Bearer client"}
    for key in (client_key, {}, {"authorization": "Basic admin"}):
        assert (await put(bed.url, "http://127.0.0.1:9", key=key)).status_code == 401
    async with httpx.AsyncClient(base_url=bed.url, headers=client_key) as client:
        assert (await client.delete("/replicas/math", params={"url": stand.url})).status_code == 401
        assert (await httpx.AsyncClient().get(f"{bed.url}/replicas")).status_code == 401
        assert len(await members(client)) == 2
    for url in ("http://10.1.2.3:80", "http://metadata:80", "http://localhost:80"):
        refused = await put(bed.url, url)
        assert (refused.status_code, refused.json()["type"]) == (403, "opd:forbidden"), url
    for url in (
        "ftp://127.0.0.1:80",
        "http://127.0.0.1:80/x",
        "http://a@127.0.0.1:80",
        "http://127.0.0.1",
        "dns+http://a:1",
    ):
        assert (await put(bed.url, url)).status_code == 400, url
    taken = await put(bed.url, other.url)  # another teacher's
    assert (taken.status_code, taken.json()["type"]) == (409, "opd:conflict")
    mine = await put(bed.url, stand.url)  # a member by configuration stays one
    assert (mine.status_code, mine.json()["origin"]) == (200, "config")
    async with httpx.AsyncClient(base_url=bed.url, headers=ADMIN) as client:
        assert (await client.put("/replicas/nobody", json={"url": stand.url})).status_code == 404
        assert (await client.put("/replicas/math", content=b"[" * 2000)).status_code == 400
        assert (await client.put("/replicas/math", content=b" " * 5000)).status_code == 413
        half = await client.put("/replicas/math", content=b'{"url": "http://a:1", "\\ud800": 1}')
        assert half.status_code == 400
        assert (await client.put("/replicas/math", json={"url": stand.url, "x": 1})).status_code == 400
        assert (await client.delete("/replicas/math", params={"url": "http://127.0.0.1:9"})).status_code == 404
        assert (await client.delete("/replicas/math")).status_code == 400
    assert (await delete(bed.url, stand.url, wait_s=5)).status_code == 200
    assert "Traceback" not in gateway.output()


async def test_registration_is_off_without_its_key(bed: Bed, run_service):
    stand = await bed.replica()
    await bed.gateway(stand.port)
    refused = await put(bed.url, "http://127.0.0.1:9")
    assert (refused.status_code, refused.json()["type"]) == (403, "opd:forbidden")
    lonely = run_service("services.gateway", "--port", free_port(), *REGISTER)
    await wait_until(lambda: lonely.process.poll() is not None)
    assert lonely.process.returncode == 2 and "OPD_REGISTRATION_KEY" in lonely.output()
