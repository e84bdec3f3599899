"""POST /sleep and /wake on a fake scorer."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.teacher.app import create_app
from services.teacher.service import TeacherService
from tests.conftest import wait_until
from tests.teacher.fake_scorer import FakeScorer

BODY = {"token_ids": [[1, 2, 3]]}


async def ready(client: httpx.AsyncClient) -> tuple[int, str]:
    response = await client.get("/readyz")
    return response.status_code, response.json()["reason"]


async def test_asleep_nothing_is_served_until_woken(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    for _ in range(2):
        response = await client.post("/sleep")
        assert (response.status_code, response.json(), scorer.asleep) == (200, {"state": "asleep"}, True)
        assert await ready(client) == (503, "asleep")
    for path, body in (("/logprobs", BODY), ("/generate", BODY | {"max_tokens": 1}), ("/logprobs", {})):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["type"]) == (503, "opd:unavailable")
        assert (refused.json()["detail"], refused.headers["retry-after"]) == ("asleep", "2")
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/info")).status_code == 200
    before = scorer.scored
    for _ in range(2):
        assert (await client.post("/wake")).json() == {"state": "awake"}
    assert (scorer.asleep, scorer.scored) == (False, before + 1)  # the canary, once
    assert (await ready(client))[0] == 200
    assert (await client.post("/logprobs", json=BODY)).status_code == 200


async def test_requests_in_flight_are_answered_first(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.gate.clear()
    asking = asyncio.create_task(client.post("/logprobs", json=BODY))
    await wait_until(lambda: scorer.in_flight == 1)
    falling = [asyncio.create_task(client.post("/sleep")) for _ in range(2)]
    await wait_until(lambda: scorer.in_flight == 1)

    async def is_falling() -> bool:
        return await ready(client) == (503, "falling asleep")

    await wait_until(is_falling)
    assert (await client.post("/logprobs", json=BODY)).status_code == 503
    waking = asyncio.create_task(client.post("/wake"))  # waits for its turn
    await asyncio.sleep(0)
    assert not (scorer.asleep or waking.done() or any(task.done() for task in falling))
    scorer.gate.set()
    assert (await asking).status_code == 200
    assert [response.json() for response in await asyncio.gather(*falling)] == [{"state": "asleep"}] * 2
    assert (await waking).json() == {"state": "awake"}


async def test_who_wakes_up_broken_is_not_ready(
    client: httpx.AsyncClient, service: TeacherService, scorer: FakeScorer
) -> None:
    await client.post("/sleep")
    scorer.fault = "constant"
    response = await client.post("/wake")
    assert response.status_code == 503
    assert "awake, but the canary sequence got the same logprob" in response.json()["detail"]
    assert "same logprob" in (await ready(client))[1]
    assert (await client.post("/logprobs", json=BODY)).status_code == 503
    scorer.fault = None
    await service.canary.check()
    assert (await ready(client))[0] == 200


@pytest.mark.parametrize(("fault", "before", "after"), [("insomnia", (), "recorded"), ("coma", ("/sleep",), "asleep")])
async def test_an_engine_that_cannot_leaves_the_state_as_it_was(
    client: httpx.AsyncClient, scorer: FakeScorer, fault: str, before: tuple[str, ...], after: str
) -> None:
    for path in before:
        await client.post(path)
    scorer.fault = fault
    response = await client.post("/wake" if before else "/sleep")
    assert (response.status_code, response.json()["type"]) == (500, "opd:internal")
    assert after in (await ready(client))[1]


async def test_refusals(config: object, service: TeacherService, scorer: FakeScorer) -> None:
    starting = TeacherService(config, FakeScorer())
    transport = httpx.ASGITransport(create_app(starting, key=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        for path in ("/sleep", "/wake"):
            response = await client.post(path)
            assert (response.status_code, response.json()["detail"]) == (503, "the engine is starting")
            assert response.headers["retry-after"]
    transport = httpx.ASGITransport(create_app(service, key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        for path in ("/sleep", "/wake"):
            assert (await client.post(path)).status_code == 401
        assert not scorer.asleep
        shown = {"authorization": "Bearer secret"}
        assert (await client.post("/sleep", headers=shown)).status_code == 200
        scorer.alive = False
        response = await client.post("/wake", headers=shown)
        assert (response.status_code, response.json()["detail"]) == (503, "the engine has died")
