"""Reading as little of an answer as trust needs: whose it is, from its first two fields."""

from __future__ import annotations

import json
import re

import msgpack

from services.gateway.upstream import Answer

_HEAD_BYTES = 1024
_JSON_HEAD = re.compile(rb'\s*\{\s*"model"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"fingerprint"\s*:\s*("(?:[^"\\]|\\.)*")')


def is_json(answer: Answer) -> bool:
    """JSON, and not msgpack."""
    return answer.headers.get("content-type", "").split(";", 1)[0].strip().lower() == "application/json"


def read_head(answer: Answer) -> tuple[str, str] | None:
    """`model` and `fingerprint`, the first two fields of every answer; None for anything else."""
    start = answer.body[:_HEAD_BYTES]
    try:
        if is_json(answer):
            match = _JSON_HEAD.match(start)
            return (json.loads(match[1]), json.loads(match[2])) if match else None
        unpacker = msgpack.Unpacker(max_buffer_size=_HEAD_BYTES)
        unpacker.feed(start)
        if unpacker.read_map_header() < 2:
            return None
        keys_and_values = [unpacker.unpack() for _ in range(4)]
    except (ValueError, RecursionError, msgpack.UnpackException):
        return None
    model_key, model, fingerprint_key, fingerprint = keys_and_values
    is_head = model_key == "model" and fingerprint_key == "fingerprint"
    return (model, fingerprint) if is_head and isinstance(model, str) and isinstance(fingerprint, str) else None
