"""A bounded queue, counted in tokens: what does not fit is refused at once, with the time after which it would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Problem

_LONGEST_WAIT_S = 60.0


class Admission:
    """Counts the tokens of all requests between admission and answer."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._rate = 0.0  # tokens a second that left lately, an exponential mean
        self._last_leave = time.monotonic()

    @contextmanager
    def admit(self, num_tokens: int) -> Iterator[None]:
        """Holds `num_tokens` of the queue.

        Raises:
            Problem: 413 if the request could never be admitted, 429 with Retry-After if not now.
        """
        if num_tokens > self.max_tokens:
            raise Problem("opd:too-large", f"{num_tokens} tokens in one request; the queue holds {self.max_tokens}")
        if self.tokens + num_tokens > self.max_tokens:
            raise Problem(
                "opd:overloaded",
                f"{self.tokens} tokens are queued and {num_tokens} more do not fit into {self.max_tokens}",
                retry_after_s=self._wait_s(num_tokens),
            )
        if self.tokens == 0:
            self._last_leave = time.monotonic()  # idle time is no sign of slowness
        self.tokens += num_tokens
        try:
            yield
        finally:
            self.tokens -= num_tokens
            now = time.monotonic()
            rate = num_tokens / max(now - self._last_leave, 1e-3)
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
            self._last_leave = now

    def _wait_s(self, num_tokens: int) -> float:
        """Seconds until enough tokens have left, at the rate seen so far."""
        missing = self.tokens + num_tokens - self.max_tokens
        return min(_LONGEST_WAIT_S, missing / self._rate) if self._rate else 1.0
