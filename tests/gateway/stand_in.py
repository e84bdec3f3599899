"""A replica without an engine, for the gateway's tests: real HTTP, answers in the real wire format, told how to behave.

    python -m tests.gateway.stand_in PORT MODEL FINGERPRINT BEHAVIOUR [HOST]

POST /behave?NAME changes the behaviour:
    good, slow (50 ms), metered (20 µs a token, one request after the other), hold (answers once it is told to behave
    otherwise), hang (never answers), fail (500 at once), full (429), busy (503 with Retry-After), key (401), invalid
    (422), noise (200 with no scores in it), cut (closes in the middle of an answer), shifted (rows off by one, a token
    too many), endless (an answer of 1 GiB), drowsy (/readyz says no)
GET /counts tells how many requests came in, how many of them their sender gave up, the last headers, and body hashes.
The logprob of token id i is -i; a prompt is continued with itself and a 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter, deque

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from shared.wire import MSGPACK, Limits, LogprobsResponse, SequenceScores, encode_response, parse_request
from shared.wire_generate import GenerateResponse, encode_generate_response, parse_generate_request

LIMITS = Limits(vocab_size=2**20, max_model_len=2**20, max_top_k=64, max_body_bytes=2**26)


class StandIn:
    def __init__(self, model: str, fingerprint: str, behaviour: str) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self.behaviour = behaviour
        self.counts: Counter[str] = Counter()
        self.headers: dict[str, str] = {}
        self.held = asyncio.Event()
        self.engine = asyncio.Lock()
        self.bodies: deque[str] = deque(maxlen=4)

    async def serve(self, request: Request) -> Response:
        body = await request.body()
        self.counts["requests"] += 1
        self.counts["in_flight"] += 1
        self.headers = dict(request.headers)
        self.bodies.append(hashlib.sha256(body).hexdigest())
        try:
            match self.behaviour:
                case "fail":
                    return Response("boom", 500)
                case "full":
                    return Response("full", 429, {"retry-after": "7"})
                case "busy":
                    return Response("waking", 503, {"retry-after": "3"})
                case "key":
                    return Response("who are you", 401)
                case "invalid":
                    return Response(b'{"type":"opd:invalid"}', 422, media_type="application/problem+json")
                case "noise":
                    return Response("<html>It works!</html>", media_type=MSGPACK)
                case "cut":
                    return Response(b"\x80", headers={"content-length": "1000", "content-type": MSGPACK})
                case "endless":
                    return StreamingResponse((b"\x80" * 2**20 for _ in range(1024)), media_type=MSGPACK)
                case "slow":
                    await asyncio.sleep(0.05)
                case "metered":
                    async with self.engine:
                        await asyncio.sleep(
                            20e-6 * parse_request(body, request.headers["content-type"], LIMITS).num_tokens
                        )
                case "hold":
                    self.held.clear()
                    await self.held.wait()
                case "hang":
                    while (await request.receive())["type"] != "http.disconnect":
                        pass
                    self.counts["abandoned"] += 1
            self.counts["answered"] += 1
            answer = self.generate if request.url.path == "/generate" else self.score
            return answer(body, request.headers["content-type"])
        finally:
            self.counts["in_flight"] -= 1

    def generate(self, body: bytes, content_type: str) -> Response:
        request = parse_generate_request(body, content_type, LIMITS)
        end = self.behaviour == "shifted"
        results = [[*ids, 0][: request.max_tokens + end] for ids in request.token_ids]
        content, media_type = encode_generate_response(
            GenerateResponse(self.model, self.fingerprint, results), content_type
        )
        return Response(content, media_type=media_type)

    def score(self, body: bytes, content_type: str) -> Response:
        request = parse_request(body, content_type, LIMITS)
        results = []
        for ids, prompt_len in zip(request.token_ids, request.prompt_len or [1] * len(request.token_ids), strict=True):
            end = -1 if self.behaviour == "shifted" else None
            scored = np.array(ids[prompt_len + (end or 0) : end], dtype=np.int32)
            top_ids = np.tile(np.arange(request.top_k, dtype=np.int32), (len(scored), 1))
            results.append(
                SequenceScores(
                    scored,
                    -scored.astype(np.float32),
                    top_ids if request.top_k else None,
                    -top_ids.astype(np.float32) if request.top_k else None,
                )
            )
        response = LogprobsResponse(self.model, self.fingerprint, results, {"tokens": request.num_tokens})
        content, media_type = encode_response(response, content_type)
        return Response(content, media_type=media_type)


def create_app(stand_in: StandIn) -> Starlette:
    async def readyz(request: Request) -> Response:
        drowsy = stand_in.behaviour == "drowsy"
        return Response("asleep" if drowsy else "ready", 503 if drowsy else 200)

    async def info(request: Request) -> Response:
        return JSONResponse(
            {"model": stand_in.model, "fingerprint": stand_in.fingerprint, "vocab_size": LIMITS.vocab_size}
        )

    async def behave(request: Request) -> Response:
        stand_in.behaviour = request.url.query
        stand_in.held.set()
        return Response()

    async def counts(request: Request) -> Response:
        return JSONResponse({**stand_in.counts, "headers": stand_in.headers, "body_sha256": list(stand_in.bodies)})

    routes = [
        Route(f"/{handler.__name__}", handler, methods=["GET", "POST"]) for handler in (readyz, info, behave, counts)
    ]
    return Starlette(
        routes=[Route(path, stand_in.serve, methods=["POST"]) for path in ("/logprobs", "/generate")] + routes
    )


if __name__ == "__main__":
    port, name, identity, behaviour, host = [*sys.argv[1:], "127.0.0.1"][:5]
    uvicorn.run(create_app(StandIn(name, identity, behaviour)), host=host, port=int(port), log_level="warning")
