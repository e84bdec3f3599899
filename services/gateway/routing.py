"""Reading as little of a request as routing needs: the teacher's name, the group of requests that share its prompt,
the size in tokens, the time allowed.

A request that names its teacher in the header is not decoded for any of these.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import Problem
from shared.prefix import PREFIX_HEADER, prefix_key
from shared.wire_body import decode_body

TEACHER_HEADER = "x-teacher"
NUM_TOKENS_HEADER = "x-num-tokens"
TIMEOUT_HEADER = "x-timeout-s"
REQUEST_ID_HEADER = "x-request-id"

MAX_DECODED_BYTES = 2**20
"""Largest body that is decoded to find its `model`, under the teacher's own limit of values; decoding stops the event
loop for all other requests."""

_BYTES_PER_TOKEN = 4
_MAX_BYTES_PER_TOKEN = 8192  # a row of 1,024 candidate ids as JSON text
_SHORT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

PoolT = TypeVar("PoolT")


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        prefix_key: names its prompt; None when the client does not name it and the body was not read.
    """

    teacher: str
    prefix_key: str | None


def read(headers: Mapping[str, str], body: bytes) -> Route:
    """The route of a request: its headers, else what its body says.

    Raises:
        Problem: 400, 413 or 415, saying how to name the teacher or the prompt.
    """
    key = headers.get(PREFIX_HEADER)
    if key is not None and not _SHORT_NAME.fullmatch(key):
        raise Problem("opd:malformed", f"{PREFIX_HEADER} must be 1 to 64 letters, digits, dots, dashes or underscores")
    if teacher := headers.get(TEACHER_HEADER):
        return Route(teacher, key)
    fields = _read_fields(headers, body)
    teacher = fields.get("model")
    if not isinstance(teacher, str) or not teacher:
        raise Problem("opd:malformed", f"no teacher is named: set `model` in the body or the header {TEACHER_HEADER}")
    return Route(teacher, key or _prompt_key(fields))


def find_pool(pools: Mapping[str, PoolT], name: str) -> PoolT:
    """The pool of a teacher; there is no default one. Raises Problem 404 that lists the known names."""
    try:
        return pools[name]
    except KeyError:
        known = sorted(pools)
        raise Problem(
            "opd:unknown-teacher",
            f"there is no teacher {name[:80]!r}; known teachers: {', '.join(known)}",
            teachers=known,
        ) from None


def num_tokens(headers: Mapping[str, str], num_bytes: int) -> int:
    """Size of a request in tokens: what its header says, if its body can hold so many, else an estimate from bytes."""
    text = headers.get(NUM_TOKENS_HEADER, "")
    if text.isascii() and text.isdigit() and len(text) < 12:
        claimed = int(text)
        if max(1, num_bytes // _MAX_BYTES_PER_TOKEN) <= claimed <= num_bytes:
            return claimed
    return max(1, num_bytes // _BYTES_PER_TOKEN)


def timeout_s(headers: Mapping[str, str], limit_s: float) -> float:
    """Seconds that a request may take: its header, at most `limit_s`. Raises Problem 400 for anything but a number."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return limit_s
    try:
        asked = float(text)
    except ValueError:
        asked = 0.0
    if not asked > 0:  # also NaN
        raise Problem("opd:malformed", f"{TIMEOUT_HEADER} is {text[:40]!r}, it must be a number of seconds above 0")
    return min(asked, limit_s)


def request_id(headers: Mapping[str, str]) -> str | None:
    """The client's request id if it is safe to log and to pass on."""
    text = headers.get(REQUEST_ID_HEADER, "")
    return text if _SHORT_NAME.fullmatch(text) else None


def _read_fields(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    if len(body) > MAX_DECODED_BYTES:
        raise Problem(
            "opd:too-large",
            f"a body of {len(body)} bytes is not decoded to find its teacher (at most {MAX_DECODED_BYTES}): "
            f"name the teacher in the header {TEACHER_HEADER}",
        )
    return decode_body(body, headers.get("content-type", ""), MAX_DECODED_BYTES)


def _prompt_key(fields: dict[str, Any]) -> str | None:
    """The same key that our own client makes of the first sequence's prompt; None where there is no prompt to see."""
    try:
        if text := fields.get("prompt") or fields.get("messages"):
            return prefix_key(repr(text).encode(errors="replace"))
        ids, length = fields["token_ids"][0], fields["prompt_len"][0]
        if isinstance(ids, dict):
            return prefix_key(bytes(ids["data"][: 4 * length]))
        return prefix_key(struct.pack(f"<{length}i", *ids[:length]))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, struct.error):
        return None  # not a request that a teacher takes: it says why better than can be said here
