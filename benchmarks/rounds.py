"""Measures several things in turn (A B A B …), so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from benchmarks.load import Measured, Plan, measure
from benchmarks.servers import Server


@dataclass(frozen=True)
class Job:
    """A plan, and the server whose processor time it costs."""

    server: Server
    plan: Plan


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of one job.

    Attributes:
        tokens_per_s: whole sequences sent, however many of their rows were asked for.
        server_cpu_us: processor time of the server and its children for a token, in microseconds.
        client_share: part of one core that the client took.
    """

    tokens_per_s: float
    server_cpu_us: float
    bytes_per_answer: float
    median_ms: float
    client_share: float


def alternate(jobs: Mapping[str, Job], rounds: int) -> dict[str, Result]:
    """Each job once to warm up, then `rounds` times in turn; every time other sequences are sent."""
    found: dict[str, list[tuple[Measured, float]]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for place, (name, job) in enumerate(jobs.items()):
            plan = replace(job.plan, seed=1000 * number + place)
            if number == 0:
                plan = replace(plan, num_requests=min(plan.num_requests, plan.concurrency))
            before = cpu_s(job.server)
            measured = measure(plan)
            if number:
                found[name].append((measured, cpu_s(job.server) - before))
    return {name: _medians(jobs[name].plan, runs) for name, runs in found.items()}


def cpu_s(server: Server) -> float:
    """Processor seconds that a server and its children have used so far."""
    parent = psutil.Process(server.pid)
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _medians(plan: Plan, runs: list[tuple[Measured, float]]) -> Result:
    num_tokens = plan.num_requests * plan.num_tokens
    return Result(
        tokens_per_s=statistics.median(num_tokens / measured.seconds for measured, _ in runs),
        server_cpu_us=statistics.median(1e6 * cpu / num_tokens for _, cpu in runs),
        bytes_per_answer=statistics.median(measured.bytes_per_answer() for measured, _ in runs),
        median_ms=statistics.median(measured.median_ms() for measured, _ in runs),
        client_share=statistics.median(measured.client_cpu_s / measured.seconds for measured, _ in runs),
    )
