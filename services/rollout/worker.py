"""The worker's loop. One prompt's way through it:

    Leases.take ─▶ Renderer.render ─▶ Sampler.sample ─▶ LogprobsClient.score ─▶ reward ─▶ TrajectoryStream.publish
    (the gate)      token ids          n completions     one request, all n      (tasks)    all n, and the lease ends

    P prompt tokens, R response rows, k alternatives a row: the teacher's own, or those that the student chose

Several prompts are on their way at once. A prompt that cannot be scored goes back to be tried again, counted, and after
`rollout.max_attempts` to the dead letters. Nothing is published while the served weights are not checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from services.rollout import metrics
from services.rollout.config import RolloutConfig
from services.rollout.prompts import Renderer
from services.rollout.sampler import Completion, Sampler
from services.rollout.weights import WeightFollower
from shared import log, tasks
from shared.aio import end, first
from shared.client import LogprobsClient
from shared.errors import ConfigError, EngineDied, LeaseLost, RunFailed, TeacherError
from shared.leases import Held, Lease, Leases
from shared.losses import LOSSES
from shared.prompts import PromptRecord, PromptSet
from shared.stream import TrajectoryStream
from shared.trajectory import Trajectory
from shared.wire import LogprobsRequest, SequenceScores

_LOG = log.get(__name__)
_GATE_POLL_S = 0.05
_FINISHED_POLL_S = 1.0
_RETRY_DELAY_S = 1.0


class RolloutWorker:
    """Samples, has scored and publishes until it is stopped.

    Args:
        drain_s: how long prompts in flight may take to end once it is stopped; then they are given back.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        sampler: Sampler,
        follower: WeightFollower,
        leases: Leases,
        stream: TrajectoryStream,
        client: LogprobsClient,
        prompts: PromptSet,
        renderer: Renderer,
        drain_s: float = 5.0,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._follower = follower
        self._leases = leases
        self._stream = stream
        self._client = client
        self._prompts = prompts
        self._renderer = renderer
        self._drain_s = drain_s
        self._in_flight: dict[asyncio.Task[None], Lease] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then finish or give back what is in flight.

        Raises:
            EngineDied: the engine died.
            RunFailed: a prompt can never be answered.
        """
        try:
            while not stop.is_set():
                self._raise_failures()
                lease = await self._next_lease(stop)
                if lease is not None:
                    task = asyncio.create_task(self._produce(lease))
                    self._in_flight[task] = lease
                    metrics.IN_FLIGHT.set(len(self._in_flight))
        finally:
            await self._drain()

    async def _next_lease(self, stop: asyncio.Event) -> Lease | None:
        """A lease as soon as there is a free place, checked weights and an open gate; None to look again."""
        if len(self._in_flight) >= self._config.rollout.concurrency:
            await asyncio.wait(self._in_flight, timeout=_GATE_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            return None
        if not self._follower.checked:
            await first(stop.wait(), self._follower.wait_checked())
            return None
        answer = await self._leases.take(self._follower.version)
        if isinstance(answer, Lease):
            return answer
        metrics.HELD.labels(answer.reason).inc()
        await first(stop.wait(), asyncio.sleep(_pause_s(answer)))
        return None

    def _raise_failures(self) -> None:
        if not self._sampler.alive:
            raise EngineDied("the student's engine has died; its own message is above")
        for task in [task for task in self._in_flight if task.done()]:
            task.result()
            del self._in_flight[task]
        metrics.IN_FLIGHT.set(len(self._in_flight))

    async def _drain(self) -> None:
        """Let what is in flight end for a while, then give its prompts back."""
        if not self._in_flight:
            return
        _, unfinished = await asyncio.wait(self._in_flight, timeout=self._drain_s if self._sampler.alive else 0)
        await end(unfinished)
        failed = [task for task in self._in_flight if task.cancelled() or task.exception() is not None]
        for task in failed:
            await self._leases.requeue(self._in_flight[task], "its worker stopped", charge=False)
        _LOG.info("drained", extra=log.fields(prompts=len(self._in_flight), given_back=len(failed)))

    async def _produce(self, lease: Lease) -> None:
        """Take one prompt all the way to the stream, or give it back."""
        try:
            async with self._renewed(lease):
                trajectories = await self._answer(lease)
                await self._follower.wait_checked()
                with metrics.stage("publish"):
                    await self._stream.publish(lease, trajectories)
        except LeaseLost as error:
            metrics.LEASES_LOST.inc()
            _LOG.warning("lease_lost", extra=log.fields(seq=lease.seq, detail=str(error)))
        except TeacherError as error:
            metrics.REQUEUED.labels(f"teacher_{error.status}").inc()
            _LOG.warning("requeued", extra=log.fields(seq=lease.seq, attempt=lease.attempt, reason=str(error)))
            await self._leases.requeue(lease, str(error), delay_s=error.retry_after_s or _RETRY_DELAY_S)
        except ConfigError as error:
            raise RunFailed(str(error)) from error
        else:
            metrics.COMPLETIONS.inc(len(trajectories))
            metrics.TOKENS.inc(sum(trajectory.num_rows for trajectory in trajectories))

    @asynccontextmanager
    async def _renewed(self, lease: Lease) -> AsyncIterator[None]:
        """Renews the lease while the block runs; the block is cancelled and LeaseLost raised when that fails."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._config.rollout.lease_s / 3)
                await self._leases.renew(lease)

        owner = asyncio.current_task()
        assert owner is not None
        renewal = asyncio.create_task(renew())

        def give_up(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                owner.cancel()

        renewal.add_done_callback(give_up)
        try:
            yield
        except asyncio.CancelledError:
            if renewal.done() and not renewal.cancelled() and (error := renewal.exception()) is not None:
                owner.uncancel()
                raise error from None
            raise
        finally:
            renewal.remove_done_callback(give_up)
            await end([renewal])

    async def _answer(self, lease: Lease) -> list[Trajectory]:
        record = self._prompts.record_for(lease.seq)
        teacher = self._config.routes.get(record.data_source)
        if teacher is None:
            raise ConfigError(f"prompt {record.prompt_id}: no teacher under routes for {record.data_source!r}")
        by_student = LOSSES[self._config.objectives[teacher].loss].top_k_of == "student"
        top_k = self._config.rollout.top_k
        prompt_ids = self._renderer.render(record)
        created_at = time.time()
        with metrics.stage("sample"):
            completions = await self._sampler.sample(
                prompt_ids,
                n=self._config.rollout.n,
                max_tokens=self._renderer.room(len(prompt_ids), self._config.rollout.max_tokens),
                temperature=self._config.rollout.temperature,
                top_k=top_k if by_student else 0,
            )
        request = LogprobsRequest(
            token_ids=[prompt_ids + completion.token_ids for completion in completions],
            prompt_len=[len(prompt_ids)] * len(completions),
            top_k=0 if by_student else top_k,
            candidate_ids=[completion.top_ids for completion in completions] if by_student else None,
        )
        with metrics.stage("score"):
            response = await self._client.score(request, teacher=teacher)
        scored_at = time.time()
        rewards = [self._reward(record, completion) for completion in completions]
        advantages = group_advantages(rewards)
        return [
            Trajectory(
                id=f"{lease.seq}-{index}",
                prompt_id=record.prompt_id,
                data_source=record.data_source,
                teacher=teacher,
                fingerprint=response.fingerprint,
                token_ids=np.asarray(prompt_ids + completion.token_ids, np.int32),
                prompt_len=len(prompt_ids),
                loss_mask=np.ones(len(completion.token_ids), np.uint8),
                rollout_logprobs=completion.logprobs,
                version_spans=tuple(completion.version_spans),
                reward=rewards[index],
                advantage=advantages[index],
                created_at=created_at,
                scored_at=scored_at,
                **teacher_arrays(completion, scores, top_k=request.top_k),
            )
            for index, (completion, scores) in enumerate(zip(completions, response.results, strict=True))
        ]

    def _reward(self, record: PromptRecord, completion: Completion) -> float | None:
        if record.task is None or record.answer is None:
            return None
        return float(tasks.check(record.task, record.answer, self._renderer.decode(completion.token_ids)))


def group_advantages(rewards: list[float | None]) -> list[float | None]:
    """Each reward minus the mean of the prompt's n completions, which are all here and nowhere else later."""
    known = [reward for reward in rewards if reward is not None]
    baseline = sum(known) / len(known) if known else 0.0
    return [None if reward is None else reward - baseline for reward in rewards]


def teacher_arrays(completion: Completion, scores: SequenceScores, *, top_k: int) -> dict[str, np.ndarray]:
    """The teacher's part of a trajectory, checked row by row against what the student wrote.

    Raises:
        TeacherError: it scored other ids, or a value that no probability has.
    """
    rows = len(completion.token_ids)
    if not np.array_equal(scores.token_ids, completion.token_ids):
        raise TeacherError(200, "the scored ids are not those that the student wrote", _RETRY_DELAY_S)
    top_ids = np.empty((rows, 0), np.int32) if scores.top_ids is None else scores.top_ids
    top_logprobs = np.empty((rows, 0), np.float32) if scores.top_logprobs is None else scores.top_logprobs
    if top_ids.shape != (rows, top_k) or top_logprobs.shape != (rows, top_k):
        raise TeacherError(200, f"top_k={top_k} was asked, {top_ids.shape} ids came back", _RETRY_DELAY_S)
    if not np.isfinite(scores.logprobs).all() or np.isnan(top_logprobs).any():
        raise TeacherError(200, "a teacher logprob is not finite", _RETRY_DELAY_S)
    candidate_logprobs = scores.candidate_logprobs
    if candidate_logprobs is None:
        candidate_logprobs = np.empty((rows, 0), np.float32)
    if candidate_logprobs.shape != completion.top_ids.shape or not (candidate_logprobs < np.inf).all():
        raise TeacherError(200, "the logprobs of the student's candidates do not fit them, or hold NaN", _RETRY_DELAY_S)
    return {
        "teacher_logprobs": scores.logprobs,
        "top_ids": top_ids,
        "top_logprobs": top_logprobs,
        "candidate_ids": completion.top_ids,
        "candidate_logprobs": candidate_logprobs,
    }


def _pause_s(held: Held) -> float:
    return _FINISHED_POLL_S if held.reason == "finished" else _GATE_POLL_S
