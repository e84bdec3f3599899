"""Client of `POST /logprobs` and `/generate`, at the gateway or at a teacher.

It asks in msgpack, tries again, and checks what comes back.

What it returns fits the request: as many sequences, the same response ids, the arrays that were asked for.

    R rows (response tokens), k = top_k, C candidates a row
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import httpx
import numpy as np

from shared.errors import TeacherError, WireError
from shared.prefix import PREFIX_HEADER, prefix_key
from shared.wire import MSGPACK, LogprobsRequest, LogprobsResponse, decode_response, encode_request
from shared.wire_generate import GenerateRequest, decode_generate_response, encode_generate_request

ResponseT = TypeVar("ResponseT")

MAX_TRIES = 12
"""Most times that one request is sent."""

_RETRIED = frozenset({429, 502, 503, 504})
_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 4.0  # less than uvicorn's default of 5 s: the server must not close a connection under a request
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_BASE_BYTES = 256 * 1024  # keys, names, usage, error texts
_TEXT_BYTES = 64 * 2**20  # a text request: its number of tokens is not known here


class LogprobsClient:
    """Connections to one address; use it as an async context manager or call `aclose`.

    Args:
        base_url: of a gateway or a teacher, e.g. http://127.0.0.1:8100.
        key: API key, or None where authentication is off.
        connections: most connections at a time; further requests wait.
        timeout_s: time for one call, all its tries and pauses together.
    """

    def __init__(self, base_url: str, key: str | None, *, connections: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEEPALIVE_S
            ),
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
        )

    async def __aenter__(self) -> LogprobsClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def score(self, request: LogprobsRequest, teacher: str) -> LogprobsResponse:
        """Scores of all sequences of a request.

        Raises:
            TeacherError: refused, not answered in time, or answered for other ids than asked. `retry_after_s` is None
                where another try cannot help.
        """
        headers = {}
        if request.token_ids is not None:
            headers["x-num-tokens"] = str(request.num_tokens)
            if request.token_ids and request.prompt_len:
                prompt = np.asarray(request.token_ids[0][: request.prompt_len[0]], dtype="<i4")
                headers[PREFIX_HEADER] = prefix_key(prompt.tobytes())
        max_bytes = _max_answer_bytes(request)
        response = await self._post("/logprobs", teacher, headers, encode_request(request), decode_response, max_bytes)
        _check(request, response, teacher)
        return response

    async def generate(self, request: GenerateRequest, teacher: str) -> list[list[int]]:
        """Greedy continuations of all prompts of a request, at most `max_tokens` ids each, the stop token included.

        Raises:
            TeacherError: as for `score`.
        """
        max_bytes = _BASE_BYTES + 1024 * len(request.token_ids) + 4 * request.num_tokens
        headers, content = {"x-num-tokens": str(request.num_tokens)}, encode_generate_request(request)
        response = await self._post("/generate", teacher, headers, content, decode_generate_response, max_bytes)
        if response.model != teacher:
            raise TeacherError(200, f"asked teacher {teacher!r}, but {response.model!r} answered")
        lengths = [len(ids) for ids in response.results]
        if len(lengths) != len(request.token_ids) or not all(1 <= length <= request.max_tokens for length in lengths):
            reason = f"asked for {len(request.token_ids)} continuations of 1 to {request.max_tokens} tokens"
            raise TeacherError(200, f"teacher {teacher!r}: {reason}, got lengths {lengths}")
        return response.results

    async def _post(
        self,
        path: str,
        teacher: str,
        headers: dict[str, str],
        content: bytes,
        decode: Callable[[bytes, str, int], ResponseT],
        max_bytes: int,
    ) -> ResponseT:
        headers |= {"content-type": MSGPACK, "accept": MSGPACK, "x-teacher": teacher}
        body, content_type = await self._call("POST", path, headers, content, max_bytes)
        try:
            return decode(body, content_type, max_bytes)
        except WireError as error:
            raise TeacherError(200, f"teacher {teacher!r} sent an unusable answer: {error}", 1.0) from error

    async def info(self, teacher: str) -> dict[str, Any]:
        """What a teacher says of itself: model, fingerprint, vocabulary size, tokenizer hash, limits.

        Raises:
            TeacherError: it is not known there (404), or no replica of it serves yet (503).
        """
        body, _ = await self._call("GET", "/info", {}, b"", _BASE_BYTES * 16)
        try:
            info = httpx.Response(200, content=body).json()
        except ValueError as error:
            raise TeacherError(200, "/info is not JSON") from error
        teachers = info.get("teachers")
        if teachers is None:  # a teacher's own /info
            if info.get("model") != teacher:
                raise TeacherError(404, f"this is teacher {info.get('model')!r}, not {teacher!r}")
            return info
        if teacher not in teachers:
            raise TeacherError(404, f"there is no teacher {teacher!r}; known teachers: {', '.join(sorted(teachers))}")
        if teachers[teacher]["info"] is None:
            raise TeacherError(503, f"no replica of teacher {teacher!r} serves", 1.0)
        return teachers[teacher]["info"]

    async def _call(
        self, method: str, path: str, headers: dict[str, str], content: bytes, max_bytes: int
    ) -> tuple[bytes, str]:
        """Body and content type of an answer 200, tried again as long as that makes sense."""
        deadline = time.monotonic() + self._timeout_s
        headers = {**headers, "x-request-id": uuid.uuid4().hex}
        last: TeacherError | None = None
        for number in range(MAX_TRIES):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    return await self._try(
                        method, path, {**headers, "x-timeout-s": f"{left_s:.3f}"}, content, max_bytes
                    )
            except TimeoutError:
                break
            except TeacherError as error:
                last = error
            if last.retry_after_s is None or number == MAX_TRIES - 1:
                raise last
            pause_s = max(
                last.retry_after_s, min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
            )
            if time.monotonic() + pause_s >= deadline:
                raise last
            await asyncio.sleep(pause_s)
        reason = f"no answer within {self._timeout_s:g} s" + (f"; before that: {last.reason}" if last else "")
        raise TeacherError(0, reason, 1.0)

    async def _try(
        self, method: str, path: str, headers: dict[str, str], content: bytes, max_bytes: int
    ) -> tuple[bytes, str]:
        try:
            async with self._client.stream(method, path, content=content or None, headers=headers) as response:
                chunks: list[bytes] = []
                size = 0
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if size > max_bytes:
                        raise TeacherError(200, f"the answer has more than the {max_bytes} bytes that fit the request")
                    chunks.append(chunk)
        except httpx.HTTPError as error:
            reason = f"{self._client.base_url} does not answer: {type(error).__name__} {error}".rstrip()
            raise TeacherError(0, reason, 0.0) from error
        body = b"".join(chunks)
        if response.status_code == 200:
            return body, response.headers.get("content-type", "")
        raise _error(response, body)


def _error(response: httpx.Response, body: bytes) -> TeacherError:
    """The TeacherError for an answer other than 200; `retry_after_s` is 0 where trying again may help at once."""
    try:
        document = httpx.Response(200, content=body).json()
        reason = f"{document['type']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        reason = body[:200].decode(errors="replace")
    if response.status_code not in _RETRIED:
        return TeacherError(response.status_code, reason)
    wait = response.headers.get("retry-after", "")
    return TeacherError(response.status_code, reason, float(wait) if wait.isascii() and wait.isdigit() else 0.0)


def _max_answer_bytes(request: LogprobsRequest) -> int:
    """What an answer to this request can weigh at most; a longer one is not read to its end."""
    if request.token_ids is None:
        return _TEXT_BYTES
    candidates = sum(table.nbytes for table in request.candidate_ids or ())  # int32 ids, float32 answers
    per_token = 4 + 4 + 8 * request.top_k
    return _BASE_BYTES + 1024 * len(request.token_ids) + request.num_tokens * per_token + candidates


def _check(request: LogprobsRequest, response: LogprobsResponse, teacher: str) -> None:
    """TeacherError unless the answer is about what was asked: rows shifted by one must never reach a loss."""
    if response.model != teacher:
        raise TeacherError(200, f"asked teacher {teacher!r}, but {response.model!r} answered")
    if request.token_ids is None:
        return
    if len(response.results) != len(request.token_ids):
        raise TeacherError(200, f"sent {len(request.token_ids)} sequences, {len(response.results)} came back")
    for index, (ids, scores) in enumerate(zip(request.token_ids, response.results, strict=True)):
        prompt_len = 1 if request.prompt_len is None else request.prompt_len[index]
        name = f"teacher {teacher!r}, sequence {index}"
        if not np.array_equal(np.asarray(ids[prompt_len:], dtype=np.int32), scores.token_ids):
            raise TeacherError(200, f"{name}: the scored ids are not the ids sent")
        if request.top_k and scores.top_ids is None:
            raise TeacherError(200, f"{name}: top_k={request.top_k} was asked, no top_ids came back")
        if request.candidate_ids is not None:
            shape = None if scores.candidate_logprobs is None else scores.candidate_logprobs.shape
            if shape != np.shape(request.candidate_ids[index]):
                raise TeacherError(200, f"{name}: candidate_logprobs has shape {shape}, not that of candidate_ids")
