"""The bodies of `POST /logprobs`: requests and responses, in msgpack for services and JSON for people.

Those of `POST /generate` are in wire_generate.py.

Row t of a response is log p(y_t | prompt, y_<t): see docs/protocol.md. Requests are checked completely before any
work is done for them: `parse_request` raises the `Problem` that the client gets. Responses are checked by their
reader: `decode_response` raises `WireError`.

    R rows (response tokens), k = top_k, C candidates a row
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from shared import arrays
from shared.errors import Problem, WireError
from shared.wire_body import JSON, MSGPACK, decode_body, load, media_type
from shared.wire_json import dump_response
from shared.wire_request import build_request, check_sequences
from shared.wire_types import Limits, LogprobsDtype, LogprobsRequest, LogprobsResponse, SequenceScores

__all__ = [
    "JSON", "MSGPACK", "Limits", "LogprobsDtype", "LogprobsRequest", "LogprobsResponse", "SequenceScores",
    "check_sequences", "choose_accept", "decode_answer", "decode_body", "decode_response", "encode_request",
    "encode_response", "media_type", "parse_request",
]  # fmt: skip

_WIRE_DTYPE: dict[str, str] = {"float32": arrays.FLOAT32, "float16": arrays.FLOAT16}


def parse_request(body: bytes, content_type: str, limits: Limits) -> LogprobsRequest:
    """A request that is valid under `limits`; token ids of a text request are filled in later by the teacher.

    Raises:
        Problem: 400, 413, 415 or 422, naming the field and the sequence.
    """
    return build_request(decode_body(body, content_type, limits.max_body_bytes), limits)


def encode_request(request: LogprobsRequest) -> bytes:
    """A request in msgpack; token ids and candidates travel as arrays."""
    fields: dict[str, Any] = {"top_k": request.top_k, "logprobs_dtype": request.logprobs_dtype}
    if request.token_ids is not None:
        fields["token_ids"] = [arrays.pack(np.asarray(ids, dtype=np.int32)) for ids in request.token_ids]
    if request.candidate_ids is not None:
        fields["candidate_ids"] = [arrays.pack(np.asarray(ids, dtype=np.int32)) for ids in request.candidate_ids]
    if request.prompt_len is not None:
        fields["prompt_len"] = [int(length) for length in request.prompt_len]
    for name in ("model", "prompt", "messages", "completion"):
        if getattr(request, name) is not None:
            fields[name] = getattr(request, name)
    return msgpack.packb(fields)


def choose_accept(accept: str, content_type: str) -> str:
    """The codec of the answer: msgpack or JSON if `accept` names it, else the request's own."""
    names = {part.split(";", 1)[0].strip().lower() for part in accept.split(",")}
    if names & {MSGPACK, "application/x-msgpack"}:
        return MSGPACK
    if JSON in names:
        return JSON
    return media_type(content_type)


def encode_response(
    response: LogprobsResponse, accept: str, logprobs_dtype: LogprobsDtype = "float32"
) -> tuple[bytes, str]:
    """The body and its content type, msgpack if `accept` names it, else JSON."""
    if MSGPACK not in accept:
        return dump_response(response).encode(), JSON
    wide = np.dtype(_WIRE_DTYPE[logprobs_dtype])
    results = []
    for scores in response.results:
        fields: dict[str, Any] = {
            "token_ids": arrays.pack(np.asarray(scores.token_ids, dtype=np.int32)),
            "logprobs": arrays.pack(np.asarray(scores.logprobs, dtype=np.float32)),
        }
        if scores.top_ids is not None:
            fields["top_ids"] = arrays.pack(np.asarray(scores.top_ids, dtype=np.int32))
        for name in ("top_logprobs", "candidate_logprobs"):
            if (values := getattr(scores, name)) is not None:
                fields[name] = arrays.pack(np.asarray(values, dtype=wide))
        for name in ("tokens", "top_tokens"):
            if (texts := getattr(scores, name)) is not None:
                fields[name] = texts
        results.append(fields)
    body = {
        "model": response.model, "fingerprint": response.fingerprint, "results": results, "usage": response.usage
    }  # fmt: skip
    return msgpack.packb(body), MSGPACK


