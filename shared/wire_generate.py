"""The bodies of `POST /generate`: greedy continuations of prompts, in msgpack for services and JSON for people."""

from __future__ import annotations

import json

import msgpack
import numpy as np

from shared import arrays
from shared.errors import WireError
from shared.wire import JSON, MSGPACK, decode_answer, decode_body
from shared.wire_request import build_generate
from shared.wire_types import GenerateRequest, GenerateResponse, Limits

__all__ = [
    "GenerateRequest", "GenerateResponse", "decode_generate_response", "encode_generate_request",
    "encode_generate_response", "parse_generate_request",
]  # fmt: skip


def parse_generate_request(body: bytes, content_type: str, limits: Limits) -> GenerateRequest:
    """A request that is valid under `limits`.

    Raises:
        Problem: 400, 413, 415 or 422, naming the field and the sequence.
    """
    return build_generate(decode_body(body, content_type, limits.max_body_bytes), limits)


def encode_generate_request(request: GenerateRequest) -> bytes:
    """A request in msgpack; token ids travel as arrays."""
    fields = {
        "token_ids": [arrays.pack(np.asarray(ids, dtype=np.int32)) for ids in request.token_ids],
        "max_tokens": request.max_tokens,
    }
    return msgpack.packb(fields if request.model is None else {**fields, "model": request.model})


def encode_generate_response(response: GenerateResponse, accept: str) -> tuple[bytes, str]:
    """The body and its content type, msgpack if `accept` names it, else JSON."""
    head = {"model": response.model, "fingerprint": response.fingerprint}
    if MSGPACK not in accept:
        results: list[dict] = [{"token_ids": ids} for ids in response.results]
        return (json.dumps({**head, "results": results, "usage": response.usage}) + "\n").encode(), JSON
    results = [{"token_ids": arrays.pack(np.asarray(ids, dtype=np.int32))} for ids in response.results]
    return msgpack.packb({**head, "results": results, "usage": response.usage}), MSGPACK


def decode_generate_response(body: bytes, content_type: str, max_bytes: int) -> GenerateResponse:
    """A response in msgpack.

    Raises:
        WireError: too large or malformed.
    """
    value = decode_answer(body, content_type, max_bytes)
    results = []
    for index, item in enumerate(value["results"]):
        name = f"results[{index}].token_ids"
        if not isinstance(item, dict) or "token_ids" not in item:
            raise WireError(f"{name} is missing")
        ids = arrays.unpack(item["token_ids"], dtypes={arrays.INT32}, ndim=1, max_bytes=max_bytes, name=name)
        results.append(ids.tolist())
    return GenerateResponse(value["model"], value["fingerprint"], results, value["usage"])
