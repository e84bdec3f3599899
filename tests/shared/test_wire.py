"""Bodies of /logprobs: round trips in both codecs, and every refusal of the protocol's error table."""

from __future__ import annotations

import json
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import arrays, wire
from shared.errors import Problem, WireError

LIMITS = wire.Limits(vocab_size=100, max_model_len=16, max_top_k=8, max_body_bytes=4096, max_sequences=4)
ids = st.lists(st.integers(0, 99), min_size=1, max_size=16)


def parse(**fields: object) -> wire.LogprobsRequest:
    return wire.parse_request(json.dumps(fields).encode(), wire.JSON, LIMITS)


@given(st.lists(ids, max_size=4), st.integers(0, 8), st.booleans(), st.data())
def test_requests_read_the_same_from_both_codecs(
    sequences: list[list[int]], top_k: int, with_prompt_len: bool, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(1, len(seq))) for seq in sequences] if with_prompt_len else None
    request = wire.LogprobsRequest(token_ids=sequences, prompt_len=lengths, top_k=top_k, model="math")
    assert wire.parse_request(wire.encode_request(request), wire.MSGPACK, LIMITS) == request
    fields = {"token_ids": sequences, "prompt_len": lengths, "top_k": top_k, "model": "math"}
    assert parse(**fields) == request
    assert wire.parse_request(msgpack.packb(fields), "application/x-msgpack", LIMITS) == request
    assert request.num_tokens == sum(map(len, sequences))


def test_candidates_travel_as_tables() -> None:
    table = np.array([[1, 1], [99, 0]], dtype=np.int32)
    request = wire.LogprobsRequest(token_ids=[[5, 6, 7]], candidate_ids=[table])
    for read in (
        wire.parse_request(wire.encode_request(request), wire.MSGPACK, LIMITS),
        parse(token_ids=[[5, 6, 7]], candidate_ids=[table.tolist()]),
    ):
        np.testing.assert_array_equal(read.candidate_ids[0], table)