def decode_answer(body: bytes, content_type: str, max_bytes: int) -> dict[str, Any]:
    """The map in an answer: `model` and `fingerprint` are text, `results` is a list, `usage` a map.

    Raises:
        WireError: too large, malformed, or a field is missing.
    """
    if len(body) > max_bytes:
        raise WireError(f"the answer has {len(body)} bytes, at most {max_bytes} are accepted")
    try:
        codec = media_type(content_type)
    except Problem as problem:
        raise WireError(f"answer: {problem.detail}") from problem
    value = load(body, codec)
    if not isinstance(value, dict):
        raise WireError("the answer is not a map")
    value.setdefault("usage", {})
    if not (isinstance(value.get("model"), str) and isinstance(value.get("fingerprint"), str)):
        raise WireError("the answer lacks model or fingerprint")
    if not (isinstance(value.get("results"), list) and isinstance(value["usage"], dict)):
        raise WireError("results must be a list and usage a map")
    return value


def decode_response(body: bytes, content_type: str, max_bytes: int) -> LogprobsResponse:
    """A response whose arrays have the shapes that they must have.

    A null logprob in JSON reads as -inf: it is the only value without a JSON form that a teacher may send.

    Raises:
        WireError: too large, malformed, or arrays that do not fit each other.
    """
    value = decode_answer(body, content_type, max_bytes)
    scores = [_decode_scores(item, index, max_bytes) for index, item in enumerate(value["results"])]
    return LogprobsResponse(value["model"], value["fingerprint"], scores, value["usage"])


def _decode_scores(item: object, index: int, max_bytes: int) -> SequenceScores:
    name = f"results[{index}]"
    if not isinstance(item, dict):
        raise WireError(f"{name} is not a map")

    def read(key: str, dtypes: set[str], shape: list[int | None]) -> np.ndarray | None:
        if key not in item:
            return None
        label = f"{name}.{key}"
        if arrays.is_packed(item[key]):
            return arrays.unpack(item[key], dtypes=dtypes, shape=shape, max_bytes=max_bytes, name=label)
        return _from_lists(item[key], arrays.INT32 if arrays.INT32 in dtypes else arrays.FLOAT32, shape, label)

    token_ids = read("token_ids", {arrays.INT32}, [None])
    if token_ids is None:
        raise WireError(f"{name} has no token_ids")
    rows = len(token_ids)
    logprobs = read("logprobs", {arrays.FLOAT32}, [rows])
    if logprobs is None:
        raise WireError(f"{name} has no logprobs")
    wide = {arrays.FLOAT32, arrays.FLOAT16}
    top_ids = read("top_ids", {arrays.INT32}, [rows, None])
    top_logprobs = read("top_logprobs", wide, [rows, None])
    if (top_ids is None) != (top_logprobs is None) or (top_ids is not None and top_ids.shape != top_logprobs.shape):
        raise WireError(f"{name}: top_ids and top_logprobs differ in shape")
    candidates = read("candidate_logprobs", wide, [rows, None])
    tokens, top_tokens = item.get("tokens"), item.get("top_tokens")
    return SequenceScores(token_ids, logprobs, top_ids, top_logprobs, candidates, tokens, top_tokens)


def _from_lists(value: object, dtype: str, shape: list[int | None], name: str) -> np.ndarray:
    """An array from (nested) JSON lists; an empty list fits every shape with no rows."""
    if not isinstance(value, list):
        raise WireError(f"{name}: expected a list or an array")
    if not value and len(shape) == 2:
        array = np.empty((0, 0), dtype)
    else:
        try:
            array = np.array(value, dtype=np.float64 if dtype == arrays.FLOAT32 else np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"{name}: not a regular list of numbers") from error
        if dtype == arrays.FLOAT32:
            array[np.isnan(array)] = -np.inf  # null
        elif array.size and not (array.min() >= 0 and array.max() < 2**31):
            raise WireError(f"{name}: ids are integers from 0 to 2^31 - 1")
    fits = array.ndim == len(shape) and all(want in (None, have) for have, want in zip(array.shape, shape, strict=True))
    if not fits:
        raise WireError(f"{name}: shape {list(array.shape)} where {shape} is expected")
    return array.astype(dtype)
