"""The canary: what it sees, when it is asked, and that a suspicious answer is not served before it was."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from services.teacher import canary as canary_module
from services.teacher.canary import SUSPICIOUS_ROWS, Canary
from services.teacher.service import TeacherService
from shared.errors import RunFailed
from tests.conftest import wait_until
from tests.teacher.fake_scorer import FakeScorer

LONG = {"token_ids": [list(range(SUSPICIOUS_ROWS + 1))]}
SHORT = {"token_ids": [[1, 2, 3]]}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("constant", "same logprob -5.770 for every token"),
        ("nan", "not finite"),
        ("shifted", "moved by 0.5000 nats"),
        ("raise", "could not be scored"),
    ],
)
async def test_the_canary_sees_a_teacher_that_is_up_and_useless(
    client: httpx.AsyncClient, service: TeacherService, scorer: FakeScorer, fault: str, words: str
) -> None:
    assert (await client.get("/readyz")).status_code == 200
    scorer.fault = fault
    await service.canary.check()
    response = await client.get("/readyz")
    assert response.status_code == 503
    assert words in response.json()["reason"]
    assert "opd_teacher_ready 0.0" in (await client.get("/metrics")).text
    scorer.fault = None
    await service.canary.check()
    assert (await client.get("/readyz")).status_code == 200


async def test_an_engine_that_hangs_is_not_ready(scorer: FakeScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary(scorer)
    assert await canary.check()
    scorer.gate.clear()
    monkeypatch.setattr("services.teacher.canary.TIMEOUT_S", 0.02)
    assert not await canary.check()
    assert "not scored within" in canary.reason


async def test_a_model_that_answers_nonsense_from_the_start_ends_the_service(
    config: object, scorer: FakeScorer
) -> None:
    scorer.fault = "constant"
    with pytest.raises(RunFailed, match="same logprob"):
        await TeacherService(config, scorer).start()


async def test_a_long_queue_is_no_failure(scorer: FakeScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary(scorer)
    assert await canary.check()
    scorer.gate.clear()
    monkeypatch.setattr("services.teacher.canary.TIMEOUT_S", 0.02)
    checking = asyncio.create_task(canary.check())
    await wait_until(lambda: scorer.in_flight == 1)
    assert not canary.observe(np.array([-1.0, -2.0]))  # others get good answers meanwhile
    assert await checking


@pytest.mark.parametrize("fields", [LONG, {"token_ids": [[1, 2]] * SUSPICIOUS_ROWS}])
async def test_a_constant_answer_is_not_served_by_a_broken_engine(
    client: httpx.AsyncClient, scorer: FakeScorer, fields: dict
) -> None:
    scorer.fault = "constant"
    response = await client.post("/logprobs", json=fields)
    assert response.status_code == 500
    assert "the same logprob" in response.json()["detail"]
    ready = await client.get("/readyz")
    assert (ready.status_code, "same logprob -5.770" in ready.json()["reason"]) == (503, True)
    refused = await client.post("/logprobs", json=SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert "opd_teacher_bad_scores_total 1.0" in (await client.get("/metrics")).text


async def test_a_constant_answer_of_an_able_engine_is_served(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    before = scorer.scored
    same = {"token_ids": [[1] * (SUSPICIOUS_ROWS + 1)]}  # one token after itself, over and over
    assert (await client.post("/logprobs", json=same)).status_code == 200
    assert scorer.scored == before + 2  # the answer and the canary
    assert (await client.post("/logprobs", json=LONG)).status_code == 200
    assert scorer.scored == before + 3


def test_what_is_suspicious(scorer: FakeScorer) -> None:
    def observe(*answers: list[float]) -> list[bool]:
        canary = Canary(scorer)
        return [canary.observe(np.array(answer, np.float32)) for answer in answers]

    rows = SUSPICIOUS_ROWS
    assert observe([-5.77] * rows) == [True]
    assert observe([-5.77] * (rows - 1)) == [False]
    assert observe([-5.77] * (rows - 1), [-5.77]) == [False, True]
    assert observe([-5.77] * (rows - 1), [-5.78], [-5.77]) == [False] * 3
    assert observe([-5.77] * (rows - 1), [], [-1, -2], [-5.77]) == [False] * 4
    assert observe([-np.inf] * rows) == [True]
    assert observe([0.0] * rows) == [True]
    assert observe([-np.inf, *[-1.0] * rows]) == [False]


async def test_it_is_scored_while_idle_and_not_while_good_answers_come(
    service: TeacherService, scorer: FakeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: asyncio.Queue[bool] = asyncio.Queue()  # what each wait of INTERVAL_S ends with: suspicion or not
    now = 0.0
    canary = Canary(scorer, clock=lambda: now)
    monkeypatch.setattr(canary, "_wait_for_suspicion", lambda seconds: rounds.get())
    assert await canary.check()
    awake = True
    watching = asyncio.create_task(canary.watch(lambda: awake))

    async def checks_after(*, seconds: float = 5.0, suspected: bool = False) -> int:
        nonlocal now
        before, now = scorer.scored, now + seconds
        rounds.put_nowait(suspected)
        for _ in range(20):
            await asyncio.sleep(0)
        return scorer.scored - before

    good = np.array([-1.0, -2.0])
    assert await checks_after() == 1  # idle
    canary.observe(good)
    assert await checks_after() == 0  # busy
    assert await checks_after() == 1
    canary.observe(good)
    assert await checks_after(suspected=True) == 1
    canary.observe(good)
    assert await checks_after(seconds=canary_module.BUSY_INTERVAL_S) == 1  # a moved model gives good-looking answers
    canary.observe(good)
    canary.reason = "not able"
    assert await checks_after() == 1
    assert canary.ok
    awake = False
    assert await checks_after() == 0
    watching.cancel()


async def test_a_failed_answer_has_it_scored_at_once(
    client: httpx.AsyncClient, service: TeacherService, scorer: FakeScorer
) -> None:
    watching = asyncio.create_task(service.canary.watch(lambda: True))
    await asyncio.sleep(0)
    scorer.fault = "raise"
    assert (await client.post("/logprobs", json=SHORT)).status_code == 500
    await wait_until(lambda: not service.canary.ok, timeout_s=canary_module.INTERVAL_S / 2)
    watching.cancel()


async def test_callers_that_wait_share_one_scoring(scorer: FakeScorer) -> None:
    canary = Canary(scorer)
    scorer.gate.clear()
    first = asyncio.create_task(canary.check())
    await wait_until(lambda: scorer.in_flight == 1)
    others = [asyncio.create_task(canary.check()) for _ in range(5)]
    await asyncio.sleep(0)
    scorer.gate.set()
    assert await first and all(await asyncio.gather(*others))
    assert scorer.scored == 2  # what began before they asked proves nothing to the five
