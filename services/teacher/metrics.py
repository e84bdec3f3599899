"""Prometheus metrics of a teacher, in a registry of its own so that several apps can live in one test process."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All metrics; names end in their unit."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        names = {"registry": self.registry}
        self.requests = Counter(
            "opd_teacher_requests", "Requests to /logprobs and /generate by HTTP status", ["status"], **names
        )
        self.tokens = Counter("opd_teacher_tokens", "Tokens of answered requests", **names)
        self.cached_tokens = Counter(
            "opd_teacher_cached_tokens", "Of those, tokens that came out of the prefix cache, not computed", **names
        )
        self.rows = Counter("opd_teacher_scored_rows", "Rows returned", **names)
        self.generated = Counter("opd_teacher_generated_tokens", "Tokens written for answered requests", **names)
        self.queued_tokens = Gauge("opd_teacher_queued_tokens", "Tokens admitted and not yet answered", **names)
        self.engine_requests = Gauge("opd_teacher_engine_requests", "Sequences that the engine holds", **names)
        self.request_s = Histogram(
            "opd_teacher_request_seconds", "From the complete body to the answer", buckets=_SECONDS, **names
        )
        self.non_finite = Counter("opd_teacher_non_finite", "Logprobs of -inf that were returned", **names)
        self.bad_scores = Counter(
            "opd_teacher_bad_scores", "Engine answers refused (NaN, wrong rows, failure)", **names
        )
        self.aborted = Counter("opd_teacher_aborted", "Requests whose client went away", **names)
        self.ready = Gauge("opd_teacher_ready", "1 while the canary sequence keeps its logprobs", **names)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return prometheus_client.generate_latest(self.registry)
