"""Client of `POST /logprobs` and `/generate`, at gateways or at a teacher.

It asks in msgpack, tries again, and checks what comes back.

What it returns fits the request: as many sequences, the same response ids, the arrays that were asked for.

    R rows (response tokens), k = top_k, C candidates a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
import numpy as np

from shared.addresses import Addresses
from shared.errors import TeacherError, WireError
from shared.prefix import PREFIX_HEADER, prefix_key
from shared.wire import MSGPACK, LogprobsRequest, LogprobsResponse, decode_response, encode_request
from shared.wire_generate import GenerateRequest, decode_generate_response, encode_generate_request

ResponseT = TypeVar("ResponseT")

_BASE_BYTES = 256 * 1024  # keys, names, usage, error texts
_TEXT_BYTES = 64 * 2**20  # a text request: its number of tokens is not known here


class LogprobsClient:
    """Connections to one or several addresses; use it as an async context manager or call `aclose`.

    Args:
        urls: of gateways side by side or of a teacher, e.g. http://127.0.0.1:8100; a single one may be a plain text.
        key: API key, or None where authentication is off.
        connections: most connections to each address at a time; further requests wait.
        timeout_s: time for one call, all its tries and pauses together.
    """

    def __init__(self, urls: str | Sequence[str], key: str | None, *, connections: int, timeout_s: float) -> None:
        urls = [urls] if isinstance(urls, str) else urls
        self._addresses = Addresses(urls, key, connections=connections, timeout_s=timeout_s)

    async def __aenter__(self) -> LogprobsClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._addresses.aclose()

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
        body, content_type = await self._addresses.call("POST", path, headers, content, max_bytes)
        try:
            return decode(body, content_type, max_bytes)
        except WireError as error:
            raise TeacherError(200, f"teacher {teacher!r} sent an unusable answer: {error}", 1.0) from error

    async def info(self, teacher: str) -> dict[str, Any]:
        """What a teacher says of itself: model, fingerprint, vocabulary size, tokenizer hash, limits.

        Raises:
            TeacherError: it is not known there (404), or no replica of it serves yet (503).
        """
        body, _ = await self._addresses.call("GET", "/info", {}, b"", _BASE_BYTES * 16)
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