def test_text_form_is_kept_for_the_teacher_to_tokenize() -> None:
    assert parse(prompt="2+2=", completion="4", top_k=3).completion == "4"
    messages = [{"role": "user", "content": "hi"}]
    assert parse(messages=messages, completion="ho").messages == messages


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"token_id": [[1]]}, 400, "unknown field 'token_id'"),
        ({"token_ids": [1]}, 400, r"token_ids\[0\] must be a list of integers"),
        ({"token_ids": "12"}, 400, "token_ids must be a list"),
        ({"token_ids": [[1, True]]}, 400, "list of integers"),
        ({"token_ids": [[1, 2.0]]}, 400, "list of integers"),
        ({"token_ids": [{"dtype": "<i4", "shape": [2], "data": "AA=="}]}, 400, "expected bytes"),
        ({"token_ids": [[1, 2]], "top_k": "3"}, 400, "top_k must be an integer"),
        ({"token_ids": [[1, 2]], "model": 3}, 400, "model must be text"),
        ({"messages": [{"role": "user"}], "completion": ""}, 400, r"messages\[0\]"),
        ({"token_ids": [[1]] * 5}, 413, "5 sequences, at most 4"),
        ({"token_ids": [[1], [1] * 17]}, 413, r"token_ids\[1\] has 17 tokens, this teacher takes at most 16"),
        ({"token_ids": [[1, 2, 100]]}, 422, r"token_ids\[0\]\[2\] is 100"),
        ({"token_ids": [[1, -1]]}, 422, r"token_ids\[0\]\[1\] is -1"),
        ({"token_ids": [[2**70]]}, 422, "outside this teacher's vocabulary"),
        ({"token_ids": [[]]}, 422, "is empty"),
        ({"token_ids": [[1, 2]], "prompt_len": [0]}, 422, "must be 1 to 2"),
        ({"token_ids": [[1, 2]], "prompt_len": [3]}, 422, "must be 1 to 2"),
        ({"token_ids": [[1, 2]], "prompt_len": [1, 1]}, 422, "2 entries for 1 sequences"),
        ({"token_ids": [[1, 2]], "top_k": 9}, 422, "serves 0 to 8"),
        ({"token_ids": [[1, 2]], "top_k": -1}, 422, "serves 0 to 8"),
        ({"token_ids": [[1, 2]], "logprobs_dtype": "int8"}, 422, "logprobs_dtype"),
        ({"token_ids": [[1, 2]], "completion": "x"}, 422, "not both"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}], "completion": "x"}, 422, "not both"),
        ({"prompt": "a"}, 422, "completion is missing"),
        ({"top_k": 1}, 422, "token_ids is missing"),
        ({"messages": [{"role": "king", "content": "b"}], "completion": "x"}, 422, "role"),
        ({"token_ids": [[1, 2]], "candidate_ids": []}, 422, "0 tables for 1"),
        ({"token_ids": [[1, 2]], "candidate_ids": [[[1], [2]]]}, 422, "2 rows for 1"),
        ({"token_ids": [[1, 2, 3]], "candidate_ids": [[[1], [2, 3]]]}, 422, "as many ids as the first"),
        ({"token_ids": [[1, 2]], "candidate_ids": [[[100]]]}, 422, "vocabulary"),
        ({"token_ids": [[1, 2]], "candidate_ids": [[[2**40]]]}, 422, "vocabulary"),
    ],
)
def test_bad_requests_name_the_field(fields: dict, status: int, words: str) -> None:
    with pytest.raises(Problem, match=words) as caught:
        parse(**fields)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"", wire.JSON, 400),
        (b"[]", wire.JSON, 400),
        (b'{"top_k": NaN}', wire.JSON, 400),
        (b"[" * 4000, wire.JSON, 400),
        (b'{"top_k": 1' + b"1" * 4000 + b"}", wire.JSON, 422),
        (b"\xff\xfe", wire.JSON, 400),
        (b"\x91" * 4000, wire.MSGPACK, 400),
        (b"\xdf\xff\xff\xff\xff", wire.MSGPACK, 413),
        (b"\x81\x01\x02", wire.MSGPACK, 400),
        (b"\x80\x80", wire.MSGPACK, 400),
        (b"\x81\x91\x01\x02", wire.MSGPACK, 400),
        (b"{}" + b" " * 4095, wire.JSON, 413),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"{}", "", 415),
    ],
)
def test_bad_bodies(body: bytes, content_type: str, status: int) -> None:
    with pytest.raises(Problem) as caught:
        wire.parse_request(body, content_type, LIMITS)
    assert caught.value.status == status


