"""What /docs says of POST /logprobs and /generate.

The gateway passes bodies through, so their shapes are written here by hand.
"""

from __future__ import annotations

from typing import Any

from shared.wire_docs import FORMS, IDS, MESSAGE

_REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "oneOf": FORMS,
    "properties": {
        "model": {"type": "string", "description": "Teacher name; the header x-teacher spares decoding the body"},
        "token_ids": IDS | {"description": "Sequences of prompt + response"},
        "prompt_len": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        "top_k": {"type": "integer", "minimum": 0, "default": 0},
        "candidate_ids": {"type": "array", "items": IDS},
        "prompt": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
        "completion": {"type": "string"},
        "logprobs_dtype": {"enum": ["float32", "float16"], "default": "float32"},
    },
}
_GENERATE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["token_ids", "max_tokens"],
    "properties": {
        "model": _REQUEST_SCHEMA["properties"]["model"],
        "token_ids": IDS | {"description": "Prompts"},
        "max_tokens": {"type": "integer", "minimum": 1, "description": "Of each continuation"},
    },
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


_SECONDS = {"type": "number", "exclusiveMinimum": 0}


def _header(name: str, description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = schema or {"type": "string"}
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _operation(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": [
            _header("x-teacher", "Teacher name; the body then passes through unread"),
            _header("x-num-tokens", "Tokens in the request, for balancing"),
            _header("x-prefix-key", "Names the prompt: requests with the same one go to one replica while it has room"),
            _header("x-timeout-s", "Seconds that the answer may take, at most the gateway's own limit", _SECONDS),
            _header("x-request-id", "Shown in logs and passed on; made up when absent"),
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request}, "application/msgpack": _BINARY},
        },
    }


LOGPROBS = _operation(_REQUEST_SCHEMA)
GENERATE = _operation(_GENERATE_SCHEMA)

_PROBLEM = {
    "application/problem+json": {
        "schema": {
            "type": "object",
            "required": ["type", "title", "status"],
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
            },
        }
    }
}


def _problems(*statuses: tuple[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": description, "content": _PROBLEM} for status, description in statuses}


RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The teacher's answer", "content": {"application/json": {}, "application/msgpack": _BINARY}}
} | _problems(
    (400, "Malformed"),
    (401, "No or wrong key"),
    (404, "Unknown teacher; the known ones are listed"),
    (413, "Too long or too large"),
    (415, "Neither JSON nor msgpack"),
    (422, "A value that the teacher does not take"),
    (429, "All replicas are full: Retry-After"),
    (503, "No replica can answer: Retry-After"),
    (504, "Deadline exceeded"),
)

INFO_RESPONSES = _problems((401, "No or wrong key"), (404, "Unknown teacher"))
UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready, and why"}}

_URL = {"type": "string", "description": "http://HOST:PORT", "example": "http://10.0.0.5:8101"}
_REGISTRATION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["url"],
    "additionalProperties": False,
    "properties": {
        "url": _URL,
        "instance": {"type": "string", "pattern": "^[A-Za-z0-9._-]{0,64}$", "description": "Names the process"},
    },
}
_CHANGE_PROBLEMS = _problems(
    (400, "Malformed"),
    (401, "Not the registration key"),
    (403, "Registration is off, or not for this host"),
    (404, "Unknown teacher or replica"),
)

REGISTER: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _REGISTRATION_SCHEMA}}}
}
REGISTER_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "Renewed, or a member anyway"},
    201: {"description": "A new member"},
    **_CHANGE_PROBLEMS,
    **_problems((409, "The address of another teacher, or removed by hand"), (413, "Too large")),
}

WITHDRAW: dict[str, Any] = {
    "parameters": [
        {"name": "url", "in": "query", "required": True, "schema": _URL},
        _header("x-timeout-s", "Seconds to wait for requests in flight; without it the answer comes at once", _SECONDS),
    ]
}
WITHDRAW_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "Gone, nothing of it in flight"},
    202: {"description": "No new requests; some are still in flight"},
    **_CHANGE_PROBLEMS,
}
