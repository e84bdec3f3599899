"""Prompts are leased, and the lease is the gate: a worker gets a prompt only when its completions can still be used.

A prompt is a sequence number; every worker maps it to the same text (`shared.prompts`). A lease that runs out, because
its worker died or hangs, is handed out again before any new prompt.

The gate. With B trajectories a step, a completion that starts now is trained after everything ahead of it: the
unpublished completions of all leased prompts and the published ones not yet trained. It is let through when

    floor(ahead / B) + (current version − the worker's version)  ≤  max_staleness

and the bytes waiting are under their bound (or fewer than a batch waits). With max_staleness 0 this is exactly
on-policy.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields

import redis.asyncio

from shared.errors import ConfigError, LeaseLost
from shared.keys import Keys

_TAKE = """
local state, cursor, leases, holders, attempts, reasons, waiting, waiting_bytes, dead, counters = unpack(KEYS)
local token, worker_version, ttl_ms, n = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local batch, max_staleness = tonumber(ARGV[5]), tonumber(ARGV[6])
local max_bytes, max_attempts = tonumber(ARGV[7]), tonumber(ARGV[8])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local s = redis.call('HMGET', state, 'version', 'needed', 'done', 'failed', 'gate')
if s[3] or s[4] then return {'finished'} end
if s[5] and s[5] ~= ARGV[9] then return {'disagree', s[5]} end
if not s[1] then return {'no_policy'} end
local lag = tonumber(s[1]) - worker_version

local function hold(seq)
  redis.call('ZADD', leases, now + ttl_ms, seq)
  redis.call('HSET', holders, seq, token)
  return {'leased', seq, redis.call('HINCRBY', attempts, seq, 1)}
end

local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 16)
for _, seq in ipairs(expired) do
  if redis.call('HGET', holders, seq) then
    redis.call('HDEL', holders, seq)
    redis.call('HINCRBY', counters, 'lease_expired', 1)
    redis.call('HSETNX', reasons, seq, 'its lease ran out')
  end
  if tonumber(redis.call('HGET', attempts, seq) or 0) >= max_attempts then
    redis.call('XADD', dead, '*', 'kind', 'prompt', 'id', seq, 'reason', redis.call('HGET', reasons, seq) or '')
    redis.call('ZREM', leases, seq)
    redis.call('HDEL', attempts, seq)
    redis.call('HDEL', reasons, seq)
    redis.call('HINCRBY', counters, 'prompts_failed', 1)
  end
end
local leased = redis.call('ZCARD', leases)
local again = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
local ahead = redis.call('HLEN', waiting) + leased * n
if again then ahead = ahead - n end
if math.floor(ahead / batch) + lag > max_staleness then return {'staleness'} end
if again then return hold(again) end
-- Never below one batch: a batch that cannot fill up would keep the gate shut for ever.
if ahead >= batch and tonumber(redis.call('GET', waiting_bytes) or 0) >= max_bytes then return {'bytes'} end
if s[2] and ahead >= tonumber(s[2]) then return {'enough'} end
return hold(redis.call('INCR', cursor) - 1)
"""

_RENEW = """
local leases, holders = unpack(KEYS)
local seq, token, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('HGET', holders, seq) ~= token then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', leases, time[1] * 1000 + math.floor(time[2] / 1000) + ttl_ms, seq)
return 1
"""

_REQUEUE = """
local leases, holders, reasons, attempts, counters = unpack(KEYS)
local seq, token, delay_ms, reason, charge = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
if redis.call('HGET', holders, seq) ~= token then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', leases, time[1] * 1000 + math.floor(time[2] / 1000) + delay_ms, seq)
redis.call('HDEL', holders, seq)
redis.call('HSET', reasons, seq, reason)
redis.call('HINCRBY', counters, 'requeued', 1)
if charge == '0' then redis.call('HINCRBY', attempts, seq, -1) end
return 1
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A prompt that this worker may answer now.

    Attributes:
        seq: the prompt's sequence number.
        attempt: 1 on the first try.
        token: proves that this lease, and not a later one, holds the prompt.
    """

    seq: int
    attempt: int
    token: str


@dataclass(frozen=True, slots=True)
class Gate:
    """What trainer and workers must agree on, since the one trains what the others let through.

    Attributes:
        n: completions of a prompt.
        batch_size: trajectories of a step.
    """

    n: int
    batch_size: int
    max_staleness: int
    max_queue_bytes: int

    def __str__(self) -> str:
        """The form in which the two sides are compared."""
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True, slots=True)
class Held:
    """Why no prompt was handed out: finished, no_policy, staleness, bytes or enough."""

    reason: str


class Leases:
    """Hands out prompts to workers."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: Keys, gate: Gate, *, lease_s: float, max_attempts: int
    ) -> None:
        self._keys = keys
        self._ttl_ms = int(lease_s * 1000)
        self._gate = gate
        self._max_attempts = max_attempts
        self._take = client.register_script(_TAKE)
        self._renew = client.register_script(_RENEW)
        self._requeue = client.register_script(_REQUEUE)

    async def take(self, worker_version: int) -> Lease | Held:
        """The next prompt for a worker that serves policy `worker_version`, or the reason why there is none now.

        Raises:
            ConfigError: the trainer was started with another gate.
        """
        k = self._keys
        token = uuid.uuid4().hex
        keys = [k.state, k.cursor, k.leases, k.holders, k.attempts, k.reasons, k.waiting, k.waiting_bytes]
        keys += [k.dead, k.counters]
        gate = self._gate
        args = [token, worker_version, self._ttl_ms, gate.n, gate.batch_size, gate.max_staleness, gate.max_queue_bytes]
        args += [self._max_attempts, str(gate)]
        answer = await self._take(keys=keys, args=args)
        kind = answer[0].decode()
        if kind == "disagree":
            raise ConfigError(
                f"this worker goes by {self._gate}, the trainer by {answer[1].decode()}: "
                "start both with one configuration and the same --set"
            )
        if kind != "leased":
            return Held(kind)
        return Lease(seq=int(answer[1]), attempt=int(answer[2]), token=token)

    async def renew(self, lease: Lease) -> None:
        """Extend a lease. Raises LeaseLost when it ran out and the prompt was handed on."""
        keys = [self._keys.leases, self._keys.holders]
        if not await self._renew(keys=keys, args=[lease.seq, lease.token, self._ttl_ms]):
            raise LeaseLost(f"prompt {lease.seq} belongs to another worker now")

    async def requeue(self, lease: Lease, reason: str, *, delay_s: float = 0.0, charge: bool = True) -> None:
        """Give a prompt back so that it is tried again after `delay_s`; no effect when the lease is lost already.

        Args:
            charge: count this as one of the prompt's attempts (false for a worker that merely stops).
        """
        k = self._keys
        keys = [k.leases, k.holders, k.reasons, k.attempts, k.counters]
        await self._requeue(keys=keys, args=[lease.seq, lease.token, int(delay_s * 1000), reason[:500], int(charge)])
