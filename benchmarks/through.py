"""What a proxy costs: our gateway before our teacher, and vllm-router before `vllm serve`.

Throughput with 16 in flight, asked directly and through the proxy in turn. Added latency from small requests, one at
a time, every other one through the proxy: the difference of the two medians.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import servers
from benchmarks.load import Plan, Target, measure
from benchmarks.models import VOCAB_SIZE
from benchmarks.report import Line
from benchmarks.requests import TEACHER, VLLM
from benchmarks.rounds import Job, alternate
from benchmarks.serve import IN_FLIGHT, NUM_TOKENS
from benchmarks.servers import EngineSettings, Server

_ROUNDS = 3
_SMALL_TOKENS = 32
_SMALL_REQUESTS = 400  # to each
_ROUTER = "vllm-router==0.1.17"


@dataclass(frozen=True)
class _Cost:
    """Throughput through the proxy relative to direct; a small request's median, and what the proxy adds to it."""

    throughput: float
    direct_ms: float
    added_ms: float


def run_gateway(settings: EngineSettings, logs: Path) -> list[Line]:
    """Our gateway against its targets."""
    with (
        servers.teacher(settings, logs) as teacher,
        servers.gateway({"bench": [teacher.url]}, logs) as proxy,
    ):
        cost = _cost(teacher, proxy, TEACHER, settings.top_k, num_requests=64)
    return [
        Line("gateway", "throughput through it / direct", cost.throughput, "x", at_least=0.95),
        Line("gateway", "small request, direct, median", cost.direct_ms, "ms"),
        Line("gateway", "added at the median", cost.added_ms, "ms", at_most=1.5),
    ]


def run_router(settings: EngineSettings, logs: Path) -> tuple[list[Line], list[str]]:
    """vllm-router measured the same way; its numbers have no target.

    Returns:
        The lines, and a note instead where it cannot be installed or does not carry the request.
    """
    try:
        python = _router_environment(logs.parent / "router-venv")
    except (subprocess.CalledProcessError, OSError) as error:
        return [], [f"{_ROUTER} could not be installed, not measured: {_reason(error)}"]
    with servers.vllm_serve(settings, logs) as serve:
        try:
            with servers.vllm_router(python, serve.url, logs) as proxy:
                cost = _cost(serve, proxy, VLLM, settings.top_k, num_requests=IN_FLIGHT)
        except RuntimeError as error:
            return [], [f"{_ROUTER} did not carry the request: {error}"]
    return [
        Line("router", "vllm-router, throughput through it / direct", cost.throughput, "x"),
        Line("router", "small request, direct, median", cost.direct_ms, "ms"),
        Line("router", "vllm-router, added at the median", cost.added_ms, "ms"),
    ], []


def _cost(direct: Server, proxy: Server, api: str, top_k: int, *, num_requests: int) -> _Cost:
    """One proxy against what is behind it."""

    def plan(*urls: str) -> Plan:
        targets = [Target(url, api, top_k, NUM_TOKENS // 2) for url in urls]
        return Plan(targets, num_requests, NUM_TOKENS, VOCAB_SIZE, IN_FLIGHT, seed=0)

    found = alternate({"direct": Job(direct, plan(direct.url)), "proxy": Job(proxy, plan(proxy.url))}, _ROUNDS)
    small = [Target(url, api, top_k, _SMALL_TOKENS // 2) for url in (direct.url, proxy.url)]
    measure(Plan(small, 40, _SMALL_TOKENS, VOCAB_SIZE, concurrency=1, seed=100_001))
    measured = measure(Plan(small, 2 * _SMALL_REQUESTS, _SMALL_TOKENS, VOCAB_SIZE, concurrency=1, seed=100_002))
    return _Cost(
        throughput=found["proxy"].tokens_per_s / found["direct"].tokens_per_s,
        direct_ms=measured.median_ms(0),
        added_ms=measured.median_ms(1) - measured.median_ms(0),
    )


def _router_environment(folder: Path) -> Path:
    """The interpreter of an environment with vllm-router, made when it is not there; ours stays as it is."""
    python, done = folder.absolute() / "bin" / "python", folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        command = [str(python), "-m", "pip", "install", "--quiet", _ROUTER]
        subprocess.run(command, check=True, capture_output=True)
        done.touch()
    return python


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    lines = output.decode(errors="replace").strip().splitlines() if output else [str(error)]
    return lines[-1][:300] if lines else str(error)
