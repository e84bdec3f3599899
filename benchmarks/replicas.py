"""What a second replica is worth: a large request shared out over both, and slow answers asked for twice.

Two teachers with one thread each, so that on two cores a second replica brings a core of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import requests, servers
from benchmarks.models import VOCAB_SIZE
from benchmarks.report import Line
from benchmarks.serve import NUM_TOKENS
from benchmarks.servers import EngineSettings, Server
from shared.client import LogprobsClient
from shared.wire import LogprobsRequest

_SEQUENCES = 16
_SPLIT_ROUNDS = 7
_IN_FLIGHT = 4
_LEARN_REQUESTS = 120  # a gateway hedges once it knows what is usual
_TAIL_S = 24.0
_STOP_S, _EVERY_S = 2.0, 6.0
_TIMEOUT_S = 60.0


def run(settings: EngineSettings, logs: Path) -> list[Line]:
    """A large request in front of one replica and of two; the slowest answers without and with hedging."""
    single = replace(settings, threads=1)
    with contextlib.ExitStack() as stack:
        teachers = [stack.enter_context(servers.teacher(single, logs, log=f"teacher-{n}")) for n in (1, 2)]
        urls = [teacher.url for teacher in teachers]
        alone = stack.enter_context(servers.gateway({"bench": urls[:1]}, logs, log="gateway-alone"))
        both = stack.enter_context(servers.gateway({"bench": urls}, logs, log="gateway-both"))
        hedging = stack.enter_context(
            servers.gateway({"bench": urls}, logs, "gateway.hedge_quantile=0.95", log="gateway-hedging")
        )
        return [
            *asyncio.run(_split(alone, both, settings.top_k)),
            *asyncio.run(_tail("not hedged", both, teachers[0], settings.top_k, seed=1)),
            *asyncio.run(_tail("hedged", hedging, teachers[0], settings.top_k, seed=2)),
        ]


async def _split(alone: Server, both: Server, top_k: int) -> list[Line]:
    """One request at a time, in turn at the gateway with one replica and at the one with two."""
    spent: dict[str, list[float]] = {alone.url: [], both.url: []}
    seeds = itertools.count()  # every request is new to the replicas' prefix caches
    for number, url in itertools.product(range(_SPLIT_ROUNDS + 1), spent):
        async with _client(url) as client:
            seconds = await _timed(client, _request(_SEQUENCES, top_k, seed=next(seeds)))
        if number:  # the first one warms up
            spent[url].append(1000 * seconds)
    whole, split = (statistics.median(times) for times in spent.values())
    name = f"{_SEQUENCES} × {NUM_TOKENS} tokens in one request"
    return [
        Line("replicas", f"{name}, one replica, median", whole, "ms"),
        Line("replicas", f"{name}, split over two, median", split, "ms"),
        Line("replicas", "speed of two / one", whole / split, "x"),
    ]


async def _tail(label: str, gateway: Server, stopped: Server, top_k: int, seed: int) -> list[Line]:
    """Small requests, while one of two replicas stands still for a third of the time."""
    seeds = itertools.count(1_000_000 * seed)
    times: list[float] = []

    async def work(client: LogprobsClient, until: float, most: int) -> None:
        while time.monotonic() < until and len(times) < most:
            times.append(1000 * await _timed(client, _request(1, top_k, seed=next(seeds))))

    async with _client(gateway.url) as client:
        await asyncio.gather(*(work(client, time.monotonic() + _TIMEOUT_S, _LEARN_REQUESTS) for _ in range(_IN_FLIGHT)))
        times.clear()
        async with _standing_still(stopped):
            end = time.monotonic() + _TAIL_S
            await asyncio.gather(*(work(client, end, 10**9) for _ in range(_IN_FLIGHT)))
    return [
        Line("replicas", f"one stands still, {label}: requests", len(times), ""),
        *(
            Line("replicas", f"one stands still, {label}: p{part}", _quantile(times, part), "ms")
            for part in (50, 95, 99)
        ),
    ]


@contextlib.asynccontextmanager
async def _standing_still(server: Server) -> AsyncIterator[None]:
    """Stops the server's processes for _STOP_S out of every _EVERY_S."""

    async def again_and_again() -> None:
        while True:
            await asyncio.sleep(_EVERY_S - _STOP_S)
            os.killpg(server.pid, signal.SIGSTOP)
            await asyncio.sleep(_STOP_S)
            os.killpg(server.pid, signal.SIGCONT)

    task = asyncio.create_task(again_and_again())
    try:
        yield
    finally:
        task.cancel()
        os.killpg(server.pid, signal.SIGCONT)


def _client(url: str) -> LogprobsClient:
    return LogprobsClient(url, None, connections=_IN_FLIGHT, timeout_s=_TIMEOUT_S)


def _request(num_sequences: int, top_k: int, seed: int) -> LogprobsRequest:
    ids = requests.token_ids(num_sequences, NUM_TOKENS, VOCAB_SIZE, seed)
    return LogprobsRequest(
        top_k=top_k, token_ids=ids, prompt_len=[NUM_TOKENS // 2] * num_sequences, logprobs_dtype="float16"
    )


async def _timed(client: LogprobsClient, request: LogprobsRequest) -> float:
    started = time.monotonic()
    await client.score(request, "bench")
    return time.monotonic() - started


def _quantile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, percent * len(values) // 100)]
