"""With a real model: scoring beside the engine's prefill without logprobs, and what prefix reuse saves."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from benchmarks.load import Plan, Target
from benchmarks.report import Line
from benchmarks.requests import TEACHER, VLLM
from benchmarks.rounds import Job, alternate
from benchmarks.serve import IN_FLIGHT, NUM_TOKENS
from benchmarks.servers import EngineSettings, Server, teacher, vllm_serve
from shared.errors import ConfigError
from shared.wire import MSGPACK, LogprobsRequest, decode_response, encode_request

_ROUNDS = 2
_GROUPS = 4
_COMPLETIONS = 8
_PROMPT_TOKENS = 384
_ANSWER_TOKENS = 64
_MAX_ANSWER_BYTES = 64 * 2**20
_SECTION = "smollm2"


@dataclass(frozen=True)
class _Group:
    """One request of eight sequences: tokens sent, tokens of them that the engine computed, seconds."""

    tokens: int
    engine_tokens: int
    seconds: float


def run(settings: EngineSettings, logs: Path, model: Path) -> list[Line]:
    """Measure 4 of issue 3. Raises ConfigError where the model has not been fetched."""
    config = model / "config.json"
    if not config.exists():
        raise ConfigError(f"{model} is not there: run `opd fetch smollm2-135m` first (`make bench-scoring` does)")
    vocab_size = json.loads(config.read_text())["vocab_size"]
    real = replace(settings, model=model)
    with teacher(real, logs) as ours:
        with vllm_serve(real, logs) as theirs:
            found = alternate(_jobs(ours, theirs, settings.top_k, vocab_size), _ROUNDS)
        shared, apart = _prefix_reuse(ours, settings.top_k, vocab_size)
    whole, prefill = found["whole"].tokens_per_s, found["prefill"].tokens_per_s
    tokens, engine = sum(group.tokens for group in shared), sum(group.engine_tokens for group in shared)
    seconds = [statistics.median(group.seconds for group in groups) for groups in (apart, shared)]
    return [
        Line(_SECTION, "teacher, whole sequences", whole, "tokens/s"),
        Line(_SECTION, "engine's prefill without logprobs", prefill, "tokens/s"),
        Line(_SECTION, "whole sequences / prefill", whole / prefill, "x"),
        Line(_SECTION, "prefix reuse: tokens sent / computed", tokens / engine, "x", at_least=3),
        Line(_SECTION, "prefix reuse: time of 8 prompts / of 8 completions", seconds[0] / seconds[1], "x"),
    ]


def _jobs(ours: Server, theirs: Server, top_k: int, vocab_size: int) -> dict[str, Job]:
    def plan(target: Target) -> Plan:
        return Plan([target], IN_FLIGHT, NUM_TOKENS, vocab_size, IN_FLIGHT, seed=0)

    return {
        "whole": Job(ours, plan(Target(ours.url, TEACHER, top_k))),
        "prefill": Job(theirs, plan(Target(theirs.url, VLLM))),
    }


def _prefix_reuse(server: Server, top_k: int, vocab_size: int) -> tuple[list[_Group], list[_Group]]:
    """Groups of eight completions of one prompt, and groups of eight prompts with one each, in turn."""
    generator = np.random.default_rng(7)
    shape = (_COMPLETIONS, _PROMPT_TOKENS + _ANSWER_TOKENS)
    shared: list[_Group] = []
    apart: list[_Group] = []
    with httpx.Client(timeout=300) as client:
        for _ in range(_GROUPS):
            ids = generator.integers(0, vocab_size, shape)
            apart.append(_score_group(client, server, ids, top_k))
            ids = generator.integers(0, vocab_size, shape)
            ids[:, :_PROMPT_TOKENS] = ids[0, :_PROMPT_TOKENS]
            shared.append(_score_group(client, server, ids, top_k))
    return shared, apart


def _score_group(client: httpx.Client, server: Server, ids: np.ndarray, top_k: int) -> _Group:
    """One request, as the rollout worker sends it."""
    request = LogprobsRequest(token_ids=ids.tolist(), prompt_len=[_PROMPT_TOKENS] * len(ids), top_k=top_k)
    begun = time.perf_counter()
    answer = client.post(f"{server.url}/logprobs", content=encode_request(request), headers={"content-type": MSGPACK})
    seconds = time.perf_counter() - begun
    answer.raise_for_status()
    usage = decode_response(answer.content, MSGPACK, _MAX_ANSWER_BYTES).usage
    return _Group(usage["tokens"], usage["tokens"] - usage["cached_tokens"], seconds)
