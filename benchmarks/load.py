"""The benchmark's client: `python -m benchmarks.load` reads a plan from stdin and writes what it measured to stdout.

A process of its own, the same for every server, so that no server gets the better client. It sends bodies that were
encoded before the clock starts, keeps `concurrency` of them in flight, and reads each answer's bytes to the end without
parsing them: that spares vLLM's JSON the time which its users spend on it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from benchmarks import requests

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Target:
    """Where requests go and what they ask for; see requests.body."""

    url: str
    api: str
    top_k: int | None = None
    prompt_len: int | None = None
    logprobs_dtype: str = "float16"
    teacher: str = "bench"


@dataclass(frozen=True)
class Plan:
    """One measurement. Requests are dealt to the targets in turn (one target: all of them)."""

    targets: list[Target]
    num_requests: int
    num_tokens: int
    vocab_size: int
    concurrency: int
    seed: int


@dataclass
class Measured:
    """What one plan gave, per target: `latency_ms` and `answer_bytes` hold one number a request."""

    seconds: float
    client_cpu_s: float
    latency_ms: list[list[float]] = field(default_factory=list)
    answer_bytes: list[list[int]] = field(default_factory=list)

    def median_ms(self, target: int = 0) -> float:
        """Median latency of a target."""
        return statistics.median(self.latency_ms[target])

    def bytes_per_answer(self, target: int = 0) -> float:
        """Mean size of a target's answers."""
        return statistics.fmean(self.answer_bytes[target])


def measure(plan: Plan) -> Measured:
    """Carry out a plan in a client process.

    Raises:
        RuntimeError: a request was not answered with 200; says with what.
    """
    text = json.dumps(asdict(plan))
    done = subprocess.run([sys.executable, "-m", "benchmarks.load"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr.strip().splitlines()[-1][:500]}")
    return Measured(**json.loads(done.stdout))


async def carry_out(plan: Plan) -> Measured:
    """The plan itself, in this process."""
    sequences = requests.token_ids(plan.num_requests, plan.num_tokens, plan.vocab_size, plan.seed)
    jobs = []
    for index, ids in enumerate(sequences):
        number = index % len(plan.targets)
        jobs.append((number, *_request(plan.targets[number], ids)))
    measured = Measured(0.0, 0.0, [[] for _ in plan.targets], [[] for _ in plan.targets])
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
        queue = iter(jobs)
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_work(session, queue, measured) for _ in range(plan.concurrency)))
        measured.seconds, measured.client_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return measured


def _request(target: Target, ids: Sequence[int]) -> tuple[str, bytes, dict[str, str]]:
    return requests.body(
        target.api, target.url, ids, target.top_k, target.prompt_len, target.logprobs_dtype, target.teacher
    )


async def _work(session: aiohttp.ClientSession, queue: Any, measured: Measured) -> None:
    for number, url, body, headers in queue:
        begun = time.perf_counter()
        async with session.post(url, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {answer[:300]!r}")
        measured.latency_ms[number].append(1000 * (time.perf_counter() - begun))
        measured.answer_bytes[number].append(len(answer))


def main() -> None:
    """Plan in, measurement out."""
    tree = json.load(sys.stdin)
    tree["targets"] = [Target(**target) for target in tree["targets"]]
    json.dump(asdict(asyncio.run(carry_out(Plan(**tree)))), sys.stdout)


if __name__ == "__main__":
    main()
