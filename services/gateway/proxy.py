"""One request through the gateway: choose a replica, try, try another, give up in time.

    body ──▶ Pool.choose ──▶ ReplicaClient.post ──▶ an answer that is the client's business ──▶ returned untouched
                 ▲                   │
                 └── another one ◀───┴─ no connection, timeout, noise, 5xx, full (429, 503 with Retry-After)

Scoring and greedy generation change nothing at a replica, so every failed request may be tried again. Each replica that
was not tried yet gets its share of the time that is left, so that one that hangs does not use up the whole deadline.
With hedging a second replica is asked beside one that takes unusually long: the first answer wins, the other request is
dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.answers import read_head
from services.gateway.hedge import Hedge
from services.gateway.metrics import GatewayMetrics
from services.gateway.pool import Pool
from services.gateway.replica import Replica
from services.gateway.routing import TIMEOUT_HEADER
from services.gateway.transport import AnswerTooLarge
from services.gateway.upstream import Answer, AttemptError, ReplicaClient
from shared import aio, log
from shared.errors import Problem

MAX_ATTEMPTS = 4
"""Most replicas that one request is sent to."""

_FAIR_SHARE = 0.1
"""A timeout counts against a replica only if it had this part of the gateway's own limit: else a client in a hurry
could have every replica ejected."""

_CLOCK_SLACK_S = 0.02  # a timer of the event loop may fire a little early; so little time is no time

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A client's request, ready to be sent on.

    Attributes:
        path: of the endpoint, one of `upstream.PATHS`.
        headers: what is sent to the replica, nothing else of the client's headers is.
        deadline: on the clock of time.monotonic.
        prefix_key: names the group of requests with the same prompt.
        first: the replica that is asked first, if it may take one more request; None leaves it to the pool.
    """

    path: str
    request_id: str
    body: bytes
    headers: dict[str, str]
    num_tokens: int
    deadline: float
    prefix_key: str | None = None
    first: Replica | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt gave no answer for the client.

    Attributes:
        retry_after_s: set when the replica itself said that it is busy, and for how long: that is no fault of it.
    """

    reason: str
    retry_after_s: float | None = None
    is_full: bool = False
    is_timeout: bool = False


class Proxy:
    """Sends requests to the replicas of a pool until one answers."""

    def __init__(
        self,
        clients: Mapping[Replica, ReplicaClient],
        metrics: GatewayMetrics,
        *,
        request_timeout_s: float,
        retry_after_s: float,
        hedge_quantile: float | None = None,
    ) -> None:
        self._clients = clients
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._retry_after_s = retry_after_s
        self._hedge_quantile = hedge_quantile
        self._hedges: dict[tuple[str, str], Hedge] = {}

    async def forward(self, pool: Pool, inbound: Inbound) -> tuple[Answer, Replica]:
        """The first usable answer, and who gave it.

        Raises:
            Problem: 413 for an answer over the limit, 429 when all replicas are full, 503 when none can answer (the
                detail names them and their last errors), 504 when the deadline passed.
        """
        failures: dict[Replica, Failure] = {}
        while len(failures) < MAX_ATTEMPTS and (replica := _choose(pool, inbound, failures)):
            left_s = inbound.deadline - time.monotonic()
            if left_s <= _CLOCK_SLACK_S:
                break
            if failures:
                self._metrics.retries.labels(pool.name, next(reversed(failures)).name).inc()
            untried = sum(other.is_serving and other not in failures for other in pool.replicas)
            budget_s = left_s / min(untried, MAX_ATTEMPTS - len(failures))
            answered = await self._ask_with_hedge(pool, replica, inbound, budget_s, failures)
            if answered is not None:
                return answered
        raise self._give_up(pool, failures, is_late=inbound.deadline - time.monotonic() <= _CLOCK_SLACK_S)

    async def _ask_with_hedge(
        self, pool: Pool, replica: Replica, inbound: Inbound, budget_s: float, failures: dict[Replica, Failure]
    ) -> tuple[Answer, Replica] | None:
        """Ask a replica, and another one beside it when the first takes unusually long; who fails joins `failures`."""
        hedge = self._hedge_of(pool, inbound)
        delay_s = hedge.begin(inbound.num_tokens) if hedge else None
        if hedge is None or delay_s is None:
            outcome = await self._attempt(pool, replica, inbound, budget_s)
            if isinstance(outcome, Answer):
                return outcome, replica
            failures[replica] = outcome
            return None
        started = time.monotonic()
        racing = {asyncio.ensure_future(self._attempt(pool, replica, inbound, budget_s)): replica}
        try:
            await asyncio.wait(racing, timeout=delay_s)
            if not any(task.done() for task in racing):
                second = pool.choose({*failures, replica}, inbound.prefix_key)
                if second is not None and second.is_open and hedge.spend():
                    left_s = inbound.deadline - time.monotonic()
                    racing[asyncio.ensure_future(self._attempt(pool, second, inbound, left_s))] = second
            is_hedged = len(racing) > 1
            answered = await _first_answer(racing, failures)
            if is_hedged:
                won = answered is not None and answered[1] is not replica
                self._metrics.hedges.labels(pool.name, "won" if won else "lost").inc()
                if won and replica not in failures:
                    # it was let off, not answered: without a debt a replica that hangs would look idle
                    replica.add_debt(inbound.num_tokens)
                    hedge.observe(inbound.num_tokens, time.monotonic() - started)
            return answered
        finally:
            await aio.end(racing)

    def _hedge_of(self, pool: Pool, inbound: Inbound) -> Hedge | None:
        if self._hedge_quantile is None:
            return None
        return self._hedges.setdefault((pool.name, inbound.path), Hedge(self._hedge_quantile))

    async def _attempt(self, pool: Pool, replica: Replica, inbound: Inbound, budget_s: float) -> Answer | Failure:
        """Ask one replica and remember what that says about it."""
        labels = (pool.name, replica.name)
        started = time.monotonic()
        is_fair = budget_s >= _FAIR_SHARE * self._request_timeout_s
        with replica.attempt(inbound.num_tokens) as attempt:
            outcome = await self._ask(pool, replica, inbound, budget_s)
            if isinstance(outcome, Answer):
                attempt.succeeded()
            elif outcome.retry_after_s is not None or (outcome.is_timeout and not is_fair):
                attempt.overloaded(outcome.reason)
            else:
                attempt.failed(outcome.reason)
        if isinstance(outcome, Answer):
            self._metrics.attempts.labels(*labels, "answered").inc()
            self._metrics.attempt_seconds.labels(*labels).observe(time.monotonic() - started)
            if outcome.status == 200:  # a refusal is an answer to the client, but no work
                self._metrics.tokens.labels(*labels).inc(inbound.num_tokens)
                if hedge := self._hedge_of(pool, inbound):
                    hedge.observe(inbound.num_tokens, time.monotonic() - started)
            self._metrics.answered(*labels, outcome.headers)
            return outcome
        self._metrics.attempts.labels(*labels, "failed" if outcome.retry_after_s is None else "busy").inc()
        _log.warning(
            "attempt_failed",
            extra=log.fields(
                teacher=pool.name,
                replica=replica.name,
                state=replica.state,
                reason=outcome.reason,
                request_id=inbound.request_id,
            ),
        )
        return outcome

    async def _ask(self, pool: Pool, replica: Replica, inbound: Inbound, budget_s: float) -> Answer | Failure:
        headers = {**inbound.headers, TIMEOUT_HEADER: f"{budget_s:.3f}"}
        try:
            answer = await self._clients[replica].post(inbound.path, inbound.body, headers, budget_s)
        except AttemptError as error:
            return Failure(error.reason, is_timeout=error.is_timeout)
        except AnswerTooLarge as error:
            raise Problem(
                "opd:too-large", "the answer is larger than this gateway passes on: send fewer sequences or less top_k"
            ) from error
        return _read_failure(answer) or _read_stranger(answer, pool, replica) or answer

    def _give_up(self, pool: Pool, failures: Mapping[Replica, Failure], *, is_late: bool) -> Problem:
        tried = "; ".join(f"{replica.name}: {failure.reason}" for replica, failure in failures.items())
        if is_late:
            return Problem(
                "opd:deadline", f"teacher {pool.name!r} did not answer in time ({tried or 'none was tried'})"
            )
        waits = [failure.retry_after_s for failure in failures.values() if failure.retry_after_s is not None]
        retry_after_s = min(waits, default=self._retry_after_s)
        if failures and all(failure.is_full for failure in failures.values()):
            detail = f"all replicas of teacher {pool.name!r} are full ({tried})"
            return Problem("opd:overloaded", detail, retry_after_s=retry_after_s)
        others = "; ".join(
            f"{replica.name}: {replica.state.value}, {replica.trouble or 'not asked yet'}"
            for replica in pool.replicas
            if replica not in failures
        )
        detail = "; ".join(part for part in (tried, others) if part)
        return Problem(
            "opd:unavailable",
            f"no replica of teacher {pool.name!r} can answer ({detail})",
            retry_after_s=retry_after_s,
        )


def _choose(pool: Pool, inbound: Inbound, failures: Mapping[Replica, Failure]) -> Replica | None:
    if not failures and inbound.first is not None and inbound.first.is_open:
        return inbound.first
    return pool.choose(failures, inbound.prefix_key)


def _read_failure(answer: Answer) -> Failure | None:
    """None when the answer is the client's business, else why another replica should be asked."""
    status = answer.status
    if status in (401, 403):
        return Failure(f"it refuses this gateway's key with {status}: set the same OPD_API_KEY for both")
    if status == 429 or (status == 503 and "retry-after" in answer.headers):
        wait_s = _seconds(answer.headers.get("retry-after", ""))
        return Failure(f"it answered {status}: {answer.complaint}", retry_after_s=wait_s, is_full=status == 429)
    if status >= 500 and status != 501:
        return Failure(f"it answered {status}: {answer.complaint}", is_timeout=status == 504)
    return None


def _read_stranger(answer: Answer, pool: Pool, replica: Replica) -> Failure | None:
    """None when a 200 begins as this teacher's answers do; another model may have started at the replica's address."""
    if answer.status != 200 or (head := read_head(answer)) == (pool.name, replica.fingerprint):
        return None
    if head is None:
        return Failure("it answered 200 with a body that does not begin with model and fingerprint")
    return Failure(f"{head[0][:80]!r} with fingerprint {head[1][:80]} answered, not {replica.fingerprint}")


async def _first_answer(
    racing: dict[asyncio.Task[Answer | Failure], Replica], failures: dict[Replica, Failure]
) -> tuple[Answer, Replica] | None:
    """The first answer among attempts that run; those that fail move to `failures`, those that still run stay."""
    while racing:
        done, _ = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            replica, outcome = racing.pop(task), task.result()
            if isinstance(outcome, Answer):
                return outcome, replica
            failures[replica] = outcome
    return None


def _seconds(text: str) -> float:
    """A Retry-After header in seconds; one second for a date or noise, at most a minute."""
    return min(float(text), 60.0) if text.isascii() and text.isdigit() else 1.0
