"""What /docs says of POST /logprobs and /generate.

Bodies are read by shared.wire and shared.wire_generate, so their shapes are written here by hand.
"""

from __future__ import annotations

from typing import Any

from shared.wire_docs import FORMS, IDS, MESSAGE

_TIMEOUT = {"type": "number", "exclusiveMinimum": 0, "maximum": 3600}
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}

_REQUEST: dict[str, Any] = {
    "type": "object",
    "oneOf": FORMS,
    "additionalProperties": False,
    "properties": {
        "model": {"type": "string", "description": "This teacher's name; anything else is 404"},
        "token_ids": IDS | {"description": "Sequences, prompt and response together"},
        "prompt_len": {"type": "array", "items": {"type": "integer", "minimum": 1}, "description": "Per sequence"},
        "top_k": {"type": "integer", "minimum": 0, "default": 0},
        "candidate_ids": {
            "type": "array",
            "items": IDS,
            "description": "ids to score at each row, [R][C] per sequence; 422 where the engine cannot",
        },
        "prompt": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "completion": {"type": "string", "description": "The text to score after prompt or messages"},
        "logprobs_dtype": {"enum": ["float32", "float16"], "default": "float32"},
    },
    "example": {"prompt": "2+2=", "completion": "4", "top_k": 3},
}
_PROBLEM: dict[str, Any] = {
    "application/problem+json": {
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("type", "title", "detail")}
            | {"status": {"type": "integer"}},
        }
    }
}
_STATUSES = {
    400: "Malformed", 401: "No or wrong key", 404: "Another teacher's name", 413: "Too long or too large",
    415: "Neither JSON nor msgpack", 422: "A value that this teacher does not take", 429: "Full: Retry-After",
    500: "The engine failed or answered NaN", 503: "Starting, asleep or not able: Retry-After",
    504: "x-timeout-s has passed",
}  # fmt: skip

_GENERATE_REQUEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["token_ids", "max_tokens"],
    "properties": {
        "model": {"type": "string", "description": "This teacher's name; anything else is 404"},
        "token_ids": IDS | {"description": "Prompts"},
        "max_tokens": {"type": "integer", "minimum": 1, "description": "Of each continuation, the stop token included"},
    },
    "example": {"token_ids": [[50, 43, 50, 61]], "max_tokens": 4},
}


def _operation(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "header", "schema": schema, "description": text}
            for name, schema, text in (
                ("x-timeout-s", _TIMEOUT, "Seconds that the client will wait"),
                ("x-request-id", {"type": "string"}, "Passed back; made up when absent"),
                ("x-teacher", {"type": "string"}, "Checked against this teacher's name"),
            )
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request}, "application/msgpack": _BINARY},
        },
    }


def _problems(*statuses: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": text, "content": _PROBLEM} for status, text in statuses}


def _responses(good: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": good, "content": {"application/msgpack": _BINARY}}} | _problems(*_STATUSES.items())


REST_RESPONSES = _problems(
    (401, "No or wrong key"),
    (500, "The engine failed"),
    (503, "Starting, stopping, or awake without being able: Retry-After"),
)
INFO_RESPONSES = _problems((401, "No or wrong key"), (503, "Starting: Retry-After"))
UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not able to score, and why"}}
LOGPROBS = _operation(_REQUEST)
RESPONSES = _responses("Row t is log p(y_t | prompt, y_<t)")
GENERATE = _operation(_GENERATE_REQUEST)
GENERATE_RESPONSES = _responses("The continuations, end-of-sequence tokens included")
