"""The teacher between HTTP and engine: checks a request, admits it, scores its sequences, counts what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import numpy as np

from services.teacher.admission import Admission
from services.teacher.canary import Canary
from services.teacher.config import TeacherConfig
from services.teacher.fingerprint import fingerprint
from services.teacher.metrics import Metrics
from services.teacher.observe import note_usage
from services.teacher.rest import Rest
from services.teacher.scorer import Scorer, ScoringError
from services.teacher.text import TextCodec
from shared import log
from shared.errors import Problem, RunFailed
from shared.tokenizer import tokenizer_hash
from shared.wire import (
    Limits,
    LogprobsRequest,
    LogprobsResponse,
    SequenceScores,
    check_sequences,
    encode_response,
    parse_request,
)
from shared.wire_generate import (
    GenerateRequest,
    GenerateResponse,
    encode_generate_response,
    parse_generate_request,
)

_log = log.get(__name__)
_RETRY_AFTER_S = 2.0

Result = TypeVar("Result")
Race = Callable[[Awaitable[Any]], Awaitable[Any]]


class TeacherService:
    """One replica. `start` once; `answer` for every request; `close` once."""

    def __init__(self, config: TeacherConfig, scorer: Scorer) -> None:
        """Reads the model folder's identity. Raises ConfigError when it cannot be read."""
        self.config = config
        self.scorer = scorer
        self.metrics = Metrics()
        self.canary = Canary(scorer)
        self.admission = Admission(config.teacher.max_queued_tokens)
        self.rest = Rest(scorer, self.admission, self.canary)
        self.metrics.queued_tokens.set_function(lambda: self.admission.tokens)
        self.metrics.engine_requests.set_function(lambda: scorer.num_unfinished)
        self.tokenizer_hash = tokenizer_hash(config.teacher.model)
        self.fingerprint = fingerprint(config.teacher.model, self.tokenizer_hash, config.teacher.dtype)
        self.engine_up = False
        self.stopping = False
        self._text = TextCodec(config.teacher.model)
        self._stop_token_ids: list[int] = []
        self._limits: Limits | None = None

    async def start(self) -> None:
        """Start the engine and record the canary.

        Raises:
            RunFailed: the engine did not start, or answers nonsense.
        """
        await self.scorer.start()
        self.engine_up = True
        self._stop_token_ids = await asyncio.to_thread(self._text.stop_token_ids)
        if not await self.canary.check():
            raise RunFailed(f"{self.config.teacher.model} cannot serve: {self.canary.reason}")
        info = self.scorer.info
        self._limits = Limits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_top_k=info.max_top_k,
            max_body_bytes=self.config.teacher.max_body_bytes,
        )
        _log.info("ready", extra=log.fields(model=str(self.config.teacher.model), port=self.config.port))

    def readiness(self) -> tuple[bool, str]:
        """Whether this replica can score, and why not."""
        if self.stopping:
            return False, "stopping"
        if not self.scorer.alive:
            return False, "the engine has died"
        if self._limits is None:
            return False, self.canary.reason or "the engine is starting"
        if not self.rest.is_awake:
            return False, self.rest.state.value
        if not self.canary.ok:
            return False, self.canary.reason
        return True, "the canary sequence has its recorded logprobs"

    @property
    def limits(self) -> Limits:
        """Limits of requests; Problem 503 while the engine starts."""
        if self._limits is None:
            raise Problem("opd:unavailable", "the engine is starting", retry_after_s=_RETRY_AFTER_S)
        return self._limits

    def check_serving(self) -> None:
        """Problem 503 unless requests are answered now: a teacher that is not able answers nothing."""
        ready, reason = self.readiness()
        if not ready:
            raise Problem("opd:unavailable", reason, retry_after_s=_RETRY_AFTER_S)

    def describe(self) -> dict[str, Any]:
        """The document of /info; Problem 503 while the engine starts."""
        limits, info = self.limits, self.scorer.info
        return {
            "model": self.config.name,
            "fingerprint": self.fingerprint,
            "tokenizer_hash": self.tokenizer_hash,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "engine": info.engine,
            "version": _own_version(),
            "limits": {
                "max_model_len": limits.max_model_len,
                "max_top_k": limits.max_top_k,
                "max_body_bytes": limits.max_body_bytes,
                "max_sequences": limits.max_sequences,
                "max_candidates": limits.max_candidates,
                "max_queued_tokens": self.admission.max_tokens,
            },
        }

    def parse(self, body: bytes, content_type: str, named: str | None) -> LogprobsRequest:
        """A request that this teacher can answer; Problem otherwise.

        Args:
            named: teacher that a header asks for, if any; the body's `model` counts as well.
        """
        request = parse_request(body, content_type, self.limits)
        self._check_names(named, request.model)
        return request

    def parse_generate(self, body: bytes, content_type: str, named: str | None) -> GenerateRequest:
        """The same for greedy continuations."""
        request = parse_generate_request(body, content_type, self.limits)
        self._check_names(named, request.model)
        return request

    def _check_names(self, *names: str | None) -> None:
        for name in names:
            if name is not None and name != self.config.name:
                raise Problem("opd:unknown-teacher", f"this is teacher {self.config.name!r}, not {name[:60]!r}")

    async def generate(self, request: GenerateRequest, accept: str, race: Race) -> tuple[bytes, str]:
        """Body and content type of greedy continuations; see `answer`."""
        received = time.monotonic()
        with self._admit(request.num_tokens):
            work = (self.scorer.generate(ids, request.max_tokens, self._stop_token_ids) for ids in request.token_ids)
            results = await race(self._gather(work))
        seconds = time.monotonic() - received
        num_read, num_written = sum(map(len, request.token_ids)), sum(map(len, results))
        self.metrics.tokens.inc(num_read)
        self.metrics.generated.inc(num_written)
        self.metrics.request_s.observe(seconds)
        usage = note_usage({"tokens": num_read + num_written, "engine_ms": round(1000 * seconds, 1)})
        return encode_generate_response(GenerateResponse(self.config.name, self.fingerprint, results, usage), accept)

    async def answer(self, request: LogprobsRequest, accept: str, race: Race) -> tuple[bytes, str]:
        """Body and content type of the answer.

        Args:
            race: wraps the engine's work, and cancels it when the client goes away or its time is up.
        """
        received = time.monotonic()
        is_text = request.token_ids is None
        if is_text:
            await asyncio.to_thread(self._text.encode, request)
            check_sequences(request, self.limits)
        with self._admit(request.num_tokens):
            admitted = time.monotonic()
            results = await race(self._score_all(request))
            engine_ms = 1000 * (time.monotonic() - admitted)
        if is_text:
            await asyncio.to_thread(self._text.decode, results[0])
        self._count(request, results, time.monotonic() - received)
        queue_ms = max((scores.queue_ms for scores in results), default=0.0)
        usage = {
            "tokens": request.num_tokens,
            "cached_tokens": sum(scores.cached_tokens for scores in results),
            "queue_ms": round(queue_ms, 1),
            "engine_ms": round(engine_ms - queue_ms, 1),
        }
        note_usage(usage)
        response = LogprobsResponse(self.config.name, self.fingerprint, results, usage)
        return encode_response(response, accept, request.logprobs_dtype)

    def _admit(self, num_tokens: int) -> AbstractContextManager[None]:
        self.check_serving()  # it may have fallen asleep since the request came
        return self.admission.admit(num_tokens)

    async def _score_all(self, request: LogprobsRequest) -> list[SequenceScores]:
        lengths, candidates = request.prompt_len, request.candidate_ids
        results = await self._gather(
            self.scorer.score(
                ids,
                None if lengths is None else lengths[index],
                request.top_k,
                None if candidates is None else candidates[index],
            )
            for index, ids in enumerate(request.token_ids or [])
        )
        suspicious = [self.canary.observe(scores.logprobs) for scores in results]
        if any(suspicious) and not await self.canary.check():
            raise self._scoring_problem(f"the same logprob in every row, and {self.canary.reason}")
        return results

    async def _gather(self, work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
        """All at once; if one fails the others are cancelled, and its ScoringError becomes a Problem."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(item) for item in work]
        except ExceptionGroup as group_error:
            failed, others = group_error.split(ScoringError)
            if failed is None or others is not None:
                raise
            raise self._scoring_problem(str(failed.exceptions[0])) from group_error
        return [task.result() for task in tasks]

    def _scoring_problem(self, reason: str) -> Problem:
        self.metrics.bad_scores.inc()
        self.canary.suspect()
        _log.error("scoring_failed", extra=log.fields(reason=reason))
        if not self.scorer.alive:
            return Problem(
                "opd:unavailable", "the engine has died; this replica is about to restart", retry_after_s=5.0
            )
        return Problem("opd:internal", f"not scored: {reason}")

    def _count(self, request: LogprobsRequest, results: list[SequenceScores], seconds: float) -> None:
        self.metrics.tokens.inc(request.num_tokens)
        self.metrics.cached_tokens.inc(sum(scores.cached_tokens for scores in results))
        self.metrics.rows.inc(sum(len(scores.token_ids) for scores in results))
        self.metrics.request_s.observe(seconds)
        infinite = sum(int(np.isneginf(scores.logprobs).sum()) for scores in results)
        infinite += sum(int(np.isneginf(s.top_logprobs).sum()) for s in results if s.top_logprobs is not None)
        self.metrics.non_finite.inc(infinite)

    async def sleep(self) -> dict[str, str]:
        """See `Rest.sleep`. Raises Problem: 503 while the engine starts or is dead, 500 when it cannot."""
        await self._move(self.rest.sleep)
        return {"state": self.rest.state.value}

    async def wake(self) -> dict[str, str]:
        """See `Rest.wake`. Raises Problem, also 503 when it is awake and not able."""
        if not await self._move(self.rest.wake):
            raise Problem("opd:unavailable", f"awake, but {self.canary.reason}", retry_after_s=_RETRY_AFTER_S)
        return {"state": self.rest.state.value}

    async def _move(self, move: Callable[[], Awaitable[Result]]) -> Result:
        if self._limits is None or self.stopping or not self.scorer.alive:
            raise Problem("opd:unavailable", self.readiness()[1], retry_after_s=_RETRY_AFTER_S)
        try:
            return await move()
        except ScoringError as error:
            raise self._scoring_problem(str(error)) from error

    async def close(self) -> None:
        """Stop the engine."""
        self.stopping = True
        await self.scorer.close()


def _own_version() -> str:
    try:
        return version("opd-teacher")
    except PackageNotFoundError:
        return "source"
