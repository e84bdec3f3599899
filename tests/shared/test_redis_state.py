"""Leases, stream and policy against a real Valkey."""

from __future__ import annotations

import numpy as np
import pytest
import redis.asyncio

from shared.errors import ConfigError, LeaseLost
from shared.keys import Keys
from shared.leases import Gate, Held, Lease, Leases
from shared.policy import Announcement, Canary, Policy
from shared.stream import DeadEntry, TrajectoryStream
from shared.trajectory import Trajectory, decode
from tests.builders import make_trajectory
from tests.conftest import wait_until

KEYS = Keys("test")


def make_leases(client: redis.asyncio.Redis, *, lease_s: float = 60.0, max_attempts: int = 2, **changes: int) -> Leases:
    gate = Gate(**{"n": 2, "batch_size": 4, "max_staleness": 1, "max_queue_bytes": 10**9, **changes})
    return Leases(client, KEYS, gate, lease_s=lease_s, max_attempts=max_attempts)


def announcement(version: int, **changes: object) -> Announcement:
    canary = Canary(token_ids=[1, 2], logprobs=[-0.5])
    values = {"version": version, "step": version - 1, "path": f"/w/{version}", "canary": canary, "evaluate": False}
    return Announcement(**{**values, **changes})


async def announce(
    client: redis.asyncio.Redis, version: int, settled: list[str] | None = None, needed: int = 1000
) -> None:
    await Policy(client, KEYS).announce(announcement(version), settled or [], needed=needed)


def completions(lease: Lease, n: int = 2) -> list[Trajectory]:
    return [make_trajectory(f"{lease.seq}-{i}") for i in range(n)]


async def take(leases: Leases, version: int = 1) -> Lease:
    lease = await leases.take(version)
    assert isinstance(lease, Lease), lease
    return lease


async def test_no_prompt_before_the_first_policy(redis_client: redis.asyncio.Redis) -> None:
    assert await make_leases(redis_client).take(0) == Held("no_policy")


