"""How long a client waits before it asks again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from shared import addresses
from shared.addresses import MAX_TRIES, Addresses, pause_after
from shared.errors import TeacherError


def test_pauses_without_a_word_from_the_server_grow_up_to_a_longest_one():
    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    growing = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [pause_after(number, 0.0, 60.0, Most()) for number in range(8)] == growing
    assert [pause_after(number, 2.0, 60.0, Most()) for number in (0, 4, 5, 6, 7)] == [4.0, 4.0, 5.2, 7.0, 7.0]
    assert pause_after(0, 7.0, 10.0, Most()) == 8.5  # the try itself needs time too
    assert pause_after(0, 7.0, 6.0, Most()) == 7.0


@pytest.mark.parametrize(("asked_s", "width_s"), [(0.0, 0.1), (1.0, 1.0), (7.0, 7.0)])
def test_clients_refused_together_come_back_spread_evenly_and_none_too_early(asked_s: float, width_s: float):
    rng = random.Random(7)
    pauses = [pause_after(0, asked_s, 60.0, rng) for _ in range(400)]
    assert asked_s <= min(pauses) and max(pauses) < asked_s + width_s
    tenths = [int(10 * (pause - asked_s) / width_s) for pause in pauses]
    assert all(20 < tenths.count(tenth) < 65 for tenth in range(10))


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Pauses that were made, none of which takes time."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(addresses.asyncio, "sleep", note)
    return pauses


async def test_a_call_waits_at_least_as_long_as_the_server_asks(slept: list[float]):
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Full\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = Addresses([url], None, connections=1, timeout_s=600, rng=random.Random(3))
    with pytest.raises(TeacherError) as caught:
        await client.call("GET", "/info", {}, b"", 100)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2.0)
    same = random.Random(3)
    assert slept == [pause_after(number, 2.0, 600.0, same) for number in range(MAX_TRIES - 1)]
    await client.aclose()
    server.close()
