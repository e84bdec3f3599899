"""Reading as little of a request as routing needs: the teacher's name, the size in tokens, the time allowed.

A request that names its teacher in the header is never decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack

from shared.errors import Problem

TEACHER_HEADER = "x-teacher"
NUM_TOKENS_HEADER = "x-num-tokens"
TIMEOUT_HEADER = "x-timeout-s"
REQUEST_ID_HEADER = "x-request-id"

MAX_DECODED_BYTES = 2**20
"""Largest body that is decoded to find its `model`; decoding stops the event loop for all other requests."""

_BYTES_PER_TOKEN = 4
_MAX_BYTES_PER_TOKEN = 8192  # a row of 1,024 candidate ids as JSON text
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

PoolT = TypeVar("PoolT")


def teacher_name(headers: Mapping[str, str], body: bytes) -> str:
    """The teacher that a request asks for: its header, else the field `model` of its body.

    Raises:
        Problem: 400, 413 or 415, saying how to name the teacher.
    """
    if name := headers.get(TEACHER_HEADER):
        return name
    media_type = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if media_type not in ("application/json", "application/msgpack", "application/x-msgpack"):
        raise Problem(
            "opd:media-type", f"content-type {media_type[:60]!r}: send application/json or application/msgpack"
        )
    if len(body) > MAX_DECODED_BYTES:
        raise Problem(
            "opd:too-large",
            f"a body of {len(body)} bytes is not decoded to find its teacher (at most {MAX_DECODED_BYTES}): "
            f"name the teacher in the header {TEACHER_HEADER}",
        )
    fields = _decode(body, is_json=media_type == "application/json")
    name = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(name, str) or not name:
        raise Problem("opd:malformed", f"no teacher is named: set `model` in the body or the header {TEACHER_HEADER}")
    return name


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
    return text if _REQUEST_ID.fullmatch(text) else None


def _decode(body: bytes, *, is_json: bool) -> Any:
    try:
        return json.loads(body) if is_json else msgpack.unpackb(body, raw=False)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        kind = "JSON" if is_json else "msgpack"
        text = str(error)[:160] or type(error).__name__
        raise Problem("opd:malformed", f"the body is not valid {kind}: {text}") from error
