"""Who the replicas are: from the configuration, behind DNS names, and registered; added and drained while all goes on.

    config ───────────────┐                  ┌─ probe.watch ─▶ STARTING … READY
    DNS name, every 5 s ──┼─▶ add ─▶ a member ┤
    PUT /replicas, lease ─┘                  └─ remove ─▶ DRAINING ─▶ nothing in flight ─▶ connections closed

A member that comes back is a new one: it starts as STARTING. An address serves one teacher, whoever named it first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from services.gateway import probe
from services.gateway.addresses import DNS_PREFIX, Resolve, host_and_port, is_allowed
from services.gateway.metrics import GatewayMetrics
from services.gateway.pool import Pool
from services.gateway.replica import Origin, Replica
from services.gateway.upstream import ReplicaClient
from shared import log
from shared.config import GatewaySection
from shared.errors import Problem
from shared.service_url import join

_DRAIN_POLL_S = 0.02
_REMEMBERED_TTLS = 4
"""A removed process is remembered for as long as it goes on registering, and this many leases more."""

_log = log.get(__name__)


@dataclass(slots=True)
class Lease:
    """A registration: it ends at `expires_at` (monotonic) unless it is renewed.

    Attributes:
        instance: the process that registered, as it calls itself; empty when it does not say.
    """

    expires_at: float
    instance: str


class Members:
    """Adds and removes replicas of all pools; owns their connections and probes."""

    def __init__(
        self,
        sources: Mapping[str, list[str]],
        pools: Mapping[str, Pool],
        metrics: GatewayMetrics,
        settings: GatewaySection,
        *,
        connect: Callable[[str], ReplicaClient],
        resolve: Resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            sources: urls and `dns+` names by teacher, from the configuration.
            connect: makes the connections to a replica's url; nothing is sent before the first request.
        """
        self.clients: dict[Replica, ReplicaClient] = {}
        self._sources = sources
        self._pools = pools
        self._metrics = metrics
        self._settings = settings
        self._connect = connect
        self._resolve = resolve
        self._clock = clock
        self._leases: dict[Replica, Lease] = {}
        self._withdrawn: dict[str, Lease] = {}
        self._tasks = asyncio.TaskGroup()
        self._probes: dict[Replica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Probe members and follow changes, for ever; ends with an exception only.

        The members that the configuration names are there before the first await.
        """
        try:
            async with self._tasks:
                for teacher, sources in self._sources.items():
                    for source in sources:
                        if source.startswith(DNS_PREFIX):
                            self._tasks.create_task(self._follow(self._pools[teacher], source))
                        else:
                            self._add(self._pools[teacher], source, Origin.CONFIG)
                self._tasks.create_task(self._expire())
        finally:
            for client in self.clients.values():
                await client.aclose()

    def register(self, teacher: str, url: str, instance: str) -> tuple[Replica, bool]:
        """Take a replica in, or renew its lease; also whether it is new.

        Raises:
            Problem: 403 for a host that is not allowed, 409 for the address of another teacher or one removed by hand.
        """
        pool = self._pools[teacher]
        if self._settings.registration_hosts and not is_allowed(url, self._settings.registration_hosts):
            raise Problem("opd:forbidden", f"{url} is not among the gateway's registration_hosts")
        if instance and (left := self._withdrawn.get(url)) and left.instance == instance:
            left.expires_at = self._clock() + _REMEMBERED_TTLS * self._settings.registration_ttl_s
            raise Problem("opd:conflict", f"{url} was removed: restart it to bring it back, or register no instance")
        replica = self._find(url)
        is_new = replica is None
        if replica is None:
            self._withdrawn.pop(url, None)
            replica = self._add(pool, url, Origin.REGISTERED)
        elif replica not in pool.replicas:
            raise Problem("opd:conflict", f"{url} is a replica of another teacher")
        if replica.origin is Origin.REGISTERED:  # the others are members without a lease
            self._leases[replica] = Lease(self._clock() + self._settings.registration_ttl_s, instance)
        return replica, is_new

    def withdraw(self, teacher: str, url: str) -> Replica:
        """Drain a member; it stays away until it is started again or, behind a DNS name, leaves the name's addresses.

        Raises:
            Problem: 404 when it is no member.
        """
        replica = self._find(url)
        if replica is None or replica not in self._pools[teacher].replicas:
            raise Problem("opd:unknown-replica", f"{url} is no replica of teacher {teacher!r}")
        if lease := self._leases.get(replica):
            lease.expires_at = self._clock() + _REMEMBERED_TTLS * self._settings.registration_ttl_s
            self._withdrawn[url] = lease
        self._remove(self._pools[teacher], replica, "withdrawn")
        return replica

    def describe(self) -> list[dict[str, Any]]:
        """All members and those that drain, for GET /replicas."""
        return [
            {"teacher": pool.name, **replica.describe(), "lease_left_s": self.lease_left_s(replica)}
            for pool in self._pools.values()
            for replica in (*pool.replicas, *pool.draining)
        ]

    def lease_left_s(self, replica: Replica) -> float | None:
        """Seconds until a registered replica is dropped; None for one that needs no lease."""
        lease = self._leases.get(replica)
        return None if lease is None else round(max(0.0, lease.expires_at - self._clock()), 1)

    async def drained(self, replica: Replica) -> None:
        """Return when nothing of a removed replica is in flight any more."""
        await asyncio.sleep(_DRAIN_POLL_S)  # a request may have chosen it and not begun yet
        while replica.in_flight:
            await asyncio.sleep(_DRAIN_POLL_S)

    def _find(self, url: str) -> Replica | None:
        name = url.split("://", 1)[-1]
        return next((member for pool in self._pools.values() for member in pool.replicas if member.name == name), None)

    def _add(self, pool: Pool, url: str, origin: Origin) -> Replica:
        settings = self._settings
        replica = Replica(
            url,
            eject_after=settings.eject_after_failures,
            probe_interval_s=settings.probe_interval_s,
            origin=origin,
        )
        replica.on_eject = lambda ejected: self._report_ejection(pool, ejected)
        self.clients[replica] = client = self._connect(url)
        pool.replicas.append(replica)
        watching = probe.watch(pool, replica, client, self._metrics, settings.probe_interval_s)
        self._probes[replica] = self._tasks.create_task(watching)
        self._metrics.joined.labels(pool.name, origin.value).inc()
        _log.info("replica_joined", extra=log.fields(teacher=pool.name, replica=replica.name, origin=origin))
        return replica

    def _remove(self, pool: Pool, replica: Replica, reason: str) -> None:
        pool.replicas.remove(replica)
        pool.draining.append(replica)
        replica.drain()
        self._leases.pop(replica, None)
        self._probes.pop(replica).cancel()
        self._metrics.left.labels(pool.name, reason).inc()
        where = log.fields(teacher=pool.name, replica=replica.name, reason=reason, in_flight=replica.in_flight)
        _log.info("replica_leaves", extra=where)
        self._tasks.create_task(self._drain(pool, replica))

    async def _drain(self, pool: Pool, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):  # no request lives longer
                await self.drained(replica)
        except TimeoutError:
            where = log.fields(teacher=pool.name, replica=replica.name, in_flight=replica.in_flight)
            _log.error("drain_cut_short", extra=where)
        await self.clients.pop(replica).aclose()
        pool.draining.remove(replica)
        if all(other.name != replica.name for other in (*pool.replicas, *pool.draining)):
            self._metrics.forget(pool.name, replica.name)
        _log.info("replica_left", extra=log.fields(teacher=pool.name, replica=replica.name))

    async def _expire(self) -> NoReturn:
        while True:
            await asyncio.sleep(min(1.0, self._settings.registration_ttl_s / 4))
            now = self._clock()
            for replica in [replica for replica, lease in self._leases.items() if lease.expires_at <= now]:
                pool = next(pool for pool in self._pools.values() if replica in pool.replicas)
                self._remove(pool, replica, "lease_expired")
            for url in [url for url, left in self._withdrawn.items() if left.expires_at <= now]:
                del self._withdrawn[url]

    async def _follow(self, pool: Pool, source: str) -> NoReturn:
        """Keep the members of one DNS name what the name says; without an answer they stay as they are."""
        name, port = host_and_port(source)
        mine: dict[str, Replica] = {}
        last_trouble = ""
        while True:
            addresses, result, trouble = await self._look_up(name, port)
            self._metrics.lookups.labels(pool.name, name, result).inc()
            if trouble and trouble != last_trouble:
                where = log.fields(teacher=pool.name, name=name, reason=trouble, kept=len(mine))
                _log.warning("dns_lookup_failed", extra=where)
            last_trouble = trouble
            if not trouble:
                self._sync(pool, mine, {join("http", address, port) for address in addresses})
            await asyncio.sleep(self._settings.dns_interval_s)

    async def _look_up(self, name: str, port: int) -> tuple[list[str], str, str]:
        """Addresses, the result for the metric, and what went wrong."""
        try:
            addresses = await self._resolve(name, port)
        except (OSError, UnicodeError) as error:  # no answer, a timeout; a label that is too long
            return [], "failed", f"{type(error).__name__}: {error}"
        return addresses, *(("answered", "") if addresses else ("empty", "the name has no address"))

    def _sync(self, pool: Pool, mine: dict[str, Replica], urls: set[str]) -> None:
        """Add what is new among `urls`, drain what is gone.

        `mine` are the members that this name has brought. One that was withdrawn stays in it for as long as the name
        names its address, so that it is not added again.
        """
        for url in [url for url in mine if url not in urls]:
            replica = mine.pop(url)
            if replica in pool.replicas:
                self._remove(pool, replica, "left_dns")
        for url in sorted(urls - mine.keys()):
            if self._find(url) is None:  # else it is a member already, or serves another teacher
                mine[url] = self._add(pool, url, Origin.DNS)

    def _report_ejection(self, pool: Pool, replica: Replica) -> None:
        self._metrics.ejections.labels(pool.name, replica.name).inc()
        where = log.fields(teacher=pool.name, replica=replica.name, reason=replica.last_error)
        _log.warning("replica_ejected", extra=where)
