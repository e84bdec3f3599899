"""The trainer's side of the stream against a real Valkey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import redis.asyncio

from services.trainer.intake import Intake, samples_of
from shared.config import ObjectiveSection
from shared.errors import RunFailed
from shared.keys import Keys
from shared.leases import Gate, Lease, Leases
from shared.ledger import DEAD_LETTER, DROPPED_STALE, TRAINED, Ledger
from shared.policy import Announcement, Canary, Policy
from shared.stream import TrajectoryStream
from shared.trajectory import Trajectory
from tests.builders import make_trajectory

KEYS = Keys("intake")


class Bench:
    """A stream, and a trainer's intake on it."""

    def __init__(self, client: redis.asyncio.Redis, folder: Path, ledger_length: int = 0, **changes: object) -> None:
        self.client = client
        self.stream = TrajectoryStream(client, KEYS)
        self.policy = Policy(client, KEYS)
        self.ledger = Ledger(folder / "ledger.jsonl", ledger_length)
        teachers = {"math": ObjectiveSection()}
        values = {
            "teachers": teachers,
            "vocab_size": 100,
            "max_staleness": 2,
            "max_bad_share": 0.5,
            "data_timeout_s": 30.0,
        }
        self.intake = Intake(self.stream, self.policy, self.ledger, **{**values, **changes})

    async def publish(self, *trajectories: Trajectory) -> None:
        if await self.policy.latest() is None:
            canary = Canary(token_ids=[1, 2], logprobs=[-1.0])
            first = Announcement(version=1, step=0, path="/w", canary=canary, evaluate=False)
            await self.policy.announce(first, [], needed=10**6)
            await self.stream.attach()
        leases = Leases(
            self.client,
            KEYS,
            Gate(1, 1, 10**6, 10**9),
            lease_s=60,
            max_attempts=3,
        )
        lease = await leases.take(1)
        assert isinstance(lease, Lease)
        await self.stream.publish(lease, trajectories)

    async def batch(self, size: int, version: int) -> list[str]:
        return [t.id for t in (await self.intake.next_batch(size, version=version, step=0)).trajectories]


@pytest.fixture
async def bench(redis_client: redis.asyncio.Redis, tmp_path: Path) -> Bench:
    return Bench(redis_client, tmp_path)


async def test_stale_trajectories_are_dropped_booked_and_leave_the_queue(bench: Bench) -> None:
    await bench.publish(
        make_trajectory("0-0", version=7),
        make_trajectory("0-1", version_spans=((8, 1), (10, 2))),
        make_trajectory("0-2", version_spans=((7, 1), (10, 2))),
    )
    assert await bench.batch(1, version=10) == ["0-1"]
    assert bench.ledger.counts == {DROPPED_STALE: 1}
    await bench.publish(make_trajectory("1-0", version=10))
    assert await bench.batch(1, version=10) == ["1-0"]
    assert bench.ledger.counts == {DROPPED_STALE: 2}
    assert (await bench.stream.queue())[0] == 2


async def test_broken_trajectories_become_dead_letters_with_their_reason(bench: Bench) -> None:
    await bench.publish(
        make_trajectory("0-0", teacher_logprobs=np.array([0, np.nan, 0], np.float32)),
        make_trajectory("0-1", top_ids=np.full((3, 2), 100, np.int32)),
        make_trajectory("0-2"),
        make_trajectory("0-3", fingerprint="another"),
        make_trajectory("0-4"),
        make_trajectory("0-5", teacher="chat"),
        make_trajectory("0-6", k=0),
        make_trajectory("0-7"),
    )
    assert await bench.batch(3, version=1) == ["0-2", "0-4", "0-7"]
    await bench.intake.acknowledge()
    reasons = {fields[b"id"].decode(): fields[b"reason"].decode() for _, fields in await bench.client.xrange(KEYS.dead)}
    assert reasons["0-0"] == "teacher_logprobs holds a value that is not finite"
    assert "outside 0 … 99" in reasons["0-1"]
    assert "teacher math changed: fingerprint another, before f" in reasons["0-3"]
    assert reasons["0-5"] == "teacher chat is not one of math"
    assert reasons["0-6"] == "it has no teacher's top-k, which teachers.math.loss forward_kl needs"
    assert bench.ledger.counts == {DEAD_LETTER: 5}


async def test_too_many_broken_trajectories_stop_the_run(redis_client: redis.asyncio.Redis, tmp_path: Path) -> None:
    bench = Bench(redis_client, tmp_path, max_bad_share=0.1)
    broken = np.full(3, np.nan, np.float32)
    await bench.publish(*(make_trajectory(f"0-{i}", teacher_logprobs=broken) for i in range(9)))
    with pytest.raises(RunFailed, match=r"8 of 8 trajectories are broken.*teacher_logprobs"):
        await bench.batch(1, version=1)


async def test_missing_data_is_a_failure_that_says_what_is_missing(
    redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    bench = Bench(redis_client, tmp_path, data_timeout_s=0.01)
    await bench.publish(make_trajectory("0-0"))
    with pytest.raises(RunFailed, match="still waiting for 1 of 2 trajectories for step 1"):
        await bench.batch(2, version=1)


async def test_redelivered_after_the_checkpoint_is_not_trained_again(bench: Bench, tmp_path: Path) -> None:
    await bench.publish(make_trajectory("0-0"), make_trajectory("0-1"))
    batch = await bench.intake.next_batch(1, version=1, step=0)
    bench.intake.trained(batch, step=1)
    length = bench.ledger.sync()  # the checkpoint is durable, the trainer dies before it acknowledges
    bench.ledger.close()

    restarted = Bench(bench.client, tmp_path, length)
    await restarted.stream.attach()
    assert await restarted.batch(1, version=1) == ["0-1"]
    await restarted.intake.acknowledge()
    assert await restarted.stream.waiting_ids() == ["0-1"]
    assert restarted.ledger.counts == {TRAINED: 1}


def test_samples_take_the_ids_that_their_loss_asks_for() -> None:
    teachers = {
        "a": ObjectiveSection(loss="reverse_kl", coefficient=0.5),
        "b": ObjectiveSection(loss="jsd"),
        "c": ObjectiveSection(loss="skew_kl", alpha=0.25),
    }
    candidates = {
        "candidate_ids": np.full((3, 4), 7, np.int32),
        "candidate_logprobs": np.full((3, 4), -2.0, np.float32),
    }
    made = [
        make_trajectory("0-0", teacher="a", advantage=-0.5, **candidates),
        make_trajectory("0-1", teacher="b", advantage=None),
        make_trajectory("0-2", teacher="c", advantage=1.0),
    ]
    a, b, c = samples_of(made, teachers, reward_coefficient=2.0)
    assert a.top_ids is not None and a.top_ids.tolist() == [[7] * 4] * 3 and a.top_logprobs is not None
    assert b.top_ids is not None and b.top_ids.tolist() == [[0, 1]] * 3
    assert [s.teacher for s in (a, b, c)] == [0, 1, 2]
    assert [s.loss for s in (a, b, c)] == ["reverse_kl", "jsd", "skew_kl"]
    assert [s.coefficient for s in (a, b, c)] == [0.5, 1.0, 1.0]
    assert [s.teacher_weight for s in (a, b, c)] == [0.0, 0.5, 0.25]
    assert [s.advantage for s in (a, b, c)] == [-1.0, 0.0, 2.0]
