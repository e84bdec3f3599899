"""Alive means able: a short sequence, scored at start and again and again, must keep its logprobs.

A teacher that answers -log V for every token, NaN, or nothing at all is up and yet worse than dead: its answers would
be trained on. What the canary sees decides /readyz. It is scored

- at the start, where its logprobs are recorded, and after every wake,
- every INTERVAL_S while nothing is asked; every BUSY_INTERVAL_S while good answers show that the engine works,
- at once when an answer is suspicious: a failure, NaN, or a run of rows that all have the same logprob. Such a run is
  not served before the canary has been scored after it, for a constant may be right (a sure model's 0, say).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import numpy as np

from services.teacher.scorer import Scorer, ScoringError
from shared import log

_log = log.get(__name__)

LENGTH = 24
INTERVAL_S = 5.0
BUSY_INTERVAL_S = 30.0
TIMEOUT_S = 60.0
SUSPICIOUS_ROWS = 16

# Mean absolute difference in nats. The same sequence in another batch may take other kernels: that moves it by 1e-5 in
# float32 and by a few hundredths in bfloat16.
_TOLERANCE = {"float32": 1e-3}
_DEFAULT_TOLERANCE = 0.1
_CONSTANT = 1e-6


class Canary:
    """State of the check.

    Attributes:
        reason: why the teacher is not able; empty while it is.
        in_use: held while the sequence is scored. Who holds it keeps the canary off the engine.
    """

    def __init__(self, scorer: Scorer, clock: Callable[[], float] = time.monotonic) -> None:
        self._scorer = scorer
        self._clock = clock
        self._expected: np.ndarray | None = None
        self.reason = "the engine is starting"
        self.in_use = asyncio.Lock()
        self._begun = -math.inf  # the last complete check
        self._suspected = asyncio.Event()
        self._num_good = 0  # answers seen
        self._constant = math.nan  # the logprob that all of the last `_num_constant` rows had
        self._num_constant = 0

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def expected(self) -> np.ndarray | None:
        """Logprobs [LENGTH - 1] recorded at start."""
        return self._expected

    def token_ids(self) -> list[int]:
        """Ids spread over the vocabulary, the same in every process."""
        info = self._scorer.info
        length = min(LENGTH, info.max_model_len)
        return [(7919 * (index + 1)) % info.vocab_size for index in range(length)]

    async def watch(self, is_awake: Callable[[], bool]) -> None:
        """Check for ever, as often as the module says; not while the engine sleeps."""
        num_good = self._num_good
        while True:
            is_suspected = await self._wait_for_suspicion(INTERVAL_S)
            is_idle, num_good = num_good == self._num_good, self._num_good
            is_old = self._clock() - self._begun >= BUSY_INTERVAL_S
            if is_awake() and (is_suspected or is_idle or is_old or not self.ok):
                await self.check()

    async def _wait_for_suspicion(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._suspected.wait(), seconds)
        except TimeoutError:
            return False
        self._suspected.clear()
        return True

    def suspect(self) -> None:
        """Something went wrong with an answer: look soon."""
        self._suspected.set()

    def observe(self, logprobs: np.ndarray) -> bool:
        """Look at an answer's logprobs [R]; True when it must not be served before a `check`."""
        if not logprobs.size:
            return False
        low, high = float(logprobs.min()), float(logprobs.max())
        if not (low == high or high - low < _CONSTANT):
            self._num_good += 1
            self._num_constant = 0
            return False
        if not (low == self._constant or abs(low - self._constant) < _CONSTANT):
            self._constant, self._num_constant = low, 0
        self._num_constant += logprobs.size
        return self._num_constant >= SUSPICIOUS_ROWS

    async def check(self) -> bool:
        """Score the sequence and compare; True when able. Callers that wait for each other share one scoring."""
        asked = self._clock()
        async with self.in_use:
            if self._begun <= asked:
                await self._check()
            return self.ok

    async def _check(self) -> None:
        begun, num_good = self._clock(), self._num_good
        try:
            async with asyncio.timeout(TIMEOUT_S):
                scores = await self._scorer.score(self.token_ids(), None, 0)
        except TimeoutError:
            reason = f"the canary sequence was not scored within {TIMEOUT_S:g} s"
            if self._num_good != num_good:  # it waits in a long queue, and the engine works
                reason = self.reason
        except ScoringError as error:
            reason = f"the canary sequence could not be scored: {error}"
        else:
            reason = self._judge(scores.logprobs)
        if reason != self.reason:
            report = _log.error if reason else _log.info
            report("canary", extra=log.fields(able=not reason, reason=reason or "logprobs as recorded"))
        self.reason = reason
        self._begun = begun
        self._num_constant = 0

    def _judge(self, logprobs: np.ndarray) -> str:
        if not np.all(np.isfinite(logprobs)):
            return "the canary sequence got logprobs that are not finite"
        if len(logprobs) > 1 and np.ptp(logprobs) < _CONSTANT:
            return f"the canary sequence got the same logprob {logprobs[0]:.3f} for every token"
        if self._expected is None:
            self._expected = logprobs.copy()
            return ""
        difference = float(np.mean(np.abs(logprobs - self._expected)))
        tolerance = _TOLERANCE.get(self._scorer.info.dtype, _DEFAULT_TOLERANCE)
        if difference > tolerance:
            return f"the canary sequence's logprobs moved by {difference:.4f} nats on average since the start"
        return ""
