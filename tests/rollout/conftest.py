"""A worker's surroundings, put together once per test: real Valkey, a fake student, a fake teacher over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from services.rollout.__main__ import make_leases
from services.rollout.config import RolloutConfig
from services.rollout.evaluate import Evaluator
from services.rollout.prompts import Renderer
from services.rollout.weights import WeightFollower
from services.rollout.worker import RolloutWorker
from shared.aio import end, run_loops
from shared.client import LogprobsClient
from shared.keys import Keys
from shared.policy import Policy
from shared.prompts import PromptSet
from shared.stream import TrajectoryStream
from shared.trajectory import Trajectory, decode
from tests.conftest import wait_until
from tests.rollout.fakes import FakeSampler, FakeTeacher, announcement, make_config, make_student


@dataclass
class World:
    """Everything around a worker; `start` makes one of its loops."""

    folder: Path
    config: RolloutConfig
    store: redis.asyncio.Redis
    teacher: FakeTeacher
    client: LogprobsClient
    sampler: FakeSampler = field(default_factory=FakeSampler)

    def __post_init__(self) -> None:
        self.keys = Keys("test")
        self.policy = Policy(self.store, self.keys)
        self.stream = TrajectoryStream(self.store, self.keys)
        self.leases = make_leases(self.config, self.store)
        self.prompts = PromptSet(self.config.prompts.sources, 0, shuffle=False)
        self.renderer = Renderer(self.config.student.model, max_len=64)
        self.stop = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.background: list[asyncio.Task[None]] = []

    def follower(self, sampler: FakeSampler | None = None) -> WeightFollower:
        return WeightFollower(
            self.policy, sampler or self.sampler, model=self.config.student.model, dtype=self.config.student.dtype
        )

    def worker(self, follower: WeightFollower, **changes: Any) -> RolloutWorker:
        values = {
            "sampler": self.sampler, "follower": follower, "leases": self.leases, "stream": self.stream,
            "client": self.client, "prompts": self.prompts, "renderer": self.renderer, "drain_s": 0.2,
        }  # fmt: skip
        return RolloutWorker(self.config, **{**values, **changes})

    def evaluator(self, follower: WeightFollower, worker: str = "w0") -> Evaluator:
        return Evaluator(
            self.config, worker=worker, policy=self.policy, sampler=self.sampler, follower=follower,
            client=self.client, renderer=self.renderer, held_out=self.prompts.held_out(self.config.eval.size),
        )  # fmt: skip

    def start(self) -> asyncio.Task[None]:
        """A worker with its follower, as the service runs them."""
        follower = self.follower()
        loops = run_loops(self.stop, self.worker(follower).run(self.stop), [follower.run()])
        self.tasks.append(asyncio.create_task(loops))
        return self.tasks[-1]

    def run_behind(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs until the end of the test."""
        self.background.append(asyncio.create_task(coroutine))

    async def announce(self, version: int, *, needed: int = 12, **changes: Any) -> None:
        await self.policy.announce(announcement(self.folder / "w", version, **changes), [], needed=needed)

    async def published(self) -> list[Trajectory]:
        entries = await self.store.xrange(self.keys.trajectories)
        return [decode(body[b"payload"], trajectory_id=body[b"id"].decode()) for _, body in entries]

    async def counter(self, name: str) -> int:
        return int(await self.store.hget(self.keys.counters, name) or 0)

    async def wait_published(self, count: int) -> list[Trajectory]:
        async def there() -> bool:
            return await self.store.xlen(self.keys.trajectories) >= count

        await wait_until(there, what=f"{count} trajectories on the stream")
        return await self.published()


@pytest.fixture
async def world(tmp_path: Path, redis_client: redis.asyncio.Redis) -> AsyncIterator[World]:
    student = make_student(tmp_path / "student")
    teacher = FakeTeacher("words", student)
    async with teacher.serve() as port:
        config = make_config(tmp_path, gateway={"port": port})
        async with LogprobsClient(config.gateway.addresses, None, connections=8, timeout_s=5) as client:
            made = World(tmp_path, config, redis_client, teacher, client)
            yield made
            made.stop.set()
            made.sampler.hold.set()
            await end(made.background)
            await asyncio.gather(*made.tasks, return_exceptions=True)
