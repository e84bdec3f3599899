"""Prometheus metrics of the gateway, per teacher and replica."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.gateway.keys import Client
from services.gateway.pool import Pool
from services.gateway.replica import State

_REPLICA = ["teacher", "replica"]
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10})?")
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Counters that the proxy increments; gauges are read from the pools when somebody scrapes."""

    def __init__(self, pools: Mapping[str, Pool], clients: Mapping[str, Client]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LiveCollector(pools, clients))
        common = {"namespace": "opd", "subsystem": "gateway", "registry": self.registry}
        seconds = {"buckets": _SECONDS, **common}
        self.responses = Counter(
            "responses_total", "Answers to clients; teacher is empty if unknown", ["teacher", "status"], **common
        )
        self.key_requests = Counter(
            "key_requests_total",
            "Answers by API key (its name; empty if none was shown); 429 also when the key has too many under way",
            ["key", "status"],
            **common,
        )
        self.request_seconds = Histogram(
            "request_seconds", "Time from a request's head to its answer", ["teacher"], **seconds
        )
        self.attempts = Counter(
            "attempts_total", "Requests sent to a replica, by what came of them", [*_REPLICA, "outcome"], **common
        )
        self.attempt_seconds = Histogram("attempt_seconds", "Time a replica took to answer", _REPLICA, **seconds)
        self.tokens = Counter("tokens_total", "Tokens of answered requests, estimated", _REPLICA, **common)
        self.queue_seconds = Histogram(
            "queue_seconds", "Time that answered requests waited for the replica's engine", _REPLICA, **seconds
        )
        self.engine_seconds = Histogram(
            "engine_seconds", "Time that the replica's engine took for answered requests", _REPLICA, **seconds
        )
        self.engine_tokens = Counter("engine_tokens_total", "Tokens of answers", _REPLICA, **common)
        self.cached_tokens = Counter(
            "cached_tokens_total", "Tokens of answers that the replica had in its prefix cache", _REPLICA, **common
        )
        self.request_bytes = Counter("request_bytes_total", "Bytes of request bodies", ["teacher"], **common)
        self.answer_bytes = Counter("answer_bytes_total", "Bytes of answers", ["teacher"], **common)
        self.retries = Counter("retries_total", "Requests tried again after this replica failed", _REPLICA, **common)
        self.splits = Counter(
            "splits_total", "Requests split over replicas, by what came of it", ["teacher", "result"], **common
        )
        self.hedges = Counter(
            "hedges_total", "Requests asked a second time because they were slow", ["teacher", "result"], **common
        )
        self.ejections = Counter("ejections_total", "Times a replica was ejected", _REPLICA, **common)
        self.probes = Counter("probes_total", "Probes of a replica, by result", [*_REPLICA, "result"], **common)
        self.joined = Counter("replicas_joined_total", "Members added", ["teacher", "origin"], **common)
        self.left = Counter("replicas_left_total", "Members removed, by reason", ["teacher", "reason"], **common)
        self.lookups = Counter(
            "dns_lookups_total", "DNS lookups of a teacher's name, by result", ["teacher", "name", "result"], **common
        )
        self.disconnects = Counter("client_disconnects_total", "Clients gone before the answer", ["teacher"], **common)

    def answered(self, teacher: str, replica: str, headers: Mapping[str, str]) -> None:
        """Count what a replica's answer says it has cost; what it does not say, or says wrongly, is left out."""
        for header, observe, scale in (
            ("x-queue-ms", self.queue_seconds.labels(teacher, replica).observe, 1e-3),
            ("x-engine-ms", self.engine_seconds.labels(teacher, replica).observe, 1e-3),
            ("x-tokens", self.engine_tokens.labels(teacher, replica).inc, 1),
            ("x-cached-tokens", self.cached_tokens.labels(teacher, replica).inc, 1),
        ):
            text = headers.get(header, "")
            if _NUMBER.fullmatch(text):
                observe(float(text) * scale)

    def forget(self, teacher: str, replica: str) -> None:
        """Delete the series of a replica that has left for good."""
        for metric in (
            *(self.attempts, self.attempt_seconds, self.tokens, self.retries, self.ejections, self.probes),
            *(self.queue_seconds, self.engine_seconds, self.engine_tokens, self.cached_tokens),
        ):
            metric.remove_by_labels({"teacher": teacher, "replica": replica})

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _LiveCollector(Collector):
    def __init__(self, pools: Mapping[str, Pool], clients: Mapping[str, Client]) -> None:
        self._pools = pools
        self._clients = clients

    def collect(self) -> Iterator[GaugeMetricFamily]:
        in_flight = GaugeMetricFamily("opd_gateway_in_flight", "Requests at a replica", labels=_REPLICA)
        tokens = GaugeMetricFamily("opd_gateway_in_flight_tokens", "Tokens of requests at a replica", labels=_REPLICA)
        load = GaugeMetricFamily("opd_gateway_load_tokens", "In-flight tokens plus debt for failures", labels=_REPLICA)
        state = GaugeMetricFamily("opd_gateway_replica_state", "1 for the state it is in", labels=[*_REPLICA, "state"])
        for pool in self._pools.values():
            for replica in chain(pool.replicas, pool.draining):
                labels = [pool.name, replica.name]
                in_flight.add_metric(labels, replica.in_flight)
                tokens.add_metric(labels, replica.outstanding_tokens)
                load.add_metric(labels, replica.load())
                for name in State:
                    state.add_metric([*labels, name.value], float(replica.state is name))
        of_key = GaugeMetricFamily("opd_gateway_key_in_flight", "Requests of an API key under way", labels=["key"])
        for client in self._clients.values():
            of_key.add_metric([client.name], client.in_flight)
        yield from (in_flight, tokens, load, state, of_key)
