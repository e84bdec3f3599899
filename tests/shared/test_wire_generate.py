"""Bodies of POST /generate: both codecs, and every refusal."""

from __future__ import annotations

import json

import msgpack
import pytest

from shared.errors import Problem, WireError
from shared.wire import JSON, MSGPACK, Limits
from shared.wire_generate import (
    GenerateRequest,
    GenerateResponse,
    decode_generate_response,
    encode_generate_request,
    encode_generate_response,
    parse_generate_request,
)

LIMITS = Limits(vocab_size=100, max_model_len=16, max_top_k=4, max_body_bytes=4000, max_sequences=3)


def test_a_request_survives_both_codecs() -> None:
    request = GenerateRequest([[1, 2, 3], [99]], 5, "math")
    assert parse_generate_request(encode_generate_request(request), MSGPACK, LIMITS) == request
    text = json.dumps({"model": "math", "token_ids": request.token_ids, "max_tokens": 5}).encode()
    assert parse_generate_request(text, JSON, LIMITS) == request
    assert request.num_tokens == 3 + 5 + 1 + 5


def test_a_response_survives_msgpack_and_is_plain_in_json() -> None:
    response = GenerateResponse("math", "f1", [[4, 5, 6], [7]], {"tokens": 8})
    body, content_type = encode_generate_response(response, MSGPACK)
    assert decode_generate_response(body, content_type, 1000) == response
    body, content_type = encode_generate_response(response, JSON)
    assert (content_type, json.loads(body)["results"]) == (JSON, [{"token_ids": [4, 5, 6]}, {"token_ids": [7]}])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"token_ids": [[1]]}, 400, "max_tokens is missing"),
        ({"max_tokens": 1}, 400, "token_ids is missing"),
        ({"token_ids": [[1]], "max_tokens": True}, 400, "max_tokens must be an integer"),
        ({"token_ids": [["1"]], "max_tokens": 1}, 400, "token_ids[0] must be a list of integers"),
        ({"token_ids": [[1]], "max_tokens": 1, "top_k": 1}, 400, "unknown field 'top_k'"),
        ({"token_ids": [[1]], "max_tokens": 0}, 422, "max_tokens is 0"),
        ({"token_ids": [[]], "max_tokens": 1}, 422, "token_ids[0] is empty"),
        ({"token_ids": [[1], [2, 100]], "max_tokens": 1}, 422, "token_ids[1][1] is 100"),
        ({"token_ids": [[1] * 10], "max_tokens": 7}, 413, "no room for max_tokens=7"),
        ({"token_ids": [[1]] * 4, "max_tokens": 1}, 413, "4 sequences"),
    ],
)
def test_refusals(fields: dict, status: int, words: str) -> None:
    for body, codec in ((json.dumps(fields).encode(), JSON), (msgpack.packb(fields), MSGPACK)):
        with pytest.raises(Problem) as caught:
            parse_generate_request(body, codec, LIMITS)
        assert caught.value.status == status
        assert words in caught.value.detail


@pytest.mark.parametrize("results", [[1], [{}], [{"token_ids": [1]}], {"token_ids": []}])
def test_answers_that_are_none(results: object) -> None:
    body = msgpack.packb({"model": "math", "fingerprint": "f1", "results": results})
    with pytest.raises(WireError, match="results"):
        decode_generate_response(body, MSGPACK, 1000)
