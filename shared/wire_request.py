"""The checks of a request's fields, each with the status and the words that the client gets.

Structure first (400: a field has the wrong type), then size (413), then values (422). Counts are compared before
elements are looked at, so that an absurd request is refused cheaply.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from shared import arrays
from shared.errors import Problem, WireError
from shared.wire_types import GenerateRequest, Limits, LogprobsRequest

_FIELDS = {
    "model", "token_ids", "prompt_len", "top_k", "candidate_ids", "prompt", "messages", "completion", "logprobs_dtype",
}  # fmt: skip
_GENERATE_FIELDS = {"model", "token_ids", "max_tokens"}
_ROLES = {"system", "user", "assistant", "tool", "developer"}


def build_request(fields: dict[str, Any], limits: Limits) -> LogprobsRequest:
    """A checked request from decoded fields."""
    if unknown := sorted(set(fields) - _FIELDS):
        _malformed(f"unknown field {unknown[0][:40]!r}; known are {', '.join(sorted(_FIELDS))}")
    fields = {name: value for name, value in fields.items() if value is not None}
    request = LogprobsRequest(
        token_ids=_read_token_ids(fields["token_ids"], limits) if "token_ids" in fields else None,
        prompt_len=_read_ints(fields["prompt_len"], "prompt_len") if "prompt_len" in fields else None,
        top_k=_read_int(fields.get("top_k", 0), "top_k"),
        model=_read_text(fields, "model"),
        prompt=_read_text(fields, "prompt"),
        messages=_read_messages(fields["messages"]) if "messages" in fields else None,
        completion=_read_text(fields, "completion"),
        logprobs_dtype=fields.get("logprobs_dtype", "float32"),
    )
    if request.logprobs_dtype not in ("float32", "float16"):
        _invalid("logprobs_dtype is float32 or float16")
    if not 0 <= request.top_k <= limits.max_top_k:
        _invalid(f"top_k is {request.top_k}; this teacher serves 0 to {limits.max_top_k}")
    _check_form(request, "candidate_ids" in fields)
    if request.token_ids is not None:
        check_sequences(request, limits)
        if "candidate_ids" in fields:
            request.candidate_ids = _read_candidates(fields["candidate_ids"], request, limits)
    return request


def check_sequences(request: LogprobsRequest, limits: Limits) -> None:
    """Lengths, vocabulary and prompt lengths of the token ids; Problem 413 or 422 otherwise."""
    sequences = request.token_ids or []
    lengths = request.prompt_len
    if lengths is not None and len(lengths) != len(sequences):
        _invalid(f"prompt_len has {len(lengths)} entries for {len(sequences)} sequences")
    for index, ids in enumerate(sequences):
        _check_ids(ids, index, limits)
        if lengths is not None and not 1 <= lengths[index] <= len(ids):
            _invalid(f"prompt_len[{index}] is {lengths[index]}; it must be 1 to {len(ids)}, the sequence's length")


def build_generate(fields: dict[str, Any], limits: Limits) -> GenerateRequest:
    """A checked request for greedy continuations from decoded fields."""
    if unknown := sorted(set(fields) - _GENERATE_FIELDS):
        _malformed(f"unknown field {unknown[0][:40]!r}; known are {', '.join(sorted(_GENERATE_FIELDS))}")
    for name in ("token_ids", "max_tokens"):
        if fields.get(name) is None:
            _malformed(f"{name} is missing")
    request = GenerateRequest(
        token_ids=_read_token_ids(fields["token_ids"], limits),
        max_tokens=_read_int(fields["max_tokens"], "max_tokens"),
        model=_read_text(fields, "model"),
    )
    if request.max_tokens < 1:
        _invalid(f"max_tokens is {request.max_tokens}; it must be at least 1")
    for index, ids in enumerate(request.token_ids):
        _check_ids(ids, index, limits)
        if len(ids) + request.max_tokens > limits.max_model_len:
            raise Problem(
                "opd:too-large",
                f"token_ids[{index}] has {len(ids)} tokens, which leaves no room for max_tokens={request.max_tokens} "
                f"in the {limits.max_model_len} that this teacher takes",
            )
    return request


def _check_ids(ids: list[int], index: int, limits: Limits) -> None:
    _check_length(len(ids), index, limits)
    if not ids:
        _invalid(f"token_ids[{index}] is empty")
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        _invalid(
            f"token_ids[{index}][{ids.index(bad)}] is {bad}, outside this teacher's vocabulary "
            f"(0 to {limits.vocab_size - 1})"
        )


def _check_form(request: LogprobsRequest, has_candidates: bool) -> None:
    has_text = request.prompt is not None or request.messages is not None
    if request.token_ids is not None:
        if has_text or request.completion is not None:
            _invalid("send token_ids or a text (prompt or messages, and completion), not both")
        return
    if request.prompt is not None and request.messages is not None:
        _invalid("send prompt or messages, not both")
    if not has_text:
        _invalid("token_ids is missing (or prompt or messages, and completion, for text)")
    if request.completion is None:
        _invalid("completion is missing: the text after the prompt whose tokens are to be scored")
    if request.prompt_len is not None or has_candidates:
        _invalid("prompt_len and candidate_ids go with token_ids, not with text")


def _check_length(length: int, index: int, limits: Limits) -> None:
    if length > limits.max_model_len:
        raise Problem(
            "opd:too-large",
            f"token_ids[{index}] has {length} tokens, this teacher takes at most {limits.max_model_len}",
        )


def _read_token_ids(value: object, limits: Limits) -> list[list[int]]:
    if not isinstance(value, list):
        _malformed("token_ids must be a list of sequences")
    if len(value) > limits.max_sequences:
        raise Problem("opd:too-large", f"{len(value)} sequences, at most {limits.max_sequences} in a request")
    return [_read_sequence(item, index, limits) for index, item in enumerate(value)]


def _read_sequence(value: object, index: int, limits: Limits) -> list[int]:
    name = f"token_ids[{index}]"
    if isinstance(value, dict):
        try:
            array = arrays.unpack(value, dtypes={arrays.INT32}, ndim=1, max_bytes=limits.max_body_bytes, name=name)
        except WireError as error:
            _malformed(str(error))
        _check_length(len(array), index, limits)
        return array.tolist()
    if isinstance(value, list):
        _check_length(len(value), index, limits)
    return _read_ints(value, name)


def _read_candidates(value: object, request: LogprobsRequest, limits: Limits) -> list[np.ndarray]:
    sequences = request.token_ids or []
    if not isinstance(value, list):
        _malformed("candidate_ids must be a list with one table per sequence")
    if len(value) != len(sequences):
        _invalid(f"candidate_ids has {len(value)} tables for {len(sequences)} sequences")
    tables = []
    for index, item in enumerate(value):
        prompt_len = 1 if request.prompt_len is None else request.prompt_len[index]
        name, rows = f"candidate_ids[{index}]", len(sequences[index]) - prompt_len
        table = _read_table(item, name, limits)
        if len(table) != rows:
            _invalid(f"{name} has {len(table)} rows for {rows} response tokens")
        if table.shape[1] > limits.max_candidates:
            _invalid(f"{name} has {table.shape[1]} ids a row, at most {limits.max_candidates} are served")
        if table.size and not (table.min() >= 0 and table.max() < limits.vocab_size):
            _invalid(f"{name} holds an id outside this teacher's vocabulary (0 to {limits.vocab_size - 1})")
        tables.append(table)
    return tables


def _read_table(value: object, name: str, limits: Limits) -> np.ndarray:
    """[R, C] int32 from an array or from lists of one length."""
    if isinstance(value, dict):
        try:
            return arrays.unpack(value, dtypes={arrays.INT32}, ndim=2, max_bytes=limits.max_body_bytes, name=name)
        except WireError as error:
            _malformed(str(error))
    if not isinstance(value, list):
        _malformed(f"{name} must be a list of rows")
    rows = [_read_ints(row, f"{name}[{number}]") for number, row in enumerate(value)]
    width = len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        _invalid(f"{name}: every row needs as many ids as the first ({width})")
    if any(not -(2**31) <= number < 2**31 for row in rows for number in row):
        _invalid(f"{name} holds an id outside this teacher's vocabulary (0 to {limits.vocab_size - 1})")
    return np.array(rows, dtype=np.int32).reshape(len(rows), width)


def _read_ints(value: object, name: str) -> list[int]:
    # bool is an int in Python but not on the wire, hence the exact type
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        _malformed(f"{name} must be a list of integers")
    return value


def _read_int(value: object, name: str) -> int:
    if type(value) is not int:
        _malformed(f"{name} must be an integer")
    return value


def _read_text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        _malformed(f"{name} must be text")
    if value is not None:
        _check_characters(value, name)
    return value


def _check_characters(text: str, name: str) -> None:
    """JSON can spell half a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _malformed(f"{name} holds half a surrogate pair, which is no character")


def _read_messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        _malformed("messages must be a list of {role, content}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            _malformed(f"messages[{index}] must have role and content, and nothing else")
        if not all(isinstance(text, str) for text in message.values()):
            _malformed(f"messages[{index}]: role and content are text")
        _check_characters(message["content"], f"messages[{index}].content")
        if message["role"] not in _ROLES:
            _invalid(f"messages[{index}].role must be one of {', '.join(sorted(_ROLES))}")
    return value


def _malformed(detail: str) -> NoReturn:
    raise Problem("opd:malformed", detail)


def _invalid(detail: str) -> NoReturn:
    raise Problem("opd:invalid", detail)
