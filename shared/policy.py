"""Which policy is current: announced by the trainer, followed by the workers.

A policy version counts pushes. It only ever grows in the life of a run, also over a resume from an older checkpoint,
so that no worker takes new weights for ones that it has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis.asyncio

from shared.keys import Keys
from shared.leases import Gate

_KEPT_ANNOUNCEMENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A sequence and the trainer's own logprobs of it under the announced weights: [S] ids, [S−1] logprobs."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Weights that can be loaded.

    Attributes:
        version: the policy version.
        step: optimizer steps that the weights have seen.
        path: folder of the push (`shared.weights`).
        canary: what a worker must reproduce after loading.
        evaluate: a worker is asked to evaluate this version on held-out prompts.
    """

    version: int
    step: int
    path: str
    canary: Canary
    evaluate: bool


# Both may be sent twice when a connection drops in between, so both are idempotent: an entry settles once, a version is
# announced once.
_SETTLE = """
local waiting, waiting_bytes = KEYS[1], KEYS[2]
for _, entry in ipairs(ARGV) do
  local size = redis.call('HGET', waiting, entry)
  if size then
    redis.call('HDEL', waiting, entry)
    redis.call('DECRBY', waiting_bytes, size)
  end
end
"""

_ANNOUNCE = (
    """
local policy, state, kept = KEYS[3], KEYS[4], table.remove(ARGV, 1)
local body, version, step, needed, bytes = unpack(ARGV, 1, 5)
if tonumber(redis.call('HGET', state, 'version') or -1) >= tonumber(version) then return end
redis.call('XADD', policy, 'MAXLEN', '~', kept, '*', 'body', body)
redis.call('HSET', state, 'version', version, 'step', step, 'needed', needed)
redis.call('HINCRBY', state, 'pushes', 1)
redis.call('HINCRBY', state, 'pushed_bytes', bytes)
for i = 1, 5 do table.remove(ARGV, 1) end
"""
    + _SETTLE
)

_LOCK = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Policy:
    """The run's policy and state in Redis."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._announce = client.register_script(_ANNOUNCE)
        self._settle = client.register_script(_SETTLE)
        self._lock = client.register_script(_LOCK)
        self._unlock = client.register_script(_UNLOCK)

    async def announce(
        self, announcement: Announcement, settled: Sequence[str], *, needed: int, num_bytes: int = 0
    ) -> None:
        """Make a version current, and take what its step used up out of the queue, in one script.

        Args:
            settled: stream entry ids that were trained on.
            needed: trajectories that the rest of the run wants, those waiting included.
            num_bytes: size of the push, for the books.
        """
        k = self._keys
        body = json.dumps(asdict(announcement))
        args = [_KEPT_ANNOUNCEMENTS, body, announcement.version, announcement.step, needed, num_bytes]
        args += settled
        await self._announce(keys=[k.waiting, k.waiting_bytes, k.policy, k.state], args=args)

    async def settle(self, entry_ids: Sequence[str]) -> None:
        """Take dropped entries out of the queue without a new version, so that the gate reopens."""
        await self._settle(keys=[self._keys.waiting, self._keys.waiting_bytes], args=list(entry_ids))

    async def latest(self) -> Announcement | None:
        """The current announcement, None before the first."""
        found = await self._client.xrevrange(self._keys.policy, count=1)
        return _announcement(found[0][1]) if found else None

    async def wait_newer(self, version: int, timeout_s: float) -> Announcement | None:
        """The latest announcement if it is newer than `version`, else the first one within `timeout_s`, else None."""
        found = await self._client.xrevrange(self._keys.policy, count=1)
        last_id = "0"
        if found:
            last_id, fields = found[0][0], found[0][1]
            announcement = _announcement(fields)
            if announcement.version > version:
                return announcement
        answer = await self._client.xread({self._keys.policy: last_id}, block=max(1, int(timeout_s * 1000)))
        return await self.latest() if answer else None

    async def state(self) -> dict[str, str]:
        """version, step, needed, pushes, pushed_bytes, gate, done, failed – what is known so far."""
        found = await self._client.hgetall(self._keys.state)
        return {name.decode(): value.decode() for name, value in found.items()}

    async def finish(self) -> None:
        """Mark the run as done: no worker gets a prompt any more."""
        await self._client.hset(self._keys.state, mapping={"done": 1})

    async def fail(self, reason: str) -> None:
        """Mark the run as failed, with the reason that people will read."""
        await self._client.hset(self._keys.state, mapping={"failed": reason})

    async def open(self, gate: Gate) -> None:
        """The trainer starts: clear done and failed of an earlier process, say what the workers' gate must go by."""
        await self._client.hset(self._keys.state, mapping={"gate": str(gate)})
        await self._client.hdel(self._keys.state, "done", "failed")

    async def lock_evaluation(self, version: int, worker: str, ttl_s: float) -> bool:
        """True for the one worker that shall evaluate `version`; called again, it renews that worker's lock.

        The lock falls after `ttl_s` if the worker dies.
        """
        keys = [self._keys.evaluation_lock(version)]
        return bool(await self._lock(keys=keys, args=[worker, max(1, int(ttl_s))]))

    async def unlock_evaluation(self, version: int, worker: str) -> None:
        """Give the lock back, after the result is stored or because there will be none."""
        await self._unlock(keys=[self._keys.evaluation_lock(version)], args=[worker])

    async def evaluation_skipped(self, version: int) -> bool:
        """Whether no worker has taken up the evaluation of `version` so far: none has its lock, and no result is there.

        Workers load the newest version, so one that asks to be evaluated can be passed over.
        """
        found = await self._client.exists(self._keys.evaluation_lock(version), self._keys.evaluation(version))
        return not found

    async def put_evaluation(self, version: int, result: dict[str, Any]) -> None:
        """Store an evaluation's result."""
        await self._client.set(self._keys.evaluation(version), json.dumps(result))

    async def evaluation(self, version: int) -> dict[str, Any] | None:
        """The result of an evaluation, None while there is none."""
        found = await self._client.get(self._keys.evaluation(version))
        return None if found is None else json.loads(found)


def _announcement(fields: dict[bytes, bytes]) -> Announcement:
    body = json.loads(fields[b"body"])
    return Announcement(**{**body, "canary": Canary(**body["canary"])})
