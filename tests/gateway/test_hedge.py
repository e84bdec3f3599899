"""When a request is asked a second time, how often that may be, and that the first one is dropped."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.gateway.answers import read_head
from services.gateway.hedge import MAX_SHARE, MIN_SAMPLES, Hedge
from services.gateway.upstream import Answer
from shared.wire import JSON, MSGPACK, LogprobsResponse, encode_response
from tests.conftest import wait_until
from tests.gateway.bed import BODY, Bed, counted, more, steady_load


def observed(count: int, quantile: float = 0.9) -> Hedge:
    hedge = Hedge(quantile)
    for number in range(count):
        hedge.observe(744, (number % 100 + 1) / 100)  # 744 tokens and the fixed cost of 256 are 1,000
    return hedge


def test_unusual_is_the_quantile_of_seconds_per_token():
    assert observed(MIN_SAMPLES - 1).begin(744) is None
    hedge = observed(400)
    assert hedge.begin(744) == pytest.approx(0.91)
    assert hedge.begin(1744) == pytest.approx(2 * 0.91)


def test_a_hundred_requests_pay_for_five_hedges():
    hedge = Hedge(0.9)
    assert not hedge.spend()
    spent = 0
    for _ in range(1000):
        hedge.begin(10)
        spent += hedge.spend()
    assert 0.9 * MAX_SHARE * 1000 <= spent <= MAX_SHARE * 1000
    for _ in range(1000):
        hedge.begin(10)
    assert [hedge.spend() for _ in range(6)].count(True) == 4  # what was not used does not pile up


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_an_answer_begins_with_whose_it_is(codec):
    body, media_type = encode_response(LogprobsResponse('m"\\ö', "f1", []), codec)
    assert read_head(Answer(200, {"content-type": media_type}, body)) == ('m"\\ö', "f1")
    for other in (
        b"",
        b"{}",
        b"\x80",
        b"\x82\xa1a\x01\xa1b\x02",
        b'{"results": []}',
        b"\xdf\xff\xff\xff\xff",
        body[:9],
    ):
        assert read_head(Answer(200, {"content-type": media_type}, other)) is None


async def test_the_first_answer_wins_and_the_other_request_is_dropped(bed: Bed):
    first, second = await bed.replica(), await bed.replica()
    await bed.gateway(first.port, second.port, args=["--set", "gateway.hedge_quantile=0.95"], timeout_s=60)
    async with steady_load(bed.url) as results, httpx.AsyncClient(base_url=bed.url) as client:

        async def won() -> bool:
            return 'opd_gateway_hedges_total{result="won",teacher="math"}' in (await client.get("/metrics")).text

        await more(results, 200)
        assert await counted(first, "answered", 20) and await counted(second, "answered", 20)
        await first.behave("hang")
        await wait_until(won, what="a hedge wins")
        await wait_until(lambda: counted(first, "abandoned", 1), what="the hanging replica is told")
        first.service.process.kill()  # what still hangs there fails, and is answered by the other
    assert set(results) == {200}


async def test_another_model_at_a_replicas_address_is_never_believed(bed: Bed):
    """Between its start and the next probe it looks like the old one; its answers do not."""
    right, changed = await bed.replica("slow"), await bed.replica()
    await bed.gateway(right.port, changed.port, args=["--set", "gateway.probe_interval_s=60"])
    async with httpx.AsyncClient(base_url=bed.url) as client:
        changed.service.stop()
        changed = await bed.replica(port=changed.port, fingerprint="f2")
        async with asyncio.TaskGroup() as tasks:
            bodies = [BODY | {"token_ids": [[number, 2, 3, 4]]} for number in range(16)]
            answers = [tasks.create_task(client.post("/logprobs", json=body)) for body in bodies]
    assert {answer.result().json()["fingerprint"] for answer in answers} == {"f1"}
    assert (await changed.counts())["answered"] >= 1