@given(st.binary(max_size=200), st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_random_bytes_are_a_problem_or_wire_error(body: bytes, codec: str) -> None:
    with pytest.raises(Problem):
        wire.parse_request(body, codec, LIMITS)
    with pytest.raises(WireError):
        wire.decode_response(body, codec, 4096)


def make_response(rows: int, k: int | None, *, seed: int = 0) -> wire.LogprobsResponse:
    rng = np.random.default_rng(seed)
    scores = wire.SequenceScores(
        token_ids=rng.integers(0, 100, rows).astype(np.int32),
        logprobs=-rng.random(rows).astype(np.float32),
    )
    if k is not None:
        scores.top_ids = rng.integers(0, 100, (rows, k)).astype(np.int32)
        scores.top_logprobs = -rng.random((rows, k)).astype(np.float32)
    return wire.LogprobsResponse("math", "abc", [scores], {"tokens": rows})


@given(st.integers(0, 5), st.none() | st.integers(1, 4), st.sampled_from([wire.JSON, wire.MSGPACK]), st.integers(0, 99))
def test_responses_round_trip_exactly(rows: int, k: int | None, codec: str, seed: int) -> None:
    response = make_response(rows, k, seed=seed)
    body, content_type = wire.encode_response(response, codec)
    assert content_type == codec
    back = wire.decode_response(body, content_type, 1 << 16)
    assert (back.model, back.fingerprint, back.usage["tokens"]) == ("math", "abc", rows)
    np.testing.assert_array_equal(back.results[0].token_ids, response.results[0].token_ids)
    assert back.results[0].logprobs.tobytes() == response.results[0].logprobs.tobytes()
    if k is None:
        assert back.results[0].top_ids is None
    elif rows:
        np.testing.assert_array_equal(back.results[0].top_ids, response.results[0].top_ids)
        np.testing.assert_array_equal(back.results[0].top_logprobs, response.results[0].top_logprobs)


def test_an_empty_batch_round_trips() -> None:
    response = wire.LogprobsResponse("math", "abc", [])
    for codec in (wire.JSON, wire.MSGPACK):
        assert wire.decode_response(*wire.encode_response(response, codec), 999).results == []


def test_float16_halves_the_top_logprobs_and_keeps_the_actual_ones() -> None:
    response = make_response(50, 64)
    full, _ = wire.encode_response(response, wire.MSGPACK)
    half, _ = wire.encode_response(response, wire.MSGPACK, "float16")
    assert len(full) - len(half) == 50 * 64 * 2
    back = wire.decode_response(half, wire.MSGPACK, 1 << 20).results[0]
    assert back.top_logprobs.dtype == np.float16
    assert back.logprobs.dtype == np.float32
    np.testing.assert_allclose(back.top_logprobs, response.results[0].top_logprobs, atol=5e-4)


def test_minus_infinity_is_null_and_counted_in_json_and_exact_in_msgpack() -> None:
    response = make_response(2, 2)
    response.results[0].logprobs[1] = -np.inf
    response.results[0].top_logprobs[0, 1] = -np.inf
    text, _ = wire.encode_response(response, wire.JSON)
    document = json.loads(text)
    assert document["results"][0]["logprobs"][1] is None
    assert document["usage"]["non_finite"] == 2
    for codec in (wire.JSON, wire.MSGPACK):
        back = wire.decode_response(*wire.encode_response(response, codec), 9999).results[0]
        assert back.logprobs[1] == -np.inf
        assert back.top_logprobs[0, 1] == -np.inf


def test_json_is_laid_out_for_people() -> None:
    scores = wire.SequenceScores(
        np.array([7, 8]), np.array([-0.1, -2.5], np.float32), np.array([[7, 1], [2, 8]]),
        np.array([[-0.1, -3.0], [-0.2, -2.5]], np.float32), tokens=["4", "\n"], top_tokens=[["4", "é"], ["5", "\n"]],
    )  # fmt: skip
    text, _ = wire.encode_response(wire.LogprobsResponse("math", "abc", [scores], {"tokens": 2}), "*/*")
    assert text.decode().splitlines() == [
        "{",
        '  "model": "math",',
        '  "fingerprint": "abc",',
        '  "results": [',
        "    {",
        '      "token_ids": [7, 8],',
        '      "tokens": ["4", "\\n"],',
        '      "logprobs": [-0.1, -2.5],',
        '      "top_ids": [',
        "        [7, 1],",
        "        [2, 8]",
        "      ],",
        '      "top_tokens": [',
        '        ["4", "é"],',
        '        ["5", "\\n"]',
        "      ],",
        '      "top_logprobs": [',
        "        [-0.1, -3.0],",
        "        [-0.2, -2.5]",
        "      ]",
        "    }",
        "  ],",
        '  "usage": {"tokens": 2, "non_finite": 0}',
        "}",
    ]


def test_an_answer_whose_arrays_do_not_fit_is_refused() -> None:
    body = msgpack.unpackb(wire.encode_response(make_response(3, 2), wire.MSGPACK)[0])
    result = body["results"][0]
    changes = [
        {"logprobs": arrays.pack(np.zeros(2, np.float32))},
        {"logprobs": arrays.pack(np.zeros(3, np.float16))},
        {"top_ids": arrays.pack(np.zeros((3, 3), np.int32))},
        {"top_ids": arrays.pack(np.zeros((2, 2), np.int32))},
        {"top_logprobs": None},
        {"token_ids": [1, 2]},
        {"token_ids": [1, -2, 3]},
        {"token_ids": [[1], [2], [3]]},
    ]
    for change in changes:
        with pytest.raises(WireError):
            wire.decode_response(msgpack.packb({**body, "results": [{**result, **change}]}), wire.MSGPACK, 9999)
    with pytest.raises(WireError, match="at most 10"):
        wire.decode_response(msgpack.packb(body), wire.MSGPACK, 10)
    with pytest.raises(WireError, match="not served"):
        wire.decode_response(b"<html>", "text/html", 9999)


@pytest.mark.parametrize(
    ("accept", "content_type", "codec"),
    [
        ("*/*", wire.JSON, wire.JSON),
        ("", wire.MSGPACK, wire.MSGPACK),
        ("application/msgpack;q=0.9, */*", wire.JSON, wire.MSGPACK),
        ("application/json", wire.MSGPACK, wire.JSON),
    ],
)
def test_the_answer_comes_in_the_codec_asked_for(accept: str, content_type: str, codec: str) -> None:
    assert wire.choose_accept(accept, content_type) == codec


@pytest.mark.parametrize(
    ("body", "codec"),
    [
        (b"[" + b"[]," * 2**18 + b"[]]", wire.JSON),
        (b'{"token_ids": [[' + b"1," * 2**19 + b"1]]}", wire.JSON),
        (b"\xdd" + (2**19 + 1).to_bytes(4, "big") + b"\x01" * (2**19 + 1), wire.MSGPACK),
        (b"\xdf" + (2**19 + 1).to_bytes(4, "big") + b"\xa0\xc0" * (2**19 + 1), wire.MSGPACK),
        (b"\x92" + (b"\xdd" + (2**19 - 1).to_bytes(4, "big") + b"\x90" * (2**19 - 1)) * 2, wire.MSGPACK),
        (b"\x92" + (b"\xdd" + (2**18).to_bytes(4, "big") + b"\x01" * 2**18) * 2, wire.MSGPACK),
    ],
)
def test_more_values_than_any_request_has_are_refused_while_they_are_read(body: bytes, codec: str) -> None:
    tracemalloc.start()
    with pytest.raises(Problem) as caught:
        wire.decode_body(body, codec, 2**24)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.status, "524288 values" in caught.value.detail) == (413, True)
    assert peak < 64 * 2**20  # 2^19 empty lists
    assert len(body) < 4 * 2**20


