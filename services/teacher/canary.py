"""Alive means able: a short sequence, scored at start and again every few seconds, must keep its logprobs.

A teacher that answers -log V for every token, NaN, or nothing at all is up and yet worse than dead: its answers would
be trained on. What the canary sees decides /readyz.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from services.teacher.scorer import Scorer, ScoringError
from shared import log

_log = log.get(__name__)

LENGTH = 24
INTERVAL_S = 5.0
TIMEOUT_S = 60.0

# Mean absolute difference in nats. The same sequence in another batch may take other kernels: that moves it by 1e-5 in
# float32 and by a few hundredths in bfloat16.
_TOLERANCE = {"float32": 1e-3}
_DEFAULT_TOLERANCE = 0.1
_CONSTANT = 1e-6


class Canary:
    """State of the check: `reason` is empty while the teacher is able."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._expected: np.ndarray | None = None
        self.reason = "the engine is starting"

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

    async def check(self) -> bool:
        """Score the sequence once and compare; True when able."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                scores = await self._scorer.score(self.token_ids(), None, 0)
        except TimeoutError:
            reason = f"the canary sequence was not scored within {TIMEOUT_S:g} s"
        except ScoringError as error:
            reason = f"the canary sequence could not be scored: {error}"
        else:
            reason = self._judge(scores.logprobs)
        if reason != self.reason:
            report = _log.error if reason else _log.info
            report("canary", extra=log.fields(able=not reason, reason=reason or "logprobs as recorded"))
        self.reason = reason
        return self.ok

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

    async def watch(self) -> None:
        """Check for ever, every INTERVAL_S."""
        while True:
            started = time.monotonic()
            await self.check()
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - started)))
