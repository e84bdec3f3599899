"""Evaluation of an announced version on held-out prompts, by one of the workers, with its own engine.

Per data source: `accuracy`, the share of greedy answers that the task's checker accepts (null without a checker), and
`reverse_kl`, the mean over tokens of log q(y_t) − log p(y_t) with y sampled from the student q at temperature 1 and p
the data source's teacher: an unbiased estimate of the reverse KL per token.

Once, also `teacher_accuracy`: the same greedy accuracy of every teacher on every data source.

The weights stay as they are while an evaluation runs.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from services.rollout.config import RolloutConfig
from services.rollout.prompts import Renderer
from services.rollout.sampler import Sampler
from services.rollout.weights import WeightFollower
from shared import log, tasks
from shared.aio import end
from shared.client import LogprobsClient
from shared.errors import TeacherError
from shared.policy import Announcement, Policy
from shared.prompts import PromptRecord
from shared.wire import LogprobsRequest
from shared.wire_generate import GenerateRequest

_LOG = log.get(__name__)
_POLL_S = 0.1
_LOCK_S = 60.0
_RETRY_S = 2.0


class Evaluator:
    """Evaluates versions that ask for it.

    Args:
        held_out: prompts by data source.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        worker: str,
        policy: Policy,
        sampler: Sampler,
        follower: WeightFollower,
        client: LogprobsClient,
        renderer: Renderer,
        held_out: dict[str, list[PromptRecord]],
    ) -> None:
        self._config = config
        self._worker = worker
        self._policy = policy
        self._sampler = sampler
        self._follower = follower
        self._client = client
        self._renderer = renderer
        self._held_out = held_out
        self._places = asyncio.Semaphore(config.rollout.concurrency * config.rollout.n)
        self._teacher_accuracy: dict[str, dict[str, float | None]] | None = None

    async def run(self) -> None:
        """Evaluate whatever version is served and asks for it, for ever. Another worker takes over where one dies."""
        done = 0
        while True:
            announcement = self._follower.current
            if announcement is None or not announcement.evaluate or announcement.version <= done:
                await asyncio.sleep(_POLL_S)
            elif await self._policy.evaluation(announcement.version) is not None:
                done = announcement.version
            elif not await self._policy.lock_evaluation(announcement.version, self._worker, _LOCK_S):
                await asyncio.sleep(_RETRY_S)
            else:
                await self._evaluate_and_store(announcement)

    async def _evaluate_and_store(self, announcement: Announcement) -> None:
        renewal = asyncio.create_task(self._keep_lock(announcement.version))
        try:
            async with self._follower.pinned(announcement) as is_served:
                if is_served:
                    result = await self.evaluate(announcement)
                    await self._policy.put_evaluation(announcement.version, result)
                    summary = {name: values["accuracy"] for name, values in result["data_sources"].items()}
                    _LOG.info("evaluated", extra=log.fields(version=announcement.version, accuracy=summary))
        except TeacherError as error:
            _LOG.error("evaluation_failed", extra=log.fields(version=announcement.version, reason=str(error)))
            await asyncio.sleep(_RETRY_S)
        finally:
            await end([renewal])
            await self._policy.unlock_evaluation(announcement.version, self._worker)

    async def _keep_lock(self, version: int) -> None:
        while True:
            await asyncio.sleep(_LOCK_S / 4)
            await self._policy.lock_evaluation(version, self._worker, _LOCK_S)

    async def evaluate(self, announcement: Announcement) -> dict[str, Any]:
        """The result to store. Raises TeacherError when a teacher does not score even after retries."""
        started = time.monotonic()
        if self._teacher_accuracy is None:
            self._teacher_accuracy = await self._all_teachers()
        data_sources = {}
        for name, records in self._held_out.items():
            answers = await asyncio.gather(*(self._student(name, record) for record in records))
            correct = [is_correct for is_correct, _ in answers if is_correct is not None]
            gaps = np.concatenate([gap for _, gap in answers]) if answers else np.empty(0, np.float32)
            data_sources[name] = {
                "teacher": self._config.routes[name],
                "prompts": len(records),
                "accuracy": float(np.mean(correct)) if correct else None,
                "reverse_kl": float(gaps.mean()) if gaps.size else None,
                "tokens": int(gaps.size),
            }
        return {
            "version": announcement.version,
            "step": announcement.step,
            "worker": self._worker,
            "data_sources": data_sources,
            "teacher_accuracy": self._teacher_accuracy,
            "seconds": time.monotonic() - started,
        }

    async def _student(self, data_source: str, record: PromptRecord) -> tuple[bool | None, np.ndarray]:
        """Whether the greedy answer is right, and log q − log p of every token of a sampled one, [R]."""
        async with self._places:
            prompt_ids = self._renderer.render(record)
            room = self._renderer.room(len(prompt_ids), self._config.rollout.max_tokens)
            is_correct = None
            if _is_checkable(record):
                (greedy,) = await self._sampler.sample(prompt_ids, n=1, max_tokens=room, temperature=0.0)
                is_correct = self._check(record, greedy.token_ids)
            (sampled,) = await self._sampler.sample(prompt_ids, n=1, max_tokens=room)
            request = LogprobsRequest(token_ids=[prompt_ids + sampled.token_ids], prompt_len=[len(prompt_ids)])
            response = await self._client.score(request, teacher=self._config.routes[data_source])
            return is_correct, sampled.logprobs - response.results[0].logprobs

    async def _all_teachers(self) -> dict[str, dict[str, float | None]]:
        """Greedy accuracy by teacher and data source."""
        teachers = sorted(set(self._config.routes.values()))
        return {
            teacher: {name: await self._teacher(teacher, records) for name, records in self._held_out.items()}
            for teacher in teachers
        }

    async def _teacher(self, teacher: str, records: list[PromptRecord]) -> float | None:
        answers = await asyncio.gather(
            *(self._teacher_is_right(teacher, record) for record in records if _is_checkable(record))
        )
        return float(np.mean(answers)) if answers else None

    async def _teacher_is_right(self, teacher: str, record: PromptRecord) -> bool:
        async with self._places:
            prompt_ids = self._renderer.render(record)
            room = self._renderer.room(len(prompt_ids), self._config.rollout.max_tokens)
            (token_ids,) = await self._client.generate(GenerateRequest([prompt_ids], room), teacher=teacher)
            return self._check(record, token_ids)

    def _check(self, record: PromptRecord, token_ids: list[int]) -> bool:
        assert record.task is not None and record.answer is not None  # see _is_checkable
        return tasks.check(record.task, record.answer, self._renderer.decode(token_ids))


def _is_checkable(record: PromptRecord) -> bool:
    return record.task is not None and record.answer is not None
