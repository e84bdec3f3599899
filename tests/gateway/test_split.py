"""Requests split over replicas: when that is done, that order and bytes stay, what happens when a part goes wrong."""

from __future__ import annotations

import hashlib
import json

import httpx
import msgpack
import numpy as np
import pytest

from services.gateway import parts
from services.gateway.parts import MergeError, Sequences
from services.gateway.replica import Replica
from services.gateway.split import MIN_PART_TOKENS, share_out
from shared.wire import (
    JSON,
    MSGPACK,
    LogprobsRequest,
    LogprobsResponse,
    SequenceScores,
    decode_response,
    encode_request,
    encode_response,
)
from tests.gateway.bed import Bed


def scores(*ids: int) -> SequenceScores:
    array = np.array(ids, np.int32)
    top = np.stack([array, array + 1], axis=1)
    return SequenceScores(array, -array.astype(np.float32), top, np.float32([-np.inf, -0.1] * len(ids)).reshape(-1, 2))


def request_of(*lengths: int, prompts: list[int] | None = None, first: int = 3) -> LogprobsRequest:
    """Sequences of these lengths; `prompts` gives each the number of its prompt of 4 tokens."""
    prompts = prompts or list(range(len(lengths)))
    ids = [
        [prompt + 10] * 4 + [first + index] * (length - 4)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return LogprobsRequest(token_ids=ids, prompt_len=[4] * len(lengths), top_k=1)


def read(request: LogprobsRequest) -> Sequences:
    sequences = parts.read(encode_request(request), is_json=False)
    assert sequences is not None
    return sequences


def replicas(*loads: float) -> dict[Replica, float]:
    return {Replica(f"http://h:{n}", eject_after=2, probe_interval_s=1.0): load for n, load in enumerate(loads)}


def shares_of(request: LogprobsRequest, *loads: float) -> list[list[int]] | None:
    shares = share_out(read(request), replicas(*loads))
    return None if shares is None else list(shares.values())


def test_sequences_are_shared_by_tokens_over_idle_replicas():
    assert shares_of(request_of(4000, 1000, 1000, 2000), 0, 0) == [[0], [1, 2, 3]]
    assert shares_of(request_of(*[3000] * 6), 0, 0, 0) == [[0, 3], [1, 4], [2, 5]]


def test_what_is_not_split():
    assert shares_of(request_of(8000), 0, 0) is None  # one sequence
    assert shares_of(request_of(*[MIN_PART_TOKENS // 2] * 3), 0, 0) is None  # parts too small
    assert shares_of(request_of(7000, 2100), 0, 0) is None  # the long one decides
    assert shares_of(request_of(3000, 3000), 0, 50_000) is None  # the other is busy
    assert shares_of(request_of(3000, 3000), 0, 0, 50_000) == [[0], [1]]  # the busy one is left out


def test_sequences_with_one_prompt_stay_together_unless_the_group_is_too_large():
    assert shares_of(request_of(*[1500] * 4, prompts=[1, 2, 1, 2]), 0, 0) == [[0, 2], [1, 3]]
    assert shares_of(request_of(*[1500] * 4, prompts=[1, 1, 1, 1]), 0, 0) == [[0, 1], [2, 3]]


def test_a_part_is_a_request_for_its_sequences_alone():
    request = request_of(5, 6, 7)
    request.candidate_ids = [np.full((length - 4, 2), length, np.int32) for length in (5, 6, 7)]
    cut = LogprobsRequest(
        token_ids=[request.token_ids[0], request.token_ids[2]],
        prompt_len=[4, 4],
        top_k=1,
        candidate_ids=[request.candidate_ids[0], request.candidate_ids[2]],
    )
    assert msgpack.unpackb(read(request).cut([0, 2])) == msgpack.unpackb(encode_request(cut))
    fields = {"model": "math", "token_ids": [[1, 2], [3, 4], [5, 6]], "prompt_len": None, "top_k": 2}
    sequences = parts.read(json.dumps(fields).encode(), is_json=True)
    assert sequences is not None and sequences.prompts == [None] * 3
    assert json.loads(sequences.cut([1])) == {**fields, "token_ids": [[3, 4]]}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        {"token_ids": 3},
        {"token_ids": [[1], [2]], "prompt_len": [1]},
        {"token_ids": [[1], [2]], "prompt_len": ["1", "2"]},
        {"token_ids": [[1], [2]], "candidate_ids": {"a": 1, "b": 2}},
        {"token_ids": [[1], [2]], "candidate_ids": "ab"},
        {"token_ids": [[[1]], [2]], "prompt_len": [1, 1]},
        {"token_ids": [1, 2]},
        {"token_ids": [[1]] * 2000},
        {"token_ids": [list(range(70_000))]},
    ],
)
def test_what_is_no_plain_list_of_sequences_is_left_whole(fields):
    assert parts.read(msgpack.packb(fields), is_json=False) is None
    assert parts.read(json.dumps(fields).encode(), is_json=True) is None


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_merged_answers_are_the_whole_answer(codec):
    every = [scores(1, 2), scores(3), scores(4, 5, 6)]
    usage = {"tokens": 9, "cached_tokens": 1, "engine_ms": 5.0}
    whole, _ = encode_response(LogprobsResponse('mä"th', "f1", every, usage), codec)
    first, _ = encode_response(
        LogprobsResponse('mä"th', "f1", [every[0], every[2]], {"tokens": 5, "cached_tokens": 0, "engine_ms": 5.0}),
        codec,
    )
    second, _ = encode_response(
        LogprobsResponse('mä"th', "f1", [every[1]], {"tokens": 4, "cached_tokens": 1, "engine_ms": 4.0}), codec
    )
    merged = parts.merge([first, second], [[0, 2], [1]], is_json=codec == JSON)
    if codec == MSGPACK:
        assert merged == whole
    else:
        assert json.loads(merged) == json.loads(whole) and decode_response(merged, JSON, 10**6).usage["non_finite"] == 6


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_answers_that_do_not_fit_together_are_not_merged(codec):
    is_json = codec == JSON
    good, other = (encode_response(LogprobsResponse("m", name, [scores(1)]), codec)[0] for name in ("f1", "f2"))
    assert parts.merge([good, good], [[1], [0]], is_json=is_json)
    for bodies, indices in (
        ([good, other], [[0], [1]]),
        ([good, good], [[0], [1, 2]]),
        ([good, good[:-5]], [[0], [1]]),
        ([good, b""], [[0], [1]]),
        ([good, b"[]"], [[0], [1]]),
        ([good, b"\xdf\xff\xff\xff\xff"], [[0], [1]]),
    ):
        with pytest.raises(MergeError):
            parts.merge(bodies, indices, is_json=is_json)


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
async def test_both_replicas_get_a_part_and_the_order_stays(bed: Bed, codec: str):
    first, second = await bed.replica(), await bed.replica()
    await bed.gateway(first.port, second.port)
    request = request_of(3000, 2000, 3000, 2000)
    fields = {"token_ids": request.token_ids, "prompt_len": request.prompt_len, "top_k": 1}
    body = json.dumps(fields).encode() if codec == JSON else encode_request(request)
    headers = {"content-type": codec, "x-teacher": "math", "x-num-tokens": "10000"}
    async with httpx.AsyncClient(base_url=bed.url, headers=headers) as client:
        answer = await client.post("/logprobs", content=body)
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200 and answer.headers["content-type"] == codec
    response = decode_response(answer.content, codec, 10**8)
    for ids, result in zip(request.token_ids, response.results, strict=True):
        np.testing.assert_array_equal(result.token_ids, ids[4:])
        np.testing.assert_array_equal(result.logprobs, -np.float32(ids[4:]))
    assert response.usage["tokens"] == 10_000
    assert [(await stand.counts())["requests"] for stand in (first, second)] == [1, 1]
    assert answer.headers["x-replica"].count(", ") == 1
    assert 'opd_gateway_splits_total{result="merged",teacher="math"} 1.0' in metrics


async def test_a_part_that_fails_is_done_elsewhere(bed: Bed):
    good, bad = await bed.replica(), await bed.replica("fail")
    await bed.gateway(good.port, bad.port)
    request = request_of(3000, 3000)
    headers = {"content-type": MSGPACK, "x-teacher": "math", "x-num-tokens": "6000"}
    async with httpx.AsyncClient(base_url=bed.url, headers=headers) as client:
        answer = await client.post("/logprobs", content=encode_request(request))
    results = decode_response(answer.content, MSGPACK, 10**8).results
    assert [result.logprobs[0] for result in results] == [-3.0, -4.0]
    assert (await good.counts())["requests"] == 2 and (await bad.counts())["requests"] == 1


async def test_a_refusal_is_about_the_whole_request(bed: Bed):
    """What a teacher says of a part counts sequences from the part's first one."""
    first, second = await bed.replica("invalid"), await bed.replica("invalid")
    await bed.gateway(first.port, second.port)
    body = encode_request(request_of(3000, 3000))
    headers = {"content-type": MSGPACK, "x-teacher": "math", "x-num-tokens": "6000"}
    async with httpx.AsyncClient(base_url=bed.url, headers=headers) as client:
        answer = await client.post("/logprobs", content=body)
        metrics = (await client.get("/metrics")).text
    assert (answer.status_code, answer.content) == (422, b'{"type":"opd:invalid"}')
    hashes = (await first.counts())["body_sha256"] + (await second.counts())["body_sha256"]
    assert hashlib.sha256(body).hexdigest() in hashes
    assert 'opd_gateway_splits_total{result="sent_whole",teacher="math"} 1.0' in metrics
