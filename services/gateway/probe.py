"""Background probes: every replica is asked /readyz and /info again and again, whatever its state.

A probe is what lets a replica in, at the start and after an ejection; traffic alone never does.
"""

from __future__ import annotations

import asyncio

from services.gateway.metrics import GatewayMetrics
from services.gateway.pool import Pool
from services.gateway.replica import Replica
from services.gateway.transport import AnswerTooLarge
from services.gateway.upstream import AttemptError, ReplicaClient
from shared import log

_log = log.get(__name__)


async def probe(pool: Pool, replica: Replica, client: ReplicaClient) -> str:
    """Ask once and act on it; returns "passed", "not_ready", "refused", "failed" or "slow"."""
    epoch, num_answers = replica.epoch, replica.num_answers
    try:
        ready, said = await client.is_ready()
        if not ready:
            if replica.is_serving:
                where = log.fields(teacher=pool.name, replica=replica.name, reason=said)
                _log.warning("replica_not_ready", extra=where)
            replica.probe_refused(said)
            return "not_ready"
        info = await client.info()
    except (AttemptError, AnswerTooLarge) as error:
        if isinstance(error, AttemptError) and error.is_timeout and replica.num_answers != num_answers:
            return "slow"  # it was busy answering requests
        replica.probe_failed(str(error) or type(error).__name__)
        return "failed"
    if replica.epoch != epoch:
        return "passed"  # ejected while the probe ran: it waits its time, and the next probe decides
    return "passed" if pool.admit(replica, info) else "refused"


async def watch(
    pool: Pool, replica: Replica, client: ReplicaClient, metrics: GatewayMetrics, interval_s: float
) -> None:
    """Probe one replica for ever."""
    while True:
        while (wait_s := replica.ban_s()) > 0:
            await asyncio.sleep(wait_s)
        result = await probe(pool, replica, client)
        metrics.probes.labels(pool.name, replica.name, result).inc()
        await asyncio.sleep(interval_s)
