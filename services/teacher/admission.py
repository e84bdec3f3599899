"""A bounded queue, counted in tokens: what does not fit is refused at once, with the time after which it would."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.errors import Problem

_LONGEST_WAIT_S = 60.0
_UNKNOWN_WAIT_S = 1.0  # before anything has been answered
_SAME_MOMENT_S = 0.002
_HALF_LIFE_S = 10.0  # of what is remembered of the drain rate, in seconds of work


class Admission:
    """Counts the tokens of all requests between admission and answer.

    Attributes:
        tokens: admitted and not yet answered.
    """

    def __init__(self, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._clock = clock
        self._waiting: dict[object, int] = {}  # tokens of each request, in order of admission
        self._drain = _DrainRate()
        self._now = self._last_leave = clock()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def admit(self, num_tokens: int) -> Iterator[None]:
        """Holds `num_tokens` of the queue.

        Raises:
            Problem: 413 if the request could never be admitted, 429 with Retry-After if not now.
        """
        if num_tokens > self.max_tokens:
            raise Problem("opd:too-large", f"{num_tokens} tokens in one request; the queue holds {self.max_tokens}")
        self._work_until_now()
        if self.tokens + num_tokens > self.max_tokens:
            raise Problem(
                "opd:overloaded",
                f"{self.tokens} tokens are queued and {num_tokens} more do not fit into {self.max_tokens}",
                retry_after_s=self._wait_s(num_tokens),
            )
        if self.tokens == 0:
            self._last_leave = self._now  # idle time is no sign of slowness
        request = object()
        self._waiting[request] = num_tokens
        self.tokens += num_tokens
        self._empty.clear()
        answered = False
        try:
            yield
            answered = True
        finally:
            self._work_until_now()
            if answered:  # what was cancelled says nothing about how fast the engine is
                self._drain.add_tokens(num_tokens, self._now)
                self._last_leave = self._now
            del self._waiting[request]
            self.tokens -= num_tokens
            if not self._waiting:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Returns when every admitted request has been answered or given up."""
        await self._empty.wait()

    def _work_until_now(self) -> None:
        now = self._clock()
        if self.tokens:
            self._drain.add_time(now - self._now)
        self._now = now

    def _wait_s(self, num_tokens: int) -> float:
        """Seconds until enough tokens will have left, at the measured rate: the oldest requests first, and as many
        together as usual."""
        rate = self._drain.tokens_per_s
        if not rate:
            return _UNKNOWN_WAIT_S
        missing, leaving = self.tokens + num_tokens - self.max_tokens, 0
        for number, tokens in enumerate(self._waiting.values(), 1):
            leaving += tokens
            if leaving >= missing and number % self._drain.num_together == 0:
                break
        return min(_LONGEST_WAIT_S, max(0.0, leaving / rate - (self._now - self._last_leave)))


class _DrainRate:
    """Tokens answered per second of work, over the last seconds of it.

    Sums of both, each fading alike. A mean of rates would be ruled by requests that leave at the same moment.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._moments = 0.0  # at which something left
        self._last_moment = -math.inf

    @property
    def tokens_per_s(self) -> float:
        """0 until something is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def num_together(self) -> int:
        """Requests that leave at one moment: an engine step ends the prompts of several."""
        return max(1, round(self._requests / self._moments)) if self._moments > 0 else 1

    def add_time(self, seconds: float) -> None:
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._tokens *= kept
        self._requests *= kept
        self._moments *= kept
        self._seconds = self._seconds * kept + seconds

    def add_tokens(self, num_tokens: int, now: float) -> None:
        self._tokens += num_tokens
        self._requests += 1
        if now - self._last_moment > _SAME_MOMENT_S:
            self._moments += 1
        self._last_moment = now
