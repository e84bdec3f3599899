"""Hedging (Dean and Barroso, The Tail at Scale, 2013): a request that takes unusually long is asked a second time.

What is usual is learnt from the last answers: the configured quantile of their seconds per token. The fixed cost of a
request counts as tokens too, so that short and long ones compare. A hundred requests pay for at most five hedges: when
everything is slow, asking twice would make it slower.
"""

from __future__ import annotations

from collections import deque

MIN_SAMPLES = 64
"""Answers before the quantile means anything."""

MAX_SHARE = 0.05
"""Most hedges per request."""

_BURST = 4.0  # unused hedges that are kept
_FIXED_TOKENS = 256
_NUM_SAMPLES = 512
_REFRESH = 16  # answers until the quantile is computed anew


class Hedge:
    """Recent times of one teacher's requests of one kind, and the hedges that are left."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._num_observed = 0
        self._threshold: float | None = None
        self._credit = 0.0

    def begin(self, num_tokens: int) -> float | None:
        """Counts a new request; seconds after which it is unusually slow, None while that is not known."""
        self._credit = min(self._credit + MAX_SHARE, _BURST)
        return None if self._threshold is None else self._threshold * (num_tokens + _FIXED_TOKENS)

    def spend(self) -> bool:
        """Take one hedge, if there is one left."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A request was answered after `seconds`, or had waited so long when another answer came."""
        self._samples.append(seconds / (num_tokens + _FIXED_TOKENS))
        self._num_observed += 1
        if self._num_observed >= MIN_SAMPLES and self._num_observed % _REFRESH == 0:
            ordered = sorted(self._samples)
            self._threshold = ordered[int(self._quantile * len(ordered))]
