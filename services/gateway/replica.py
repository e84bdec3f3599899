"""One replica of a teacher as the gateway sees it: may it get traffic, how loaded is it, when is it asked again.

    STARTING ──probe──▶ READY ──failures in a row──▶ EJECTED ──time up, probe──▶ HALF_OPEN ──3 answers──▶ READY
                         │ ▲                            ▲                           │
             /readyz: no ▼ │ probe passes               └────────one failure────────┘
                        UNREADY              REFUSED: another fingerprint or name than its siblings

    any ──removed──▶ DRAINING: what is in flight finishes, nothing new begins

Load is counted in tokens: what is outstanding, plus a debt for recent failures that halves every two seconds. Without
the debt a replica that fails fast always looks idle and attracts everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

MAX_EJECT_S = 30.0
"""Longest time between two probes of a replica that keeps failing."""

TRIAL_ANSWERS = 3
"""Good answers that a replica on trial gives, one request at a time, before it shares the load again."""

DEBT_FACTOR = 8
"""A failure weighs as much as this many outstanding requests of its size."""

DEBT_HALF_LIFE_S = 2.0


class State(StrEnum):
    """Whether a replica gets traffic: only READY does, and HALF_OPEN one request at a time."""

    STARTING = "starting"
    READY = "ready"
    HALF_OPEN = "half_open"
    EJECTED = "ejected"
    UNREADY = "unready"
    REFUSED = "refused"
    DRAINING = "draining"


class Origin(StrEnum):
    """What made a replica a member of its pool."""

    CONFIG = "config"
    DNS = "dns"
    REGISTERED = "registered"


class Attempt:
    """One request on its way to one replica; exactly one of the verdicts is given, or none when it was cancelled."""

    def __init__(self, replica: Replica, num_tokens: int) -> None:
        self.replica = replica
        self.num_tokens = num_tokens
        self._epoch = replica.epoch

    @property
    def is_late(self) -> bool:
        """Begun before the replica was last ejected: its verdict says nothing about the replica now."""
        return self._epoch != self.replica.epoch

    def succeeded(self) -> None:
        if not self.is_late:
            self.replica.answered()

    def failed(self, reason: str) -> None:
        if not self.is_late:
            self.replica.failed(reason, self.num_tokens)

    def overloaded(self, reason: str) -> None:
        """The replica is well but full: it weighs more for a while, and is not ejected."""
        self.replica.note_error(reason)
        self.replica.add_debt(self.num_tokens)


class Replica:
    """State and load of one replica. All times are seconds of `clock`."""

    def __init__(
        self,
        url: str,
        *,
        eject_after: int,
        probe_interval_s: float,
        origin: Origin = Origin.CONFIG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.origin = origin
        self.name = url.split("://", 1)[-1]
        self.state = State.STARTING
        self.info: dict[str, Any] | None = None
        self.last_error: str | None = None
        self.has_recovered = False
        self.outstanding_tokens = 0
        self.in_flight = 0
        self.num_answers = 0
        self.epoch = 0
        self.on_eject: Callable[[Replica], None] = lambda replica: None
        self._eject_after = eject_after
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._failures_in_row = 0
        self._ejections_in_row = 0
        self._trial_answers = 0
        self._ejected_until = 0.0
        self._debt_tokens = 0.0
        self._debt_at = clock()
        self._last_error_at = 0.0

    @property
    def fingerprint(self) -> str | None:
        """Identity of the model that it last reported, also while it is away."""
        return self.info["fingerprint"] if self.info else None

    @property
    def is_serving(self) -> bool:
        return self.state in (State.READY, State.HALF_OPEN)

    @property
    def is_open(self) -> bool:
        """May get one more request now."""
        return self.state is State.READY or (self.state is State.HALF_OPEN and self.in_flight == 0)

    @property
    def trouble(self) -> str | None:
        """The last error, unless it has served well again since."""
        return None if self.has_recovered else self.last_error

    def load(self) -> float:
        """Outstanding tokens plus what recent failures still weigh."""
        return self.outstanding_tokens + self._debt_now()

    @contextmanager
    def attempt(self, num_tokens: int) -> Iterator[Attempt]:
        """Counts a request as outstanding for as long as the block runs, however it ends."""
        self.outstanding_tokens += num_tokens
        self.in_flight += 1
        try:
            yield Attempt(self, num_tokens)
        finally:
            self.outstanding_tokens -= num_tokens
            self.in_flight -= 1

    def answered(self) -> None:
        """A request was answered well."""
        self.num_answers += 1
        self._failures_in_row = 0
        if self.state is State.HALF_OPEN:
            self._trial_answers += 1
            if self._trial_answers >= TRIAL_ANSWERS:
                self.state = State.READY
                self._ejections_in_row = 0
        self.has_recovered = self.state is State.READY

    def failed(self, reason: str, num_tokens: int = 0) -> None:
        """A request or a probe failed; enough in a row, or one on trial, and the replica is ejected."""
        self.note_error(reason)
        self._failures_in_row += 1
        self.add_debt(num_tokens)
        on_trial = self.state is State.HALF_OPEN
        if on_trial or (self.state is State.READY and self._failures_in_row >= self._eject_after):
            self._eject()

    def note_error(self, reason: str) -> None:
        """Remember what went wrong, and when."""
        self.last_error, self.has_recovered = reason, False
        self._last_error_at = self._clock()

    def add_debt(self, num_tokens: int) -> None:
        """Weigh as if DEBT_FACTOR more requests of that size were outstanding, decaying."""
        self._debt_tokens = self._debt_now() + DEBT_FACTOR * num_tokens
        self._debt_at = self._clock()

    def probe_passed(self, info: dict[str, Any]) -> None:
        """It says that it is ready and the pool accepts its model."""
        self.info = info
        if self.state is State.EJECTED:
            self.state = State.HALF_OPEN
            self._trial_answers = 0
            self._debt_tokens = 0.0  # one request at a time is caution enough; with the debt it would not get even that
        elif self.state is not State.HALF_OPEN:
            self.state = State.READY
        self._failures_in_row = 0
        self.has_recovered = self.state is State.READY

    def probe_refused(self, reason: str) -> None:
        """It answered that it is not ready."""
        self.note_error(reason)
        if self.state is not State.STARTING:
            self.state = State.UNREADY

    def probe_failed(self, reason: str) -> None:
        """It did not answer the probe."""
        self.note_error(reason)
        if self.is_serving:
            self.failed(reason)
        elif self.state is State.EJECTED:
            # asking is cheap: only failed trials make the pause longer, so that a restarted replica is soon found
            self._ejected_until = self._clock() + self._probe_interval_s

    def refuse(self, info: dict[str, Any], reason: str) -> None:
        """It serves something else than its siblings."""
        self.info = info
        self.note_error(reason)
        self.state = State.REFUSED

    def drain(self) -> None:
        """It is no member any more: requests in flight go on, no other state follows."""
        self.state = State.DRAINING
        self.epoch += 1  # verdicts of requests in flight change nothing

    def ban_s(self) -> float:
        """Seconds for which it is left alone after an ejection, also by probes."""
        return max(0.0, self._ejected_until - self._clock()) if self.state is State.EJECTED else 0.0

    def describe(self) -> dict[str, Any]:
        """What /info shows; `recovered` and `last_error_age_s` (seconds) are of the last error, null without one."""
        known = self.last_error is not None
        return {
            "replica": self.name,
            "url": self.url,
            "origin": self.origin.value,
            "state": self.state.value,
            "in_flight": self.in_flight,
            "outstanding_tokens": self.outstanding_tokens,
            "load_tokens": round(self.load()),
            "fingerprint": self.fingerprint,
            "last_error": self.last_error,
            "last_error_age_s": round(self._clock() - self._last_error_at, 1) if known else None,
            "recovered": self.has_recovered if known else None,
        }

    def _debt_now(self) -> float:
        if self._debt_tokens < 1.0:
            return 0.0
        return self._debt_tokens * 0.5 ** ((self._clock() - self._debt_at) / DEBT_HALF_LIFE_S)

    def _eject(self) -> None:
        self.state = State.EJECTED
        self.epoch += 1
        wait_s = self._probe_interval_s * 2.0 ** min(self._ejections_in_row, 16)
        self._ejected_until = self._clock() + min(wait_s, MAX_EJECT_S)
        self._ejections_in_row += 1
        self.on_eject(self)