@pytest.mark.parametrize("codec", [wire.JSON, wire.MSGPACK])
def test_a_deep_body_is_malformed_wherever_it_is_looked_at(codec: str) -> None:
    for depth in (100, 400, 600, 900, 1100, 10_000):
        if codec == wire.JSON:
            nested = b"[" * depth + b"]" * depth
            bodies = [
                nested,
                b'{"token_ids": %s}' % nested,
                b'{"top_k": %s}' % nested,
                b'{"logprobs_dtype": %s}' % nested,
            ]
            bodies += [b'{"token_ids": [{"dtype": %s, "shape": [1], "data": ""}]}' % nested]
            bodies += [b'{"messages": [{"role": %s, "content": ""}], "completion": ""}' % nested]
            bodies += [b'{"token_ids": [[1, 2]], "candidate_ids": %s}' % nested]
        else:
            nested = b"\x91" * depth + b"\x01"
            bodies = [
                b"\x81" + msgpack.packb(name) + nested for name in ("token_ids", "model", "top_k", "logprobs_dtype")
            ]
            array = (
                b"\x83"
                + msgpack.packb("dtype")
                + nested
                + msgpack.packb("shape")
                + b"\x90"
                + msgpack.packb("data")
                + nested
            )
            bodies += [b"\x81" + msgpack.packb("token_ids") + b"\x91" + array]
        for body in bodies:
            with pytest.raises(Problem) as caught:
                wire.parse_request(body, codec, wire.Limits(100, 16, 8, max_body_bytes=2**20))
            assert caught.value.status in (400, 422)
