"""The two codecs of bodies, and how a map is read from bytes of which nothing is known yet.

Without numpy: the gateway reads maps and never looks into an array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sized
from typing import Any, TypeVar

import msgpack

from shared.errors import Problem, WireError

MAX_VALUES = 2**19
"""Most values (numbers, texts, lists, maps) in a request; an array counts as a few. A list of empty lists takes sixty
times its bytes in memory, and is refused while it is read."""

JSON = "application/json"
MSGPACK = "application/msgpack"

ContainerT = TypeVar("ContainerT", bound=Sized)


def media_type(content_type: str) -> str:
    """The codec of a content-type header; Problem 415 for anything but JSON and msgpack."""
    name = content_type.split(";", 1)[0].strip().lower()
    if name == JSON:
        return JSON
    if name in (MSGPACK, "application/x-msgpack"):
        return MSGPACK
    raise Problem("opd:media-type", f"content-type {name[:60]!r} is not served; send {JSON} or {MSGPACK}")


def decode_body(body: bytes, content_type: str, max_bytes: int) -> dict[str, Any]:
    """The map in a request body, fields unchecked (a router that needs only `model` reads it from here)."""
    codec = media_type(content_type)
    if len(body) > max_bytes:
        raise Problem("opd:too-large", f"the body has {len(body)} bytes, at most {max_bytes} are accepted")
    values = _Values(MAX_VALUES)
    try:
        value = load(body, codec, values)
    except WireError as error:
        if values.are_too_many:
            detail = f"the body holds more than {MAX_VALUES} values: send ids as arrays, and fewer sequences"
            raise Problem("opd:too-large", detail) from error
        raise Problem("opd:malformed", str(error)) from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Problem("opd:malformed", "the body must be a map with the fields of docs/protocol.md")
    return value


class _Values:
    """Counts the values of a body while it is decoded; ValueError from the first one that is too many."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self.are_too_many = False

    def add(self, container: ContainerT) -> ContainerT:
        self.take(1 + len(container))
        return container

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            self.are_too_many = True
            raise ValueError("too many values")


def load(body: bytes, codec: str, values: _Values | None = None) -> Any:
    """Decodes a body; WireError for everything that is not exactly one value, or more than `values` takes."""
    try:
        if codec == MSGPACK:
            if values is None:
                return msgpack.unpackb(body, raw=False)
            # the hooks see a list when it is complete; a single long one is refused by its length
            bounded = {"max_array_len": MAX_VALUES, "max_map_len": MAX_VALUES, "max_ext_len": 0}
            return msgpack.unpackb(body, raw=False, list_hook=values.add, object_hook=values.add, **bounded)
        if values is not None:
            values.take(sum(body.count(sign) for sign in (b",", b"[", b"{")))
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        if values is not None and re.search("exceeds max_(array|map)_len", str(error)):
            values.are_too_many = True
        kind = "msgpack" if codec == MSGPACK else "JSON"
        raise WireError(f"the body is not valid {kind}: {str(error)[:160] or type(error).__name__}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
