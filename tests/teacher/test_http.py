"""The HTTP interface on a fake scorer: both codecs, text, and every error of the protocol's table."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import msgpack
import numpy as np
import pytest

from services.teacher.app import create_app
from services.teacher.service import TeacherService
from shared import wire
from tests.conftest import wait_until
from tests.teacher.fake_scorer import FakeScorer

IDS = [5, 6, 7, 8]
BODY = {"token_ids": [IDS], "prompt_len": [2], "top_k": 3}


async def post(client: httpx.AsyncClient, fields: dict | bytes = BODY, **headers: str) -> httpx.Response:
    content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return await client.post("/logprobs", content=content, headers={"content-type": "application/json"} | headers)


async def expect_problem(response: httpx.Response, status: int, type_: str, words: str = "") -> dict:
    document = response.json()
    assert (response.status_code, document["status"], document["type"]) == (status, status, type_), document
    assert response.headers["content-type"].startswith("application/problem+json")
    assert document["title"]
    assert words in document["detail"]
    return document


async def test_rows_are_those_of_the_response(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    answer = wire.decode_response((await post(client)).content, wire.JSON, 1 << 20)
    direct = await scorer.score(IDS, 2, 3)
    result = answer.results[0]
    assert answer.model == "math"
    assert result.token_ids.tolist() == [7, 8]
    np.testing.assert_array_equal(result.logprobs, direct.logprobs)
    np.testing.assert_array_equal(result.top_ids, direct.top_ids)
    np.testing.assert_array_equal(result.top_logprobs, direct.top_logprobs)
    assert answer.usage["tokens"] == 4


async def test_without_prompt_len_every_position_from_1_is_scored(client: httpx.AsyncClient) -> None:
    document = (await post(client, {"token_ids": [IDS, [1]]})).json()
    assert [result["token_ids"] for result in document["results"]] == [[6, 7, 8], []]
    assert "top_ids" not in document["results"][0]


async def test_msgpack_carries_the_same_as_json(client: httpx.AsyncClient) -> None:
    request = wire.LogprobsRequest(token_ids=[IDS, IDS[:3]], prompt_len=[2, 3], top_k=8)
    binary = await post(client, wire.encode_request(request), **{"content-type": wire.MSGPACK})
    assert binary.headers["content-type"] == wire.MSGPACK
    text = await post(client, {"token_ids": [IDS, IDS[:3]], "prompt_len": [2, 3], "top_k": 8})
    for first, second in zip(
        wire.decode_response(binary.content, wire.MSGPACK, 1 << 20).results,
        wire.decode_response(text.content, wire.JSON, 1 << 20).results,
        strict=True,
    ):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.logprobs, second.logprobs)
        assert first.top_ids.tolist() == second.top_ids.tolist()
    assert first.top_ids.shape == (0, 8)


async def test_accept_decides_the_codec_of_the_answer(client: httpx.AsyncClient) -> None:
    response = await post(client, BODY | {"logprobs_dtype": "float16"}, accept=wire.MSGPACK)
    assert msgpack.unpackb(response.content)["results"][0]["top_logprobs"]["dtype"] == "<f2"


async def test_an_empty_batch_is_an_empty_answer(client: httpx.AsyncClient) -> None:
    assert (await post(client, {"token_ids": []})).json()["results"] == []


async def test_text_comes_back_as_text(client: httpx.AsyncClient) -> None:
    response = await post(client, {"model": "math", "prompt": "2+2=", "completion": "é4", "top_k": 2})
    result = response.json()["results"][0]
    assert len(result["token_ids"]) == 3  # é has two bytes
    assert result["tokens"][2] == "4"
    assert len(result["top_tokens"]) == 3
    assert all(len(row) == 2 for row in result["top_tokens"])
    assert response.text.count("\n") > 20


async def test_messages_go_through_the_chat_template(client: httpx.AsyncClient) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}], "completion": "ho"}
    chat = (await post(client, messages)).json()
    raw = (await post(client, {"prompt": "<user>hi\n<assistant>", "completion": "ho"})).json()
    assert chat["results"] == raw["results"]
    assert chat["usage"]["tokens"] == 22


@pytest.mark.parametrize(
    ("fields", "status", "type_", "words"),
    [
        (b"{", 400, "opd:malformed", "not valid JSON"),
        ({"token_ids": "x"}, 400, "opd:malformed", "token_ids"),
        (BODY | {"model": "chat"}, 404, "opd:unknown-teacher", "this is teacher 'math', not 'chat'"),
        ({"token_ids": [[1] * 65]}, 413, "opd:too-large", "takes at most 64"),
        ({"prompt": "x" * 60, "completion": "y" * 5}, 413, "opd:too-large", "65 tokens"),
        ({"token_ids": [[1] * 60, [1] * 60]}, 413, "opd:too-large", "the queue holds 100"),
        (b" " * 20_001, 413, "opd:too-large", "20001 bytes"),
        ({"token_ids": [[1, 320]]}, 422, "opd:invalid", "vocabulary (0 to 319)"),
        (BODY | {"prompt_len": [0]}, 422, "opd:invalid", "prompt_len[0] is 0"),
        (BODY | {"top_k": 9}, 422, "opd:invalid", "serves 0 to 8"),
        ({"prompt": "\ud800", "completion": "4"}, 400, "opd:malformed", "half a surrogate pair"),
        ({"prompt": "2", "completion": "\udfff"}, 400, "opd:malformed", "half a surrogate pair"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}], "completion": "4"},
            400,
            "opd:malformed",
            "half a surrogate pair",
        ),
        (BODY | {"candidate_ids": [[[1], [320]]]}, 422, "opd:invalid", "vocabulary"),
        ({"prompt": "", "completion": "x"}, 422, "opd:invalid", "prompt has no tokens"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, fields: dict, status: int, type_: str, words: str) -> None:
    await expect_problem(await post(client, fields), status, type_, words)
    assert f'opd_teacher_requests_total{{status="{status}"}} 1.0' in (await client.get("/metrics")).text


async def test_other_media_types(client: httpx.AsyncClient) -> None:
    await expect_problem(await post(client, **{"content-type": "text/plain"}), 415, "opd:media-type", "text/plain")
    await expect_problem(await post(client, **{"content-encoding": "gzip"}), 415, "opd:media-type", "compressed")


async def test_the_wrong_teacher_in_the_header(client: httpx.AsyncClient) -> None:
    await expect_problem(await post(client, **{"x-teacher": "chat"}), 404, "opd:unknown-teacher")
    assert (await post(client, **{"x-teacher": "math"})).status_code == 200


async def test_a_body_without_length_is_cut_off(client: httpx.AsyncClient) -> None:
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b" " * 1000

    response = await client.post("/logprobs", content=chunks(), headers={"content-type": wire.JSON})
    await expect_problem(response, 413, "opd:too-large", "more than 20000 bytes")
    assert sent < 30_000


async def test_keys(service: TeacherService) -> None:
    transport = httpx.ASGITransport(create_app(service, key="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            response = await post(client, **headers)
            await expect_problem(response, 401, "opd:unauthorized")
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/info")).status_code == 401
        assert (await client.post("/generate", json={"token_ids": [[1]], "max_tokens": 1})).status_code == 401
        assert (await post(client, authorization="Bearer secret")).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_a_full_queue_says_when_to_come_back(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.gate.clear()
    first = asyncio.create_task(post(client, {"token_ids": [[1] * 60]}))
    await wait_until(lambda: scorer.in_flight == 1)
    response = await post(client, {"token_ids": [[1] * 41]})
    await expect_problem(response, 429, "opd:overloaded", "60 tokens are queued and 41 more do not fit into 100")
    assert int(response.headers["retry-after"]) >= 1
    assert "opd_teacher_queued_tokens 60.0" in (await client.get("/metrics")).text
    scorer.gate.set()
    assert (await first).status_code == 200
    assert (await post(client, {"token_ids": [[1] * 41]})).status_code == 200


async def test_the_deadline_frees_the_engine(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.gate.clear()
    response = await post(client, **{"x-timeout-s": "0.05"})
    await expect_problem(response, 504, "opd:deadline", "0.05 s")
    assert (scorer.cancelled, scorer.in_flight) == (1, 0)
    for text in ("soon", "-1", "nan", "1e9"):
        await expect_problem(await post(client, **{"x-timeout-s": text}), 400, "opd:malformed", "x-timeout-s")


async def test_nan_from_the_engine_is_an_error(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.fault = "raise"
    await expect_problem(await post(client), 500, "opd:internal", "NaN")
    assert "opd_teacher_bad_scores_total 1.0" in (await client.get("/metrics")).text


async def test_a_bug_is_a_problem_document_too(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.fault = "bug"
    await expect_problem(await post(client), 500, "opd:internal", "traceback")


async def test_minus_infinity_is_null_and_counted(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.fault = "infinite"
    document = (await post(client)).json()
    assert document["results"][0]["logprobs"][1] is None
    assert document["usage"]["non_finite"] == 1
    assert "opd_teacher_non_finite_total 1.0" in (await client.get("/metrics")).text


async def test_a_dead_engine_is_not_healthy(client: httpx.AsyncClient, scorer: FakeScorer) -> None:
    scorer.alive = False
    assert (await client.get("/healthz")).status_code == 503
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the engine has died")
    scorer.fault = "raise"
    response = await post(client)
    await expect_problem(response, 503, "opd:unavailable", "engine has died")
    assert response.headers["retry-after"]


async def test_greedy_continuations_end_with_the_stop_token(client: httpx.AsyncClient) -> None:
    fields = {"model": "math", "token_ids": [[5, 6], [253], [255]], "max_tokens": 4}
    document = (await client.post("/generate", json=fields)).json()
    assert document["results"] == [{"token_ids": ids} for ids in ([7, 8, 9, 10], [254, 255, 256], [256])]
    assert document["usage"]["tokens"] == 4 + 8
    assert (await client.post("/generate", json={"token_ids": [], "max_tokens": 4})).json()["results"] == []
    metrics = (await client.get("/metrics")).text
    assert "opd_teacher_generated_tokens_total 8.0" in metrics
    assert 'opd_teacher_requests_total{status="200"} 2.0' in metrics


async def test_continuations_meet_the_same_checks_as_scores(
    client: httpx.AsyncClient, service: TeacherService, scorer: FakeScorer
) -> None:
    good = {"token_ids": [[5, 6]], "max_tokens": 4}
    for fields, headers, status, type_, words in (
        (good | {"token_ids": [[5, 320]]}, {}, 422, "opd:invalid", "vocabulary (0 to 319)"),
        (good | {"max_tokens": 63}, {}, 413, "opd:too-large", "no room"),
        (good | {"token_ids": [[5]] * 3, "max_tokens": 40}, {}, 413, "opd:too-large", "123 tokens in one request"),
        (good | {"model": "chat"}, {}, 404, "opd:unknown-teacher", "not 'chat'"),
        (good, {"x-teacher": "chat"}, 404, "opd:unknown-teacher", "not 'chat'"),
        (good, {"x-timeout-s": "soon"}, 400, "opd:malformed", "x-timeout-s"),
    ):
        await expect_problem(await client.post("/generate", json=fields, headers=headers), status, type_, words)
    scorer.gate.clear()
    late = await client.post("/generate", json=good, headers={"x-timeout-s": "0.05"})
    await expect_problem(late, 504, "opd:deadline", "0.05 s")
    assert (scorer.cancelled, scorer.in_flight, service.admission.tokens) == (1, 0, 0)
    waiting = asyncio.create_task(client.post("/generate", json=good | {"max_tokens": 60}))
    await wait_until(lambda: scorer.in_flight == 1)
    full = await client.post("/generate", json=good | {"max_tokens": 37})
    await expect_problem(full, 429, "opd:overloaded", "62 tokens are queued and 39 more do not fit into 100")
    scorer.gate.set()
    assert (await waiting).status_code == 200
    scorer.fault = "raise"
    await expect_problem(await client.post("/generate", json=good), 500, "opd:internal", "the engine failed")


async def test_request_ids_come_back(client: httpx.AsyncClient) -> None:
    assert (await post(client, **{"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    assert (await post(client, b"{", **{"x-request-id": "abc-2"})).headers["x-request-id"] == "abc-2"
    made_up = [(await client.get("/healthz", headers={"x-request-id": "a b"})).headers["x-request-id"] for _ in "12"]
    assert len(set(made_up)) == 2
    assert all(len(value) == 32 for value in made_up)


async def test_info_names_model_and_limits(client: httpx.AsyncClient, service: TeacherService) -> None:
    info = (await client.get("/info")).json()
    assert (info["model"], info["vocab_size"], info["dtype"]) == ("math", 320, "float32")
    assert info["fingerprint"] == service.fingerprint
    assert info["tokenizer_hash"] == service.tokenizer_hash
    assert info["limits"] == {
        "max_model_len": 64, "max_top_k": 8, "max_body_bytes": 20_000, "max_sequences": 256,
        "max_candidates": 1024,
        "max_queued_tokens": 100,
    }  # fmt: skip


async def test_while_starting_nothing_is_served(config: object, scorer: FakeScorer) -> None:
    service = TeacherService(config, scorer)
    transport = httpx.ASGITransport(create_app(service, key=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).json() == {"ready": False, "reason": "the engine is starting"}
        for response in (await post(client), await client.get("/info")):
            await expect_problem(response, 503, "opd:unavailable", "starting")
            assert response.headers["retry-after"] == "2"


async def test_openapi_and_unknown_paths(client: httpx.AsyncClient) -> None:
    assert (await client.get("/docs")).status_code == 200
    assert "/logprobs" in (await client.get("/openapi.json")).json()["paths"]
    response = await client.get("/nowhere")
    assert (response.status_code, response.json()["status"]) == (404, 404)
    assert (await client.get("/logprobs")).headers["content-type"] == "application/problem+json"


async def test_mutated_bodies_never_cause_an_internal_error(client: httpx.AsyncClient) -> None:
    request = wire.LogprobsRequest(token_ids=[IDS, IDS[:3]], prompt_len=[2, 3], top_k=8, model="math")
    good = {wire.MSGPACK: wire.encode_request(request), wire.JSON: json.dumps(BODY).encode()}
    rng = random.Random(0)
    statuses = set()
    for number in range(1500):
        codec = (wire.MSGPACK, wire.JSON)[number % 2]
        body = bytearray(good[codec])
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(body))
            body[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        response = await post(client, bytes(body), **{"content-type": codec})
        assert response.status_code < 500, (bytes(body), response.text)
        statuses.add(response.status_code)
    assert {200, 400, 422} <= statuses <= {200, 400, 404, 413, 422}
