"""JSON schemas of what the bodies of POST /logprobs have in common at teacher and gateway, for their /docs."""

from __future__ import annotations

from typing import Any

IDS: dict[str, Any] = {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}}
FORMS: list[dict[str, Any]] = [
    {"required": ["token_ids"]},
    {"required": ["prompt", "completion"]},
    {"required": ["messages", "completion"]},
]
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool", "developer"]},
        "content": {"type": "string"},
    },
}
