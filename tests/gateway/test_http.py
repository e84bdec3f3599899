"""The gateway's HTTP interface, in front of one real replica process."""

from __future__ import annotations

import hashlib
import json
import socket

import httpx
import numpy as np
import pytest

from shared.wire import MSGPACK, LogprobsRequest, decode_response, encode_request
from tests.conftest import wait_until
from tests.gateway.bed import BODY, Bed

KEY = {"authorization": "Bearer s3cret"}


async def test_bytes_pass_through_in_both_codecs(bed: Bed):
    stand = await bed.replica()
    await bed.gateway(stand.port)
    request = LogprobsRequest(token_ids=[[5, 6, 7]], prompt_len=[1], top_k=2)
    body = encode_request(request)
    headers = {
        "content-type": MSGPACK,
        "x-teacher": "math",
        "x-num-tokens": "3",
        "x-request-id": "me-1",
        "cookie": "a=b",
    }
    async with httpx.AsyncClient(base_url=bed.url) as client:
        binary = await client.post("/logprobs", content=body, headers=headers)
        direct = await client.post(f"{stand.url}/logprobs", content=body, headers=headers)
        text = await client.post("/logprobs", json=BODY)
        padded = json.dumps(BODY, indent=9).encode()
        await client.post("/logprobs", content=padded, headers={"content-type": "application/json"})
        counts = await stand.counts()
        metrics = (await client.get("/metrics")).text
    assert binary.content == direct.content and binary.headers["content-type"] == MSGPACK
    assert binary.headers["x-request-id"] == "me-1"
    scores = decode_response(binary.content, MSGPACK, 10_000).results[0]
    np.testing.assert_array_equal(scores.logprobs, [-6, -7])
    assert text.json()["results"][0] == {"token_ids": [3, 4], "logprobs": [-3.0, -4.0]}
    assert counts["body_sha256"][0] == counts["body_sha256"][1] == hashlib.sha256(body).hexdigest()
    assert counts["body_sha256"][3] == hashlib.sha256(padded).hexdigest()
    assert "cookie" not in counts["headers"] and "authorization" not in counts["headers"]
    replica = f'replica="127.0.0.1:{stand.port}",teacher="math"'
    assert f'opd_gateway_attempts_total{{outcome="answered",{replica}}} 3.0' in metrics
    assert f'opd_gateway_replica_state{{replica="127.0.0.1:{stand.port}",state="ready",teacher="math"}} 1.0' in metrics
    assert f"opd_gateway_in_flight_tokens{{{replica}}} 0.0" in metrics


async def test_keys(bed: Bed):
    stand = await bed.replica()
    gateway = await bed.gateway(stand.port, env={"OPD_API_KEY": "s3cret"}, wait=False)
    async with httpx.AsyncClient(base_url=bed.url) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await wait_until(ready, what="ready without a key")
        for shown in (None, "Bearer wrong", "s3cret", "Basic s3cret"):
            headers = {"authorization": shown} if shown else {}
            for answer in (
                await client.post("/logprobs", json=BODY, headers=headers),
                await client.get("/info", headers=headers),
                await client.get("/info/math", headers=headers),
            ):
                assert answer.status_code == 401 and answer.json()["type"] == "opd:unauthorized"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert "requests" not in await stand.counts()
        mine = {**KEY, "x-forwarded-host": "evil", "host": "evil:1"}
        assert (await client.post("/logprobs", json=BODY, headers=mine)).status_code == 200
        assert (await client.get("/info/math", headers=KEY)).json()["info"]["fingerprint"] == "f1"
    seen = (await stand.counts())["headers"]
    assert seen["authorization"] == "Bearer s3cret"
    assert seen["host"] == f"127.0.0.1:{stand.port}" and "x-forwarded-host" not in seen
    assert "s3cret" not in gateway.output() and "no_authentication" not in gateway.output()


async def test_refusals_before_a_replica_is_asked(bed: Bed):
    stand = await bed.replica()
    gateway = await bed.gateway(stand.port)
    assert "no_authentication" in gateway.output()
    binary = {"content-type": MSGPACK, "x-teacher": "math"}
    async with httpx.AsyncClient(base_url=bed.url, timeout=20) as client:

        async def post(content: bytes, headers: dict[str, str]) -> tuple[int, str]:
            answer = await client.post("/logprobs", content=content, headers=headers)
            assert (
                answer.headers["content-type"] == "application/problem+json"
                and answer.json()["status"] == answer.status_code
            )
            return answer.status_code, answer.json()["detail"]

        async def trickle(count: int):
            for _ in range(count):
                yield b"x" * 2**20

        status, detail = await post(b"", {**binary, "x-teacher": "mth"})
        assert status == 404 and "known teachers: math" in detail
        assert (await post(b"{}", {"content-type": "application/json"}))[0] == 400
        assert (await post(b'{"model":"chat"}', {"content-type": "application/json"}))[0] == 404
        assert (await post(b"{}", {"content-type": "text/plain"}))[0] == 415
        assert (await post(b"{}", {**binary, "content-encoding": "gzip"}))[0] == 415
        assert (await post(b"{}", {**binary, "x-timeout-s": "soon"}))[0] == 400
        assert (await post(b"[" * 10_000, {"content-type": "application/json"}))[0] == 400
        assert (await post(b" " * (2**20 + 1), {"content-type": "application/json"}))[0] == 413
        assert (await post(b"x" * (16 * 2**20 + 1), binary))[0] == 413
        assert (await post(trickle(17), binary))[0] == 413  # no content-length
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.get("/info/chat")).json()["type"] == "opd:unknown-teacher"
        assert (await client.get("/logprobs")).status_code == 405
        assert "/logprobs" in (await client.get("/openapi.json")).json()["paths"]
        assert (await client.get("/docs")).status_code == 200
        assert "requests" not in await stand.counts()
        await stand.behave("invalid")  # the teacher's own refusals are the client's business
        answer = await client.post("/logprobs", json=BODY)
        assert (answer.status_code, answer.content) == (422, b'{"type":"opd:invalid"}')
        assert (await stand.counts())["requests"] == 1


async def test_a_body_of_200_mib_is_refused_without_being_held(bed: Bed):
    stand = await bed.replica()
    gateway = await bed.gateway(stand.port)

    def peak_mib() -> int:
        with open(f"/proc/{gateway.process.pid}/status") as status:
            return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))

    before = peak_mib()
    async with httpx.AsyncClient(base_url=bed.url, timeout=20) as client:
        headers = {"content-type": MSGPACK, "x-teacher": "math"}
        answer = await client.post("/logprobs", content=b"x" * (200 * 2**20), headers=headers)
    assert answer.status_code == 413
    assert peak_mib() - before < 40


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--teacher", "math"], "NAME=http://HOST:PORT"),
        (["--teacher", "math=http://127.0.0.1:1", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
    ],
)
async def test_a_start_that_cannot_work_is_one_line_and_status_2(run_service, args, words):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = str(holder.getsockname()[1])
        service = run_service("services.gateway", *(arg.format(taken=taken) for arg in args))
        await wait_until(lambda: service.process.poll() is not None)
    assert service.process.returncode == 2
    assert words.format(taken=taken) in service.output() and service.output().count("\n") == 1
