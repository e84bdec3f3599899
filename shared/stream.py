"""The trajectory stream: appended to by rollout workers, read by the trainer, each entry acknowledged after its effect.

An entry's life: `publish` (with its prompt's lease, in one script) → `read` → trained → its step's announcement settles
the queue counters (`shared.policy`) → a durable checkpoint holds the step → `acknowledge` deletes it. A trainer that
dies gets back what was not acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio
import redis.exceptions

from shared.errors import LeaseLost
from shared.keys import Keys
from shared.leases import Lease
from shared.trajectory import Trajectory, encode

_GROUP = "trainer"
_CONSUMER = "trainer-0"

_PUBLISH = """
local leases, holders, attempts, reasons, stream, sizes, waiting, waiting_bytes, produced, counters = unpack(KEYS)
local seq, token = ARGV[1], ARGV[2]
if redis.call('HGET', holders, seq) ~= token then
  redis.call('HINCRBY', counters, 'lease_lost', 1)
  return 0
end
local total = 0
for i = 3, #ARGV, 4 do
  local id, version, tokens, payload = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local entry = redis.call('XADD', stream, '*', 'id', id, 'version', version, 'tokens', tokens, 'payload', payload)
  redis.call('HSET', sizes, entry, #payload)
  redis.call('HSET', waiting, entry, #payload)
  redis.call('RPUSH', produced, id)
  total = total + #payload
end
redis.call('INCRBY', waiting_bytes, total)
redis.call('ZREM', leases, seq)
redis.call('HDEL', holders, seq)
redis.call('HDEL', attempts, seq)
redis.call('HDEL', reasons, seq)
return 1
"""

# A trainer that starts has trained nothing of what is still in the stream: all of it waits again.
_ATTACH = """
local sizes, waiting, waiting_bytes = unpack(KEYS)
redis.call('DEL', waiting)
local total = 0
local found = redis.call('HGETALL', sizes)
for i = 1, #found, 2 do
  redis.call('HSET', waiting, found[i], found[i + 1])
  total = total + tonumber(found[i + 1])
end
redis.call('SET', waiting_bytes, total)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stream entry before its payload is decoded.

    Attributes:
        entry_id: the stream's own id.
        trajectory_id: which trajectory the payload claims to be.
        oldest_version: policy version of its oldest token.
    """

    entry_id: str
    trajectory_id: str
    oldest_version: int
    num_tokens: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """An entry that the trainer gives up, and why."""

    entry: Entry
    reason: str


class TrajectoryStream:
    """Producer's and consumer's side of the stream."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._publish = client.register_script(_PUBLISH)
        self._attach = client.register_script(_ATTACH)
        self._pending_from: str | None = "0"
        self._held: set[str] = set()

    async def publish(self, lease: Lease, trajectories: Sequence[Trajectory]) -> int:
        """Append all completions of a leased prompt and end the lease, in one step. Returns the payload bytes.

        Raises:
            LeaseLost: the lease ran out meanwhile; nothing was appended, and the loss is counted.
        """
        k = self._keys
        args: list[str | int | bytes] = [lease.seq, lease.token]
        total = 0
        for trajectory in trajectories:
            payload = encode(trajectory)
            total += len(payload)
            args += [trajectory.id, trajectory.oldest_version, len(trajectory.token_ids), payload]
        keys = [k.leases, k.holders, k.attempts, k.reasons, k.trajectories, k.sizes, k.waiting, k.waiting_bytes]
        keys += [k.produced, k.counters]
        if not await self._publish(keys=keys, args=args):
            raise LeaseLost(f"prompt {lease.seq} was handed to another worker before its completions were published")
        return total

    async def attach(self) -> None:
        """Consumer: create the group at the stream's beginning if it is new, and count anew what waits."""
        try:
            await self._client.xgroup_create(self._keys.trajectories, _GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        k = self._keys
        await self._attach(keys=[k.sizes, k.waiting, k.waiting_bytes])
        self._held.clear()
        self._pending_from = "0"

    async def read(self, count: int, block_ms: int) -> list[Entry]:
        """Consumer: up to `count` entries; those delivered before a crash and not acknowledged come first.

        Returns an empty list when nothing arrives within `block_ms`.
        """
        while self._pending_from is not None:
            page = await self._read_group(self._pending_from, count, None)
            self._pending_from = page[-1].entry_id if page else None
            if fresh := [entry for entry in page if entry.entry_id not in self._held]:
                return self._hold(fresh)
        entries = await self._read_group(">", count, block_ms)
        if not entries:
            # An answer that got lost with its connection leaves entries delivered to nobody: look for them.
            pending = await self._client.xpending(self._keys.trajectories, _GROUP)
            if pending["pending"] > len(self._held):
                self._pending_from = "0"
        return self._hold(entries)

    def _hold(self, entries: list[Entry]) -> list[Entry]:
        self._held.update(entry.entry_id for entry in entries)
        return entries

    async def acknowledge(self, entry_ids: Sequence[str], dead: Sequence[DeadEntry] = ()) -> None:
        """Consumer: forget entries whose effect a durable checkpoint holds; `dead` ones become dead letters."""
        ids = [*entry_ids, *(item.entry.entry_id for item in dead)]
        if not ids:
            return
        k = self._keys
        async with self._client.pipeline(transaction=True) as pipe:
            for item in dead:
                fields = {"kind": "trajectory", "id": item.entry.trajectory_id, "reason": item.reason}
                pipe.xadd(k.dead, {**fields, "payload": item.entry.payload})
            pipe.xack(k.trajectories, _GROUP, *ids)
            pipe.xdel(k.trajectories, *ids)
            pipe.hdel(k.sizes, *ids)
            await pipe.execute()
        self._held.difference_update(ids)

    async def queue(self) -> tuple[int, int]:
        """Trajectories and bytes that are published and not yet trained."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hlen(self._keys.waiting)
            pipe.get(self._keys.waiting_bytes)
            count, size = await pipe.execute()
        return count, int(size or 0)

    async def counters(self) -> dict[str, int]:
        """requeued, lease_lost, lease_expired, prompts_failed so far (absent: 0)."""
        found = await self._client.hgetall(self._keys.counters)
        return {name.decode(): int(value) for name, value in found.items()}

    async def produced_ids(self) -> list[str]:
        """Ids of all trajectories ever published, in order."""
        return [item.decode() for item in await self._client.lrange(self._keys.produced, 0, -1)]

    async def waiting_ids(self) -> list[str]:
        """Trajectory ids of all entries still in the stream, read in pages so that payloads never pile up."""
        ids: list[str] = []
        start = "-"
        while page := await self._client.xrange(self._keys.trajectories, min=start, count=64):
            ids += [fields[b"id"].decode() for _, fields in page]
            start = f"({page[-1][0].decode()}"
        return ids

    async def _read_group(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        answer = await self._client.xreadgroup(
            _GROUP, _CONSUMER, {self._keys.trajectories: start}, count=count, block=block_ms
        )
        found = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer]
        return [_entry(entry_id, fields) for entries in found for entry_id, fields in entries if fields]


def _entry(entry_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    return Entry(
        entry_id=entry_id.decode(),
        trajectory_id=fields[b"id"].decode(),
        oldest_version=int(fields[b"version"]),
        num_tokens=int(fields[b"tokens"]),
        payload=fields[b"payload"],
    )
