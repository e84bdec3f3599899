"""Our teacher beside `vllm serve`, the same engine without logprobs, and the arithmetic floor.

Both servers are up, and are asked in turn. The sequences of all requests differ from the first token on, so that no
prefix cache helps. For both, an answer counts as given when its last byte is read; parsing vLLM's JSON costs its users
more than that.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.floor import rows_per_s
from benchmarks.load import Plan, Target
from benchmarks.models import HIDDEN, VOCAB_SIZE
from benchmarks.report import Line
from benchmarks.requests import TEACHER, VLLM
from benchmarks.rounds import Job, Result, alternate
from benchmarks.servers import EngineSettings, Server, teacher, vllm_serve

NUM_TOKENS = 512
IN_FLIGHT = 16
_ROUNDS = 3
_SECTION = "serve"


def run(settings: EngineSettings, logs: Path) -> list[Line]:
    """Measures 1 and 2 of issue 3."""
    with teacher(settings, logs) as ours, vllm_serve(settings, logs) as theirs:
        found = alternate(_jobs(ours, theirs, settings.top_k), _ROUNDS)
    floor = rows_per_s(8 * NUM_TOKENS, HIDDEN, VOCAB_SIZE, settings.top_k, settings.threads)
    return [*_against_serve(found), *_against_engine(found, floor)]


def _jobs(ours: Server, theirs: Server, top_k: int) -> dict[str, Job]:
    def job(server: Server, api: str, num_requests: int, k: int | None, prompt_len: int | None, dtype: str) -> Job:
        target = Target(server.url, api, k, prompt_len, dtype)
        return Job(server, Plan([target], num_requests, NUM_TOKENS, VOCAB_SIZE, IN_FLIGHT, seed=0))

    half = NUM_TOKENS // 2
    return {
        "vllm": job(theirs, VLLM, 16, top_k, None, ""),
        "whole": job(ours, TEACHER, 64, top_k, None, "float16"),
        "half": job(ours, TEACHER, 64, top_k, half, "float16"),
        "wide": job(ours, TEACHER, 32, top_k, None, "float32"),
        "forward": job(theirs, VLLM, 320, None, None, ""),
    }


def _against_serve(found: dict[str, Result]) -> list[Line]:
    vllm, whole, half, wide = found["vllm"], found["whole"], found["half"], found["wide"]
    rows, half_rows = NUM_TOKENS - 1, NUM_TOKENS // 2
    row_bytes = vllm.bytes_per_answer / rows

    def line(name: str, value: float, unit: str, at_least: float | None = None, at_most: float | None = None) -> Line:
        return Line(_SECTION, name, value, unit, at_least, at_most)

    return [
        line("vllm serve, prompt_logprobs", vllm.tokens_per_s, "tokens/s"),
        line("teacher, whole sequences, float16", whole.tokens_per_s, "tokens/s"),
        line("teacher, whole sequences, float32", wide.tokens_per_s, "tokens/s"),
        line("teacher, last half scored, float16", half.tokens_per_s, "tokens/s"),
        line("whole sequences / vllm serve", whole.tokens_per_s / vllm.tokens_per_s, "x", at_least=5),
        line("last half scored / vllm serve", half.tokens_per_s / vllm.tokens_per_s, "x", at_least=10),
        line("vllm serve, bytes a row", row_bytes, "bytes"),
        line("teacher, bytes a row, float16 / JSON", whole.bytes_per_answer / rows / row_bytes, "x", at_most=0.09),
        line("teacher, bytes a row, float32 / JSON", wide.bytes_per_answer / rows / row_bytes, "x", at_most=0.12),
        line("teacher, bytes a row, last half / JSON", half.bytes_per_answer / half_rows / row_bytes, "x"),
        line("vllm serve, processor time", vllm.server_cpu_us, "µs/token"),
        line("teacher, processor time", whole.server_cpu_us, "µs/token"),
        line("client's part of a core, vllm serve", vllm.client_share, "x"),
        line("client's part of a core, teacher", whole.client_share, "x"),
    ]


def _against_engine(found: dict[str, Result], floor_rows_per_s: float) -> list[Line]:
    whole, half, forward = found["whole"], found["half"], found["forward"]
    rows_per_s_of_ours = whole.tokens_per_s * (NUM_TOKENS - 1) / NUM_TOKENS
    return [
        Line(_SECTION, "engine's forward without logprobs", forward.tokens_per_s, "tokens/s"),
        Line(_SECTION, "whole sequences / forward", whole.tokens_per_s / forward.tokens_per_s, "x"),
        Line(_SECTION, "last half scored / forward", half.tokens_per_s / forward.tokens_per_s, "x"),
        Line(_SECTION, "arithmetic floor (torch, no server)", floor_rows_per_s, "rows/s"),
        Line(_SECTION, "whole sequences / floor", rows_per_s_of_ours / floor_rows_per_s, "x"),
    ]