async def test_prompts_are_handed_out_in_order_until_the_staleness_bound(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    leases = make_leases(redis_client)
    # batch 4, n 2: two prompts are a step; with max_staleness 1 two steps' worth may be under way
    assert [(await take(leases)).seq for _ in range(4)] == [0, 1, 2, 3]
    assert await leases.take(1) == Held("staleness")


async def test_staleness_zero_is_exactly_one_batch_of_the_current_version(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    leases = make_leases(redis_client, max_staleness=0)
    held = [await take(leases) for _ in range(2)]
    assert await leases.take(1) == Held("staleness")
    stream = TrajectoryStream(redis_client, KEYS)
    await stream.attach()
    for lease in held:
        await stream.publish(lease, completions(lease))
    entries = await stream.read(10, 100)
    # the trainer has them, but version 1 is still current: nothing may start
    assert await leases.take(1) == Held("staleness")
    await announce(redis_client, 2, [entry.entry_id for entry in entries])
    assert await leases.take(1) == Held("staleness")  # this worker still serves version 1
    assert (await take(leases, 2)).seq == 2


async def test_bytes_and_need_close_the_gate(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1, needed=6)
    stream = TrajectoryStream(redis_client, KEYS)
    leases = make_leases(redis_client, max_staleness=50)
    size = 0
    for _ in range(2):
        lease = await take(leases)
        size += await stream.publish(lease, completions(lease))
    assert await make_leases(redis_client, max_staleness=50, max_queue_bytes=size).take(1) == Held("bytes")
    await take(leases)
    assert await leases.take(1) == Held("enough")
    await Policy(redis_client, KEYS).finish()
    assert await leases.take(1) == Held("finished")


async def test_bytes_never_close_the_gate_below_one_batch(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    stream = TrajectoryStream(redis_client, KEYS)
    leases = make_leases(redis_client, max_queue_bytes=1)
    lease = await take(leases)
    await stream.publish(lease, completions(lease))
    assert (await take(leases)).seq == 1
    assert await leases.take(1) == Held("bytes")


async def test_a_batch_that_lost_one_of_a_prompts_completions_still_fills(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1, needed=4)
    stream, policy, leases = TrajectoryStream(redis_client, KEYS), Policy(redis_client, KEYS), make_leases(redis_client)
    await stream.attach()
    for _ in range(2):
        lease = await take(leases)
        await stream.publish(lease, completions(lease))
    assert await leases.take(1) == Held("enough")
    (broken,) = await stream.read(1, 100)
    await policy.settle([broken.entry_id])
    assert (await take(leases)).seq == 2


async def test_trainer_and_worker_must_agree_on_the_gate(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    await Policy(redis_client, KEYS).open(Gate(2, 8, 1, 10**9))
    with pytest.raises(ConfigError, match=r"goes by n=2, batch_size=4.*the trainer by n=2, batch_size=8"):
        await make_leases(redis_client).take(1)
    assert isinstance(await make_leases(redis_client, batch_size=8).take(1), Lease)


async def test_an_expired_lease_goes_to_another_worker_and_the_first_cannot_publish(
    redis_client: redis.asyncio.Redis,
) -> None:
    await announce(redis_client, 1)
    slow = await take(make_leases(redis_client, lease_s=0.001))
    leases = make_leases(redis_client)
    found: list[Lease] = []

    async def handed_out_again() -> bool:
        lease = await take(leases)
        found.append(lease)
        return lease.seq == slow.seq

    await wait_until(handed_out_again, 5)
    assert found[-1].attempt == 2
    stream = TrajectoryStream(redis_client, KEYS)
    with pytest.raises(LeaseLost):
        await stream.publish(slow, completions(slow))
    with pytest.raises(LeaseLost):
        await leases.renew(slow)
    await stream.publish(found[-1], completions(found[-1]))
    assert await stream.produced_ids() == ["0-0", "0-1"]
    assert await stream.counters() == {"lease_expired": 1, "lease_lost": 1}


async def test_a_prompt_that_fails_too_often_is_given_up_with_its_reason(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    leases = make_leases(redis_client)
    for attempt in (1, 2):
        lease = await take(leases)
        assert (lease.seq, lease.attempt) == (0, attempt)
        await leases.requeue(lease, "teacher math: 503")
    assert (await take(leases)).seq == 1
    dead = await redis_client.xrange(KEYS.dead)
    assert dead[0][1] == {b"kind": b"prompt", b"id": b"0", b"reason": b"teacher math: 503"}
    counters = await TrajectoryStream(redis_client, KEYS).counters()
    assert counters == {"requeued": 2, "prompts_failed": 1}


async def test_a_worker_that_stops_gives_its_prompt_back_without_charge(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    leases = make_leases(redis_client)
    await leases.requeue(await take(leases), "worker stops", charge=False)
    lease = await take(leases)
    assert (lease.seq, lease.attempt) == (0, 1)


async def test_unacknowledged_entries_come_back_to_a_restarted_trainer(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    leases, stream = make_leases(redis_client), TrajectoryStream(redis_client, KEYS)
    await stream.attach()
    for _ in range(3):
        lease = await take(leases)
        await stream.publish(lease, completions(lease))
    first = await stream.read(2, 100)
    await announce(redis_client, 2, [entry.entry_id for entry in first])
    assert (await stream.queue())[0] == 4
    await stream.acknowledge([first[0].entry_id])

    restarted = TrajectoryStream(redis_client, KEYS)
    await restarted.attach()
    assert (await restarted.queue())[0] == 5
    again = [entry.trajectory_id for entry in await restarted.read(10, 100)]
    fresh = [entry.trajectory_id for entry in await restarted.read(10, 100)]
    assert again == ["0-1"] and fresh == ["1-0", "1-1", "2-0", "2-1"]
    assert await restarted.read(10, 1) == []


async def test_entries_delivered_to_nobody_are_found_again(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    stream = TrajectoryStream(redis_client, KEYS)
    await stream.attach()
    lease = await take(make_leases(redis_client))
    await stream.publish(lease, completions(lease))
    # the answer to this read never reaches the trainer, as when the connection drops
    await redis_client.xreadgroup("trainer", "trainer-0", {KEYS.trajectories: ">"}, count=1)
    seen: list[str] = []

    async def both() -> bool:
        seen.extend(entry.trajectory_id for entry in await stream.read(5, 1))
        return sorted(seen) == ["0-0", "0-1"]

    await wait_until(both, 5)


async def test_settling_and_announcing_twice_counts_once(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    stream, policy = TrajectoryStream(redis_client, KEYS), Policy(redis_client, KEYS)
    await stream.attach()
    lease = await take(make_leases(redis_client))
    await stream.publish(lease, completions(lease))
    entries = [entry.entry_id for entry in await stream.read(5, 100)]
    await policy.settle(entries[:1])
    await policy.settle(entries[:1])
    assert (await stream.queue())[0] == 1
    await announce(redis_client, 2, entries)
    await announce(redis_client, 2, entries)
    assert await stream.queue() == (0, 0)
    assert await redis_client.xlen(KEYS.policy) == 2


async def test_dead_letters_keep_payload_and_reason(redis_client: redis.asyncio.Redis) -> None:
    await announce(redis_client, 1)
    stream = TrajectoryStream(redis_client, KEYS)
    await stream.attach()
    lease = await take(make_leases(redis_client))
    await stream.publish(lease, completions(lease))
    entries = await stream.read(5, 100)
    await stream.acknowledge([entries[0].entry_id], [DeadEntry(entries[1], "NaN")])
    assert await stream.waiting_ids() == []
    ((_, dead),) = await redis_client.xrange(KEYS.dead)
    assert dead[b"reason"] == b"NaN"
    assert np.array_equal(decode(dead[b"payload"], trajectory_id="0-1").token_ids, completions(lease)[1].token_ids)


async def test_followers_get_the_newest_policy(redis_client: redis.asyncio.Redis) -> None:
    policy = Policy(redis_client, KEYS)
    assert await policy.wait_newer(0, 0.01) is None
    for version in (1, 2, 3):
        await announce(redis_client, version)
    assert await policy.wait_newer(0, 1) == announcement(3)
    assert await policy.wait_newer(3, 0.01) is None
    assert (await policy.state())["version"] == "3"


async def test_one_worker_evaluates_and_others_may_after_it_gave_up(redis_client: redis.asyncio.Redis) -> None:
    policy = Policy(redis_client, KEYS)
    assert await policy.evaluation_skipped(3)
    assert await policy.lock_evaluation(3, "a", 60)
    assert await policy.lock_evaluation(3, "a", 60)  # renewed
    assert not await policy.evaluation_skipped(3)
    assert not await policy.lock_evaluation(3, "b", 60)
    await policy.unlock_evaluation(3, "b")
    assert not await policy.lock_evaluation(3, "b", 60)
    await policy.unlock_evaluation(3, "a")
    assert await policy.evaluation_skipped(3)
    await policy.put_evaluation(3, {"add": {"accuracy": None}})
    assert not await policy.evaluation_skipped(3)
    assert await policy.evaluation(3) == {"add": {"accuracy": None}}
    assert await policy.evaluation(4) is None


async def test_pushes_are_counted_once(redis_client: redis.asyncio.Redis) -> None:
    policy = Policy(redis_client, KEYS)
    for version in (1, 2, 2):
        await policy.announce(announcement(version), [], needed=1, num_bytes=100)
    state = await policy.state()
    assert (state["pushes"], state["pushed_bytes"]) == ("2", "200")
