"""HTTP to gateways side by side: tries again until one answers, within one deadline.

Every request goes to the address that has the fewest of this client's, and to the next at once when that one dies,
hangs or refuses; pauses come only after all have been tried. With a single address every failure is a pause.
Pauses are as long as the server asks, and by chance up to as much again: clients that were refused together must not
come back together (Brooker, Exponential Backoff and Jitter, 2015: "full jitter").
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from shared.errors import TeacherError

MAX_TRIES = 12
"""Most times that one request is sent."""

_RETRIED = frozenset({429, 502, 503, 504})
_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 4.0  # less than uvicorn's default of 5 s: the server must not close a connection under a request
_AVOID_S = 2.0  # for so long an address that failed comes last
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class _TimedOut(TeacherError):
    """The time that one try had is over."""


@dataclass(slots=True)
class _Address:
    """One gateway (or teacher) and what this client knows of it."""

    client: httpx.AsyncClient
    in_flight: int = 0
    failed_at: float = -math.inf

    def order(self) -> tuple[bool, int, float]:
        """Sorts those first that did not fail just now, then by requests in flight, equals by chance."""
        return time.monotonic() - self.failed_at < _AVOID_S, self.in_flight, random.random()


class Addresses:
    """Connections to all addresses. See `LogprobsClient` for the arguments."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None,
        *,
        connections: int,
        timeout_s: float,
        rng: random.Random | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEEPALIVE_S
        )
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        self._addresses = [
            _Address(httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, limits=limits, timeout=timeout))
            for url in urls
        ]

    async def aclose(self) -> None:
        for address in self._addresses:
            await address.client.aclose()

    async def call(
        self, method: str, path: str, headers: dict[str, str], content: bytes, max_bytes: int
    ) -> tuple[bytes, str]:
        """Body and content type of an answer 200, tried again as long as that makes sense.

        Raises:
            TeacherError: the last failure; `retry_after_s` is None where another try cannot help.
        """
        deadline = time.monotonic() + self._timeout_s
        headers = {**headers, "x-request-id": uuid.uuid4().hex}
        failures: list[TeacherError] = []
        round_: list[_Address] = []
        while len(failures) < MAX_TRIES:
            if not round_:
                if failures and not await self._pause(failures, deadline):
                    break
                round_ = sorted(self._addresses, key=_Address.order)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            budget_s = left_s / len(round_)  # one that hangs does not use up the time of the others
            try:
                return await self._try(round_.pop(0), method, path, headers, content, max_bytes, budget_s)
            except TeacherError as error:
                failures.append(error)
                if error.retry_after_s is None:
                    raise
        if failures and not isinstance(failures[-1], _TimedOut):
            raise failures[-1]
        before = [failure.reason for failure in failures if not isinstance(failure, _TimedOut)]
        reason = f"no answer within {self._timeout_s:g} s" + (f"; before that: {before[-1]}" if before else "")
        raise TeacherError(0, reason, 1.0)

    async def _pause(self, failures: list[TeacherError], deadline: float) -> bool:
        """Wait before all addresses are tried again, at least until the first of them wants to be asked.

        Returns:
            False when there is no time for that.
        """
        last = failures[-len(self._addresses) :]
        number = len(failures) // len(self._addresses) - 1
        left_s = deadline - time.monotonic()
        pause_s = pause_after(number, min(failure.retry_after_s or 0.0 for failure in last), left_s, self._rng)
        if pause_s >= left_s:
            return False
        await asyncio.sleep(pause_s)
        return True

    async def _try(
        self,
        address: _Address,
        method: str,
        path: str,
        headers: dict[str, str],
        content: bytes,
        max_bytes: int,
        budget_s: float,
    ) -> tuple[bytes, str]:
        """One request to one address, which is remembered for having failed."""
        headers = {**headers, "x-timeout-s": f"{budget_s:.3f}"}
        address.in_flight += 1
        try:
            async with asyncio.timeout(budget_s):
                return await _exchange(address.client, method, path, headers, content, max_bytes)
        except TimeoutError:
            address.failed_at = time.monotonic()
            raise _TimedOut(0, f"no answer within {budget_s:.1f} s", 0.0) from None
        except TeacherError as error:
            if error.retry_after_s is not None:
                address.failed_at = time.monotonic()
            raise
        finally:
            address.in_flight -= 1


def pause_after(number: int, asked_s: float, left_s: float, rng: random.Random) -> float:
    """Seconds to wait after round `number` (from 0) of failures.

    Args:
        asked_s: the shortest Retry-After of the round, 0 without one.
        left_s: until the deadline; chance takes at most half of what is left after `asked_s`.
    """
    growing_s = min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S)
    return asked_s + rng.uniform(0, min(max(growing_s, asked_s), max(0.0, left_s - asked_s) / 2))


async def _exchange(
    client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], content: bytes, max_bytes: int
) -> tuple[bytes, str]:
    try:
        async with client.stream(method, path, content=content or None, headers=headers) as response:
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > max_bytes:
                    raise TeacherError(200, f"the answer has more than the {max_bytes} bytes that fit the request")
                chunks.append(chunk)
    except httpx.HTTPError as error:
        reason = f"{client.base_url} does not answer: {type(error).__name__} {error}".rstrip()
        raise TeacherError(0, reason, 0.0) from error
    body = b"".join(chunks)
    if response.status_code == 200:
        return body, response.headers.get("content-type", "")
    raise _error(response, body)


def _error(response: httpx.Response, body: bytes) -> TeacherError:
    """The TeacherError for an answer other than 200; `retry_after_s` is 0 where trying again may help at once."""
    try:
        document = httpx.Response(200, content=body).json()
        reason = f"{document['type']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        reason = body[:200].decode(errors="replace")
    if response.status_code not in _RETRIED:
        return TeacherError(response.status_code, reason)
    wait = response.headers.get("retry-after", "")
    return TeacherError(response.status_code, reason, float(wait) if wait.isascii() and wait.isdigit() else 0.0)
