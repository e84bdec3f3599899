"""`shared.client` against a real gateway and a real replica."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import httpx
import numpy as np
import pytest

from shared.client import LogprobsClient
from shared.errors import TeacherError
from shared.wire import LogprobsRequest
from shared.wire_generate import GenerateRequest
from tests.conftest import free_port, wait_until
from tests.gateway.bed import BODY, Bed, counted

REQUEST = LogprobsRequest(token_ids=[[1, 2, 3, 4], [9, 8]], prompt_len=[2, 1], top_k=3)


def client_of(url: str | list[str], timeout_s: float = 10.0, key: str | None = None) -> LogprobsClient:
    return LogprobsClient(url, key, connections=8, timeout_s=timeout_s)


async def error_of(url: str, timeout_s: float = 10.0, teacher: str = "math") -> TeacherError:
    async with client_of(url, timeout_s) as client:
        with pytest.raises(TeacherError) as caught:
            await client.score(REQUEST, teacher)
    return caught.value


async def test_scores_and_info_from_gateway_and_teacher(bed: Bed):
    stand = await bed.replica()
    await bed.gateway(stand.port)
    for url in (bed.url, stand.url):
        async with client_of(url) as client:
            response = await client.score(REQUEST, "math")
            assert (response.model, response.fingerprint) == ("math", "f1")
            np.testing.assert_array_equal(response.results[0].logprobs, np.float32([-3, -4]))
            np.testing.assert_array_equal(response.results[1].top_ids, [[0, 1, 2]])
            assert (await client.info("math"))["vocab_size"] == 2**20
            with pytest.raises(TeacherError) as caught:
                await client.info("chat")
            assert caught.value.status == 404
    headers = (await stand.counts())["headers"]
    assert headers["x-num-tokens"] == "6" and headers["x-teacher"] == "math"


async def test_continuations_come_through_the_gateway_and_are_retried_like_scores(bed: Bed):
    bad, good = await bed.replica("fail"), await bed.replica()
    await bed.gateway(bad.port, good.port)
    request = GenerateRequest(token_ids=[[1, 2, 3], [7]], max_tokens=3)
    async with client_of(bed.url) as client:
        for _ in range(8):
            assert await client.generate(request, "math") == [[1, 2, 3], [7, 0]]
        with pytest.raises(TeacherError) as caught:
            await client.generate(request, "chat")
        assert caught.value.status == 404
    assert 1 <= (await bad.counts())["requests"] < 8 == (await good.counts())["requests"]
    await good.behave("shifted")
    async with client_of(good.url) as client:
        with pytest.raises(TeacherError, match=r"2 continuations of 1 to 3 tokens, got lengths \[4, 2\]"):
            await client.generate(request, "math")
    headers = (await good.counts())["headers"]
    assert headers["x-num-tokens"] == "10" and headers["x-teacher"] == "math"


async def test_answers_that_do_not_fit_the_request_are_refused(bed: Bed):
    stand = await bed.replica("shifted")
    error = await error_of(stand.url)
    assert "scored ids are not the ids sent" in error.reason and error.retry_after_s is None
    await stand.behave("endless")
    assert "bytes that fit the request" in (await error_of(stand.url)).reason
    await stand.behave("noise")
    assert "unusable answer" in (await error_of(stand.url)).reason
    await stand.behave("good")
    assert "'math' answered" in (await error_of(stand.url, teacher="chat")).reason


async def test_what_is_tried_again_and_what_is_not(bed: Bed):
    stand = await bed.replica("invalid")
    error = await error_of(stand.url)
    assert error.status == 422 and error.retry_after_s is None
    assert (await stand.counts())["requests"] == 1
    await stand.behave("full")
    error = await error_of(stand.url, timeout_s=2)  # Retry-After is 7: waiting makes no sense
    assert (error.status, error.retry_after_s) == (429, 7.0)
    assert (await stand.counts())["requests"] == 2
    error = await error_of(f"http://127.0.0.1:{free_port()}", timeout_s=0.5)
    assert error.status == 0 and "ConnectError" in error.reason and error.retry_after_s is not None
    await stand.behave("hang")
    error = await error_of(stand.url, timeout_s=0.3)
    assert error.status == 0 and "no answer within 0.3 s" in error.reason


async def test_a_gateway_killed_and_started_again_costs_time_only(bed: Bed):
    stand = await bed.replica("hold")
    gateway = await bed.gateway(stand.port)
    async with client_of(bed.url, timeout_s=30) as client:
        scores = [asyncio.create_task(client.score(REQUEST, "math")) for _ in range(8)]
        await wait_until(lambda: counted(stand, "in_flight", 1))
        gateway.stop(signal.SIGKILL)
        await stand.behave("good")
        await bed.gateway(stand.port)
        for response in await asyncio.gather(*scores):
            np.testing.assert_array_equal(response.results[1].logprobs, np.float32([-8]))


async def test_of_two_gateways_one_killed_costs_no_request(bed: Bed):
    stand = await bed.replica("hold")
    second_port = free_port()
    first = await bed.gateway(stand.port)
    await bed.gateway(stand.port, port=second_port)
    async with client_of([bed.url, f"http://127.0.0.1:{second_port}"], timeout_s=30) as client:
        scores = [asyncio.create_task(client.score(REQUEST, "math")) for _ in range(8)]
        await wait_until(lambda: counted(stand, "in_flight", 8))
        async with httpx.AsyncClient() as direct:
            info = (await direct.get(f"{bed.url}/info/math")).json()
        assert info["replicas"][0]["in_flight"] == 4  # each gateway has its half
        first.stop(signal.SIGKILL)
        await stand.behave("good")
        for response in await asyncio.gather(*scores):
            np.testing.assert_array_equal(response.results[1].logprobs, np.float32([-8]))
        for _ in range(20):
            await client.score(REQUEST, "math")


async def test_of_two_gateways_one_stopped_costs_no_request_and_no_broken_connection(bed: Bed):
    stand, second_port = await bed.replica("slow"), free_port()
    first = await bed.gateway(stand.port)
    await bed.gateway(stand.port, port=second_port)
    second_url = f"http://127.0.0.1:{second_port}"
    said: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def ask_plainly() -> None:
        """A client without retries that goes to the other gateway when it is told to."""
        urls = [bed.url, second_url]
        async with httpx.AsyncClient(timeout=30) as client:
            while not is_over.is_set():
                answer = await client.post(f"{urls[0]}/logprobs", json=BODY)  # a broken connection raises
                said[str(answer.status_code)] += 1
                if answer.status_code == 503:
                    said[f"{answer.json()['type']} {answer.headers['retry-after']} {answer.headers['connection']}"] += 1
                    urls.reverse()

    async def score(client: LogprobsClient) -> None:
        while not is_over.is_set():
            response = await client.score(REQUEST, "math")
            np.testing.assert_array_equal(response.results[1].logprobs, np.float32([-8]))
            said["scored"] += 1

    async with client_of([bed.url, second_url], timeout_s=30) as client:
        tasks = [asyncio.create_task(work) for _ in range(6) for work in (ask_plainly(), score(client))]
        await wait_until(lambda: min(said["200"], said["scored"]) > 20)
        first.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.process.wait, 20) == 0
        before = said["scored"]
        await wait_until(lambda: said["scored"] > before + 20)
        is_over.set()
        await asyncio.gather(*tasks)
    assert said["503"] == said["opd:unavailable 1 close"] == 6  # each of the plain clients was told once
    assert set(said) == {"200", "503", "opd:unavailable 1 close", "scored"}
    assert "Traceback" not in first.output()


async def test_a_gateway_that_hangs_or_refuses_is_left_for_the_other(bed: Bed):
    hanging, full, good = await bed.replica("hang"), await bed.replica("full"), await bed.replica()
    async with client_of([hanging.url, good.url], timeout_s=2) as client:
        for _ in range(4):
            await client.score(REQUEST, "math")
    assert (await good.counts())["answered"] == 4 and (await hanging.counts()).get("requests", 0) <= 1
    async with client_of([full.url, good.url], timeout_s=2) as client:  # its Retry-After is 7 s
        for _ in range(4):
            await client.score(REQUEST, "math")
    async with client_of([full.url, f"http://127.0.0.1:{free_port()}"], timeout_s=1) as client:
        with pytest.raises(TeacherError) as caught:
            await client.score(REQUEST, "math")
    assert caught.value.retry_after_s is not None
