"""What is read of a request, and what is not."""

from __future__ import annotations

import json

import msgpack
import pytest

from services.gateway import routing
from shared.errors import Problem

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}


def problem_of(headers: dict[str, str], body: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        routing.teacher_name(headers, body)
    return caught.value


def test_the_header_names_the_teacher_and_the_body_is_not_decoded():
    assert routing.teacher_name({"x-teacher": "math"}, b"\xff not a body at all") == "math"


@pytest.mark.parametrize("headers", [JSON, {"content-type": "Application/JSON; charset=utf-8"}])
def test_model_of_a_json_body(headers):
    assert routing.teacher_name(headers, json.dumps({"top_k": 1, "model": "chat"}).encode()) == "chat"


def test_model_of_a_msgpack_body():
    assert routing.teacher_name(MSGPACK, msgpack.packb({"token_ids": [[1, 2]], "model": "chat"})) == "chat"


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
        (MSGPACK, b"\xdf\xff\xff\xff\xff", "opd:malformed"),
        (MSGPACK, msgpack.packb({"model": "a"}) + b"\x00", "opd:malformed"),
        (MSGPACK, b"\x81\x91\x01\x01", "opd:malformed"),  # a list as key
        ({"content-type": "text/html"}, b"{}", "opd:media-type"),
        ({}, b"{}", "opd:media-type"),
        (JSON, b" " * (routing.MAX_DECODED_BYTES + 1), "opd:too-large"),
    ],
)
def test_bodies_without_a_readable_teacher(headers, body, type_):
    assert problem_of(headers, body).type == type_


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
