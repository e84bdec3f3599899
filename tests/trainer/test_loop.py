"""The loop against a real Valkey and real files, with a student that only counts: stops, resumes, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from services.trainer.config import TrainerConfig
from services.trainer.loop import Trainer
from shared.config import RunConfig, parse
from shared.errors import ConfigError
from shared.keys import Keys
from shared.leases import Gate, Leases
from shared.ledger import TRAINED
from shared.parts import select
from shared.policy import Policy
from shared.stream import TrajectoryStream
from shared.weights import TensorBytes, write_push
from tests.builders import make_run_tree, make_trajectory
from tests.conftest import REPO, wait_until

KEYS = Keys("test")


class CountingRanks:
    """Stands in for the student on its ranks: a checkpoint is the number of steps taken."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.taken = 0
        self.saved: list[int] = []

    def call(self, name: str, argument: Any = None) -> Any:
        return getattr(self, name)(argument)

    def step(self, payloads: list[tuple[str, bytes]]) -> dict[str, Any]:
        self.taken += 1
        return {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "skipped": False, "num_loss_tokens": 1, "metrics": {}}

    def push(self, version: int) -> Any:
        return write_push(self.root / "weights", version, [TensorBytes("w", "float32", (1,), bytes(4))], keep=2)[1]

    def score(self, token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def save(self, folder: str) -> None:
        self.saved.append(self.taken)
        (Path(folder) / "count").write_text(str(self.taken))

    def load(self, folder: str) -> None:
        self.taken = int((Path(folder) / "count").read_text())


class Bench:
    """A run whose trainer starts and stops, while a worker publishes what it is told to."""

    def __init__(self, client: redis.asyncio.Redis, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.policy, self.stream = Policy(client, KEYS), TrajectoryStream(client, KEYS)
        self.ranks = CountingRanks(folder)
        self.stop = asyncio.Event()
        self.published = 0

    def config(self, **sections: Any) -> TrainerConfig:
        tree = make_run_tree(
            run={"name": "test", "dir": str(self.folder), "steps": 10},
            student={"model": str(REPO / "assets" / "demo" / "student"), "max_model_len": 64},
            trainer={"batch_size": 4, "checkpoint_every": 5},
            rollout={"n": 1, "max_tokens": 8, "top_k": 16},
            flow={"max_staleness": 1000, "max_queue_bytes": 10**9},
        )
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        return select(TrainerConfig, parse(RunConfig, tree, origin="test"))

    def start(self, **sections: Any) -> asyncio.Task[None]:
        """A new trainer process, so to say."""
        self.stop, self.ranks = asyncio.Event(), CountingRanks(self.folder)
        student = SimpleNamespace(model=SimpleNamespace(vocab_size=100), weights_root=self.folder / "weights")
        trainer = Trainer(self.config(**sections), student, self.ranks, self.client)  # type: ignore[arg-type]
        return asyncio.create_task(trainer.run(self.stop))

    async def publish(self, count: int) -> None:
        """`count` trajectories of the current version."""
        latest = await self.policy.latest()
        assert latest is not None
        leases = Leases(self.client, KEYS, Gate(1, 4, 1000, 10**9), lease_s=60, max_attempts=3)
        for _ in range(count):
            lease = await leases.take(latest.version)
            await self.stream.publish(lease, [make_trajectory(f"{self.published}-0", version=latest.version)])
            self.published += 1

    async def train(self, steps: int) -> None:
        """Let that many steps happen."""
        before = await self.step_announced()
        await self.publish(4 * steps)
        await wait_until(lambda: self.step_is(before + steps))

    async def step_announced(self) -> int:
        await wait_until(self.is_open)
        return int((await self.policy.state())["step"])

    async def is_open(self) -> bool:
        state = await self.policy.state()
        return "gate" in state and "version" in state

    async def step_is(self, step: int) -> bool:
        return int((await self.policy.state())["step"]) == step

    async def end(self, task: asyncio.Task[None]) -> None:
        self.stop.set()
        await asyncio.wait_for(task, 10)


@pytest.fixture
async def bench(redis_client: redis.asyncio.Redis, tmp_path: Path) -> Bench:
    return Bench(redis_client, tmp_path)


async def test_a_stop_keeps_what_was_trained_since_the_last_checkpoint(bench: Bench) -> None:
    task = bench.start()
    await bench.train(2)
    await bench.publish(3)  # not enough for a step: the trainer waits for more
    await bench.end(task)
    assert bench.ranks.saved == [2]
    assert await bench.stream.waiting_ids() == ["8-0", "9-0", "10-0"], "only what was trained is acknowledged"

    task = bench.start()
    await wait_until(lambda: bench.ranks.taken == 2)
    await bench.publish(1)
    await wait_until(lambda: bench.step_is(3))
    await bench.end(task)
    assert bench.ranks.saved == [3]
    ledger = (bench.folder / "ledger.jsonl").read_text()
    assert ledger.count(TRAINED) == 3 and all(ledger.count(f'"{n}-0"') == 1 for n in range(12))


async def test_a_stop_with_nothing_new_writes_nothing(bench: Bench) -> None:
    task = bench.start()
    await bench.train(5)
    await wait_until(lambda: bench.ranks.saved == [5])
    await bench.end(task)
    assert bench.ranks.saved == [5]


async def test_a_stop_does_not_begin_a_checkpoint_that_takes_too_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.loop.STOP_WITHIN_S", 0.0)
    task = bench.start()
    await bench.train(6)
    await bench.end(task)
    assert bench.ranks.saved == [5], "a checkpoint took longer than half of the time there is"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"n": 2}}, "rollout.n was 1 and is 2"),
        ({"run": {"steps": 1}}, "has taken 2 steps, run.steps=1 is less"),
    ],
)
async def test_another_configuration_is_refused_before_anything_is_loaded(
    bench: Bench, sections: dict[str, Any], said: str
) -> None:
    task = bench.start()
    await bench.train(2)
    await bench.end(task)
    task = bench.start(**sections)
    with pytest.raises(ConfigError, match=said):
        await asyncio.wait_for(task, 10)
    assert bench.ranks.taken == 0
    assert said.split()[0] in (await bench.policy.state())["failed"]


async def test_the_password_is_in_no_checkpoint(bench: Bench) -> None:
    task = bench.start(redis={"url": "redis://:s3cret@host:1/0"})
    await bench.train(1)
    await bench.end(task)
    assert "s3cret" not in (bench.folder / "checkpoints" / "step-00000001" / "state.json").read_text()
