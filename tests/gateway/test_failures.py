"""A real gateway before real replica processes that die, hang, fail and lie: clients see none of it.

The clients here are plain httpx without any retry: every error that the gateway lets through fails the test.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time

import httpx
import pytest

from services.gateway.upstream import Answer
from tests.conftest import free_port, wait_until
from tests.gateway.bed import BODY, Bed, counted, more, steady_load


async def test_a_killed_replica_and_its_return_are_not_seen_by_clients(bed: Bed):
    first, second = await bed.replica("slow"), await bed.replica("slow")
    await bed.gateway(first.port, second.port)
    async with steady_load(bed.url) as results:
        await more(results)
        assert first.service.process.poll() is None
        first.service.stop(signal.SIGKILL)
        await bed.wait_states("ejected", "ready")
        await more(results)
        back = await bed.replica("good", port=first.port)
        await bed.wait_states("ready", "ready")
        await more(results)
        assert (await back.counts())["answered"] > 10
    assert set(results) == {200}


@pytest.mark.parametrize("behaviours", [("fail", "noise"), ("cut", "key")])
async def test_failing_fast_attracts_no_load(bed: Bed, behaviours: tuple[str, str]):
    holes, good = [await bed.replica(name) for name in behaviours], await bed.replica("slow")
    gateway = await bed.gateway(*(hole.port for hole in holes), good.port)
    async with steady_load(bed.url) as results:
        await more(results, 100)
    assert set(results) == {200}
    for hole in holes:
        assert 1 <= (await hole.counts())["requests"] < 20
    assert '"event": "replica_ejected"' in gateway.output()


async def test_a_hanging_replica_costs_time_but_no_request(bed: Bed):
    hanging, good = await bed.replica("hang"), await bed.replica()
    await bed.gateway(hanging.port, good.port, timeout_s=1.0)
    async with steady_load(bed.url) as results:
        await wait_until(lambda: counted(hanging, "abandoned", 2), 40, "the gateway leaves the hanging replica")
        await more(results)
    assert set(results) == {200}


async def test_a_full_replica_is_relieved_and_all_full_is_429(bed: Bed):
    full, good = await bed.replica("full"), await bed.replica()
    await bed.gateway(full.port, good.port)
    async with steady_load(bed.url) as results:
        await more(results)
    assert set(results) == {200}
    assert await bed.states() == ["ready", "ready"]
    await good.behave("full")
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{bed.url}/logprobs", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["type"] == "opd:overloaded"
    assert "{" not in response.json()["detail"]  # what a replica says is quoted as a sentence, not as its JSON
    await good.behave("busy")
    await full.behave("busy")
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{bed.url}/logprobs", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["type"] == "opd:unavailable" and "waking" in response.json()["detail"]
    assert await bed.states() == ["ready", "ready"]


async def test_all_replicas_failing_is_503_that_names_them(bed: Bed):
    first, second = await bed.replica("fail"), await bed.replica("noise")
    await bed.gateway(first.port, second.port)
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{bed.url}/logprobs", json=BODY)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        detail = response.json()["detail"]
        assert "boom" in detail and "no application/msgpack map" in detail
        assert all(stand.url.removeprefix("http://") in detail for stand in (first, second))
        metrics = (await client.get(f"{bed.url}/metrics")).text
    assert 'opd_gateway_responses_total{status="503",teacher="math"} 1.0' in metrics


async def test_an_unready_replica_gets_nothing_until_it_wakes(bed: Bed):
    sleeper, good = await bed.replica("drowsy"), await bed.replica()
    await bed.gateway(sleeper.port, good.port, wait=False)
    await bed.wait_states("starting", "ready")
    async with steady_load(bed.url) as results:
        await more(results)
        assert "requests" not in await sleeper.counts()
        await sleeper.behave("good")
        await bed.wait_states("ready", "ready")
        await wait_until(lambda: counted(sleeper, "answered", 10), what="it takes part")
        await sleeper.behave("drowsy")
        await bed.wait_states("unready", "ready")
        await more(results)
    assert set(results) == {200}


async def test_a_replica_with_another_model_is_refused(bed: Bed):
    right, wrong = await bed.replica(), await bed.replica("drowsy", fingerprint="f2")
    gateway = await bed.gateway(right.port, wrong.port, wait=False)
    await bed.wait_states("ready", "starting")
    await wrong.behave("good")
    await bed.wait_states("ready", "refused")
    async with steady_load(bed.url) as results:
        await more(results)
    assert set(results) == {200} and "requests" not in await wrong.counts()
    assert '"event": "replica_refused"' in gateway.output()


async def test_no_reachable_teacher_is_said_and_a_later_one_is_found(bed: Bed):
    port = free_port()
    await bed.gateway(port, wait=False)
    async with httpx.AsyncClient(base_url=bed.url) as client:

        async def probed() -> bool:
            return "ConnectError" in (await client.get("/readyz")).text

        await wait_until(probed, what="the first probe")
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert "'math'" in ready.json()["reason"] and f"127.0.0.1:{port} starting" in ready.json()["reason"]
        response = await client.post("/logprobs", json=BODY)
        assert response.status_code == 503 and "starting" in response.json()["detail"]
        await bed.replica(port=port)
        await bed.wait_states("ready")
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/logprobs", json=BODY)).status_code == 200


async def test_a_client_in_a_hurry_gets_504_and_ejects_nobody(bed: Bed):
    slow = await bed.replica("hang")
    await bed.gateway(slow.port, timeout_s=30)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        for _ in range(3):
            started = time.monotonic()
            response = await client.post("/logprobs", json=BODY, headers={"x-timeout-s": "0.1"})
            assert response.status_code == 504 and response.json()["type"] == "opd:deadline"
            assert time.monotonic() - started < 5
    assert await bed.states() == ["ready"]
    assert 0 < float((await slow.counts())["headers"]["x-timeout-s"]) <= 0.1


async def test_a_client_that_hangs_up_frees_the_replica(bed: Bed):
    hanging = await bed.replica("hang")
    await bed.gateway(hanging.port, timeout_s=30)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        request = asyncio.create_task(client.post("/logprobs", json=BODY, timeout=30))
        await wait_until(lambda: counted(hanging, "in_flight", 1))
        request.cancel()
        await wait_until(lambda: counted(hanging, "abandoned", 1), what="the replica is told")
        info = (await client.get("/info/math")).json()
        metrics = (await client.get("/metrics")).text
    assert info["replicas"][0]["outstanding_tokens"] == 0 and info["replicas"][0]["state"] == "ready"
    assert 'opd_gateway_client_disconnects_total{teacher="math"} 1.0' in metrics


async def test_sigterm_lets_requests_finish_and_exits_with_0(bed: Bed):
    stand = await bed.replica("hold")
    gateway = await bed.gateway(stand.port)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        requests = [asyncio.create_task(client.post("/logprobs", json=BODY)) for _ in range(5)]
        await wait_until(lambda: counted(stand, "in_flight", 5))
        gateway.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: refuses(bed.port), what="it stops accepting")
        await stand.behave("good")
        answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert await asyncio.to_thread(gateway.process.wait, 20) == 0  # a second signal could meet an interpreter that ends
    assert "Traceback" not in gateway.output()
    assert all(json.loads(line)["service"] == "gateway" for line in gateway.output().splitlines())


async def refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return True
    writer.close()
    return False


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"type": "opd:overloaded", "title": "full", "detail": "3000 tokens are queued"}', "3000 tokens are queued"),
        (b'{"ready": false, "reason": "asleep"}', "asleep"),
        (b'{"detail": ', '{"detail": '),
        (b"[1]", "[1]"),
        (b'{"detail": null}', '{"detail": null}'),
        (b"<html>" + b"x" * 300, "<html>" + "x" * 194),
        (b"[" * 60_000, "[" * 200),
    ],
)
def test_what_a_replica_says_is_quoted(body: bytes, complaint: str):
    assert Answer(503, {}, body).complaint == complaint
