"""What is read of a request, and what is not."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest

from services.gateway import routing
from shared.errors import Problem
from shared.prefix import prefix_key
from shared.wire import LogprobsRequest, encode_request
from shared.wire_body import MAX_VALUES

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}


def problem_of(headers: dict[str, str], body: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        routing.read(headers, body)
    return caught.value


def test_the_header_names_the_teacher_and_the_body_is_not_decoded():
    assert routing.read({"x-teacher": "math"}, b"\xff not a body at all").teacher == "math"


@pytest.mark.parametrize("headers", [JSON, {"content-type": "Application/JSON; charset=utf-8"}])
def test_model_of_a_json_body(headers):
    assert routing.read(headers, json.dumps({"top_k": 1, "model": "chat"}).encode()).teacher == "chat"


def test_model_of_a_msgpack_body():
    assert routing.read(MSGPACK, msgpack.packb({"token_ids": [[1, 2]], "model": "chat"})).teacher == "chat"


@pytest.mark.parametrize(
    ("headers", "body", "type_"),
    [
        (JSON, b"{", "opd:malformed"),
        (JSON, b"[1]", "opd:malformed"),
        (JSON, b'{"top_k": 1}', "opd:malformed"),
        (JSON, b'{"model": 7}', "opd:malformed"),
        (JSON, b'{"model": ""}', "opd:malformed"),
        (JSON, b"[" * 100_000, "opd:malformed"),
        (JSON, b"\xff\xfe", "opd:malformed"),
        (MSGPACK, b"", "opd:malformed"),
        (MSGPACK, b"\x91" * 100_000, "opd:malformed"),
        (MSGPACK, b"\xdf\xff\xff\xff\xff", "opd:too-large"),
        (MSGPACK, msgpack.packb({"model": "a"}) + b"\x00", "opd:malformed"),
        (MSGPACK, b"\x81\x91\x01\x01", "opd:malformed"),  # a list as key
        ({"content-type": "text/html"}, b"{}", "opd:media-type"),
        ({}, b"{}", "opd:media-type"),
        (JSON, b" " * (routing.MAX_DECODED_BYTES + 1), "opd:too-large"),
        (JSON, b'{"model": "a", "top_k": NaN}', "opd:malformed"),
    ],
)
def test_bodies_without_a_readable_teacher(headers, body, type_):
    assert problem_of(headers, body).type == type_


@pytest.mark.parametrize(
    ("headers", "start", "value", "end"),
    [
        (JSON, b'{"model":"a","x":[', b"[],", b"0]}"),
        (MSGPACK, b"\x82\xa5model\xa1a\xa1x\xdd\0\x04\0\0", b"\x91\x90", b""),
    ],
)
def test_a_small_body_of_many_values_is_refused_like_at_the_teacher(headers, start, value, end):
    body = start + value * 2**18 + end  # at least two values each
    assert len(body) < routing.MAX_DECODED_BYTES
    problem = problem_of(headers, body)
    assert problem.status == 413 and f"{MAX_VALUES} values" in problem.detail
    fewer = start.replace(b"\x04\0\0", b"\x01\0\0") + value * 2**16 + end
    assert routing.read(headers, fewer).teacher == "a"


def test_an_unknown_teacher_is_404_and_the_known_ones_are_listed():
    with pytest.raises(Problem) as caught:
        routing.find_pool({"math": 1, "chat": 2}, "maths")
    assert caught.value.status == 404
    assert "'maths'" in caught.value.detail and "chat, math" in caught.value.detail
    assert caught.value.to_dict()["teachers"] == ["chat", "math"]


@pytest.mark.parametrize(
    ("header", "num_bytes", "expected"),
    [
        (None, 4000, 1000),
        (None, 0, 1),
        ("900", 4000, 900),
        ("4001", 4000, 1000),  # more tokens than bytes
        ("1", 1_000_000, 250_000),  # a megabyte is not one token
        ("0", 4000, 1000),
        ("-5", 4000, 1000),
        ("many", 4000, 1000),
        ("9" * 5000, 4000, 1000),
        ("²", 4000, 1000),  # isdigit, but no int
    ],
)
def test_size_in_tokens(header, num_bytes, expected):
    assert routing.num_tokens({} if header is None else {"x-num-tokens": header}, num_bytes) == expected


def test_time_allowed():
    assert routing.timeout_s({}, 60.0) == 60.0
    assert routing.timeout_s({"x-timeout-s": "2.5"}, 60.0) == 2.5
    assert routing.timeout_s({"x-timeout-s": "1e9"}, 60.0) == 60.0
    for text in ("0", "-1", "nan", "soon", ""):
        with pytest.raises(Problem) as caught:
            routing.timeout_s({"x-timeout-s": text}, 60.0)
        assert caught.value.status == 400


def test_request_ids_that_could_break_a_log_are_replaced():
    assert routing.request_id({"x-request-id": "a-1.B_c"}) == "a-1.B_c"
    for text in ("", "a b", "a\nb", "x" * 65, "ü"):
        assert routing.request_id({"x-request-id": text}) is None


def test_the_prompt_is_named_by_the_header_or_found_in_a_body_that_is_decoded_anyway():
    key = prefix_key(np.array([7, 8], "<i4").tobytes())
    request = LogprobsRequest(token_ids=[[7, 8, 9], [1, 2]], prompt_len=[2, 1], model="math")
    fields = {"model": "math", "token_ids": request.token_ids, "prompt_len": [2, 1]}
    assert routing.read(MSGPACK, encode_request(request)) == routing.Route("math", key)
    assert routing.read(MSGPACK, msgpack.packb(fields)).prefix_key == key
    assert routing.read(JSON, json.dumps(fields).encode()).prefix_key == key
    assert routing.read(JSON | {"x-prefix-key": "mine"}, json.dumps(fields).encode()).prefix_key == "mine"
    assert routing.read({"x-teacher": "math", "x-prefix-key": "a-1"}, b"").prefix_key == "a-1"
    assert routing.read({"x-teacher": "math"}, encode_request(request)).prefix_key is None


def test_texts_with_one_prompt_are_a_group():
    keys = [
        routing.read(JSON, json.dumps({"model": "math", **fields}).encode()).prefix_key
        for fields in (
            {"prompt": "2+2=", "completion": "4"},
            {"prompt": "2+2=", "completion": "5"},
            {"prompt": "2+3=", "completion": "5"},
            {"messages": [{"role": "user", "content": "\ud800"}], "completion": "5"},
        )
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3 and None not in keys


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"token_ids": [], "prompt_len": []},
        {"token_ids": [[1, 2]], "prompt_len": [3]},
        {"token_ids": [[1, 2]], "prompt_len": [-1]},
        {"token_ids": [[1, 2]], "prompt_len": [10**4000]},
        {"token_ids": [[1, 2]], "prompt_len": [1.5]},
        {"token_ids": [[2**40, 2]], "prompt_len": [1]},
        {"token_ids": ["ab"], "prompt_len": [1]},
        {"token_ids": [{"data": 5}], "prompt_len": [1]},
        {"token_ids": {"data": 5}, "prompt_len": "x"},
        {"token_ids": 3, "prompt_len": 3},
    ],
)
def test_bodies_that_no_teacher_takes_have_no_group(fields):
    assert routing.read(JSON, json.dumps({"model": "math", **fields}).encode()) == routing.Route("math", None)


@pytest.mark.parametrize("key", ["", "a b", "x" * 65, "ü", "a\n"])
def test_a_prefix_key_is_short_and_plain(key):
    with pytest.raises(Problem) as caught:
        routing.read({"x-teacher": "math", "x-prefix-key": key}, b"")
    assert caught.value.status == 400 and "x-prefix-key" in caught.value.detail
