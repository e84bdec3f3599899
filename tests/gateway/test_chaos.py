"""Everything at once, with stand-in replicas: clients without a retry of their own see no error, load evens out."""

from __future__ import annotations

import signal
from collections import Counter

import httpx

from tests.conftest import wait_until
from tests.gateway.bed import Bed, Stand, counted, more, steady_load

KEY = {"OPD_REGISTRATION_KEY": "admin"}
ADMIN = {"authorization": "Bearer admin"}


async def register(bed: Bed, stand: Stand) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.put(f"{bed.url}/replicas/math", json={"url": stand.url}, headers=ADMIN)
        assert answer.status_code in (200, 201)


async def drain(bed: Bed, stand: Stand) -> None:
    async with httpx.AsyncClient() as client:
        headers = {**ADMIN, "x-timeout-s": "20"}
        answer = await client.delete(f"{bed.url}/replicas/math", params={"url": stand.url}, headers=headers, timeout=30)
        assert (answer.status_code, answer.json()["in_flight"]) == (200, 0)


async def wait_even(stands: list[Stand], results: Counter[int | str], count: int = 120) -> None:
    """Wait for `count` more answers in which no replica has less than half or more than twice its share."""

    async def answered() -> list[int]:
        return [(await stand.counts()).get("answered", 0) for stand in stands]

    async def even() -> bool:
        before = await answered()
        await more(results, count)
        done = [after - earlier for earlier, after in zip(before, await answered(), strict=True)]
        mean = sum(done) / len(done)
        return min(done) > mean / 2 and max(done) < mean * 2

    await wait_until(even, 60, "the load evens out")


async def test_one_is_killed_and_returns_a_third_joins_and_the_first_drains(bed: Bed):
    first, second, third = [await bed.replica("slow") for _ in range(3)]
    await bed.gateway(args=["--teacher", "math=register"], env=KEY, wait=False)
    await register(bed, first)
    await register(bed, second)
    await bed.wait_states("ready", "ready")
    async with steady_load(bed.url) as results:
        await wait_even([first, second], results)
        second.service.stop(signal.SIGKILL)
        await bed.wait_states("ready", "ejected")
        await more(results)
        second = await bed.replica("slow", port=second.port)
        await register(bed, second)
        await register(bed, third)
        await bed.wait_states("ready", "ready", "ready")
        await wait_even([first, second, third], results)
        await drain(bed, first)
        first.service.stop(signal.SIGKILL)
        await wait_even([second, third], results)
    assert set(results) == {200}


async def test_one_answers_garbage_one_hangs_one_is_slow(bed: Bed):
    garbage, hanging = await bed.replica("noise"), await bed.replica("hang")
    slow, good, other = await bed.replica("slow"), await bed.replica(), await bed.replica()
    stands = [garbage, hanging, slow, good, other]
    await bed.gateway(*(stand.port for stand in stands), timeout_s=4)
    async with steady_load(bed.url) as results:
        await wait_until(lambda: counted(hanging, "abandoned", 2), 40, "the hanging replica is left")
        await more(results, 200)
        assert (await garbage.counts())["requests"] < 30
        for stand in (slow, good, other):
            assert await counted(stand, "answered", 10)
        await garbage.behave("good")
        await hanging.behave("good")
        await slow.behave("good")
        await bed.wait_states(*["ready"] * 5)
        await wait_even(stands, results, 300)
    assert set(results) == {200}
