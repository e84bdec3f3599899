"""What a rollout worker counts, for Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram

COMPLETIONS = Counter("opd_rollout_completions_total", "Completions published")
TOKENS = Counter("opd_rollout_tokens_total", "Response tokens published")
REQUEUED = Counter("opd_rollout_requeued_total", "Prompts given back for another try", ["reason"])
LEASES_LOST = Counter("opd_rollout_leases_lost_total", "Prompts whose lease ran out while we worked on them")
HELD = Counter("opd_rollout_held_total", "Times that the gate let no prompt through", ["reason"])
IN_FLIGHT = Gauge("opd_rollout_prompts_in_flight", "Prompts being sampled or scored")
VERSION = Gauge("opd_rollout_policy_version", "Policy version that is served and checked")
LOADS = Counter("opd_rollout_weight_loads_total", "Weight loads", ["outcome"])
LOAD_SECONDS = Histogram("opd_rollout_weight_load_seconds", "Reading, checking and loading a push")
CANARY_ERROR = Gauge("opd_rollout_canary_max_error", "Largest difference to the trainer's canary logprobs, nats")
STAGE_SECONDS = Counter("opd_rollout_stage_seconds_total", "Time of prompts by stage", ["stage"])


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Adds the time spent inside to a stage of a prompt's way."""
    started = time.perf_counter()
    try:
        yield
    finally:
        STAGE_SECONDS.labels(name).inc(time.perf_counter() - started)
