"""A scorer without an engine: logprobs that follow from the ids alone, and faults on request."""

from __future__ import annotations

import asyncio

import numpy as np

from services.teacher.scorer import ScorerInfo, ScoringError
from shared.wire import SequenceScores

VOCAB_SIZE = 320


class FakeScorer:
    """Scores `token` after `previous` with -(1 + (31·previous + token) mod 97 / 100), the likeliest first."""

    def __init__(self) -> None:
        self.info = ScorerInfo("fake", "float32", VOCAB_SIZE, max_model_len=64, max_top_k=8)
        self.alive = True
        self.fault: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_flight = 0
        self.cancelled = 0
        self.asleep = False
        self.scored = 0

    @property
    def num_unfinished(self) -> int:
        return self.in_flight

    async def start(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    async def sleep(self) -> None:
        if self.fault == "insomnia":
            raise ScoringError("the engine cannot sleep")
        assert self.in_flight == 0
        self.asleep = True

    async def wake(self) -> None:
        if self.fault == "coma":
            raise ScoringError("the engine cannot wake")
        self.asleep = False

    async def close(self) -> None:
        pass

    async def generate(self, token_ids: list[int], max_tokens: int, stop_token_ids: list[int]) -> list[int]:
        """Counts on from the last id: 7 8 9 …, up to a stop token."""
        await self._pass_gate()
        if self.fault == "raise":
            raise ScoringError("the engine failed")
        ids = [(token_ids[-1] + 1 + step) % VOCAB_SIZE for step in range(max_tokens)]
        stops = [index + 1 for index, token_id in enumerate(ids) if token_id in stop_token_ids]
        return ids[: min(stops, default=max_tokens)]

    async def score(
        self, token_ids: list[int], prompt_len: int | None, top_k: int, candidate_ids: np.ndarray | None = None
    ) -> SequenceScores:
        self.scored += 1
        await self._pass_gate()
        if self.fault == "raise":
            raise ScoringError("the engine returned NaN or +inf in logprobs")
        if self.fault == "bug":
            raise RuntimeError("a bug")
        first = 1 if prompt_len is None else prompt_len
        table = -(1 + (31 * np.array(token_ids)[:, None] + np.arange(VOCAB_SIZE)) % 97 / 100)
        table = table[first - 1 : -1].astype(np.float32)
        targets = np.array(token_ids[first:], dtype=np.int32)
        scores = SequenceScores(targets, table[np.arange(len(targets)), targets])
        if self.fault == "constant":
            scores.logprobs[:] = -5.77
        elif self.fault == "nan":
            scores.logprobs[:] = np.nan
        elif self.fault == "shifted":
            scores.logprobs -= 0.5
        elif self.fault == "infinite":
            scores.logprobs[-1] = -np.inf
        if top_k:
            ids = np.argsort(-table, axis=1, kind="stable")[:, :top_k]
            scores.top_ids, scores.top_logprobs = ids.astype(np.int32), np.take_along_axis(table, ids, axis=1)
        if candidate_ids is not None:
            scores.candidate_logprobs = np.take_along_axis(table, candidate_ids, axis=1)
        return scores

    async def _pass_gate(self) -> None:
        assert not self.asleep
        self.in_flight += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
