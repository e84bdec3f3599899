"""Scores only the rows that were asked for, inside vLLM's worker process (the V1 model runner).

vLLM's own loop takes one request after the other, computes the log-softmax of every prompt position, and holds all of
[tokens, vocabulary] in float32 at once. This one takes the response rows of all requests of an engine step together, in
chunks of bounded size, and per row gives the actual token, the top k, and whatever ids the request names.

What a request wants travels in `SamplingParams.extra_args`. The answer travels in vLLM's `LogprobsTensors`, but flat,
so that the receiver needs no copy: first the actual tokens [R], then the top k [R, k], then the candidates [R, C].

Letters: P prompt tokens, R rows of a request, N rows of a chunk (of all requests), V vocabulary, k and C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors

from services.teacher.topk import top_k

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_EXTRA = "opd_rows"
"""Key in `SamplingParams.extra_args`: {"first": P, "candidates": int32 bytes of [R, C], "num_candidates": C}."""

MAX_CHUNK_BYTES = 128 * 2**20
"""Of one chunk's float32 logits [N, V]; on a GPU their log-softmax takes as much again."""

CPU_CHUNK_BYTES = 30 * 2**20
"""The same on a CPU. From 32 MiB on glibc maps fresh pages for every chunk, which costs half as much as the head."""

_CPU_TILE_BYTES = 2 * 2**20
"""Of the rows whose log-softmax and top k are taken together on a CPU: what stays in its caches between the two."""


def extra_args(first: int, candidates: bytes, num_candidates: int) -> dict[str, Any]:
    """What `RowScorer` reads: score positions `first` … S − 1, each with `num_candidates` ids of its own."""
    return {_EXTRA: {"first": first, "candidates": candidates, "num_candidates": num_candidates}}


def first_row(params: SamplingParams | None) -> int | None:
    """Position of the first token to score; None for a request that asks for no rows."""
    wanted = (params.extra_args or {}).get(_EXTRA) if params is not None else None
    return None if wanted is None else wanted["first"]


class Columns(NamedTuple):
    """Views of an answer: torch tensors in the worker, numpy arrays where it is received."""

    ids: Any  # [R] int32, of the actual tokens
    logprobs: Any  # [R] float32
    top_ids: Any  # [R, k] int32
    top_logprobs: Any  # [R, k] float32
    candidate_logprobs: Any  # [R, C] float32


def columns(ids: Any, logprobs: Any, num_rows: int, k: int, num_candidates: int) -> Columns:
    """Takes an answer's flat arrays apart. Raises ValueError when they are not of these sizes."""
    top = num_rows * (1 + k)
    if len(ids) != top or len(logprobs) != top + num_rows * num_candidates:
        raise ValueError(
            f"{len(ids)} ids and {len(logprobs)} logprobs for {num_rows} rows, k={k} and {num_candidates} candidates"
        )
    return Columns(
        ids=ids[:num_rows],
        logprobs=logprobs[:num_rows],
        top_ids=ids[num_rows:].reshape(num_rows, k),
        top_logprobs=logprobs[num_rows:top].reshape(num_rows, k),
        candidate_logprobs=logprobs[top:].reshape(num_rows, num_candidates),
    )


@dataclass(slots=True)
class _Part:
    """Rows `row` … `row + count` of one request, whose hidden states begin at `hidden` of the step's."""

    request: CachedRequestState
    top_k: int
    row: int
    hidden: int
    count: int

    def cut(self, begin: int, count: int) -> _Part:
        """`count` of its rows, from its `begin`-th on."""
        return _Part(self.request, self.top_k, self.row + begin, self.hidden + begin, count)


class RowScorer:
    """Takes the place of the model runner's `_get_prompt_logprobs_dict`."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        on_cpu, row_bytes = runner.device.type == "cpu", 4 * runner.model_config.get_vocab_size()
        self._chunk = max(1, (CPU_CHUNK_BYTES if on_cpu else MAX_CHUNK_BYTES) // row_bytes)
        self._tile = max(1, _CPU_TILE_BYTES // row_bytes) if on_cpu else self._chunk

    @torch.inference_mode()
    def collect(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Score what this step's hidden states allow; returns the answers of requests whose prompt is through."""
        runner = self._runner
        parts: list[_Part] = []
        finished: dict[str, LogprobsTensors | None] = {}
        for request_id, k in runner.num_prompt_logprobs.items():
            num_tokens = num_scheduled_tokens.get(request_id)
            if num_tokens is None:
                continue  # preempted
            request = runner.requests[request_id]
            if request.in_progress_prompt_logprobs_cpu is None:
                request.in_progress_prompt_logprobs_cpu = _empty_answer(request, k)
            parts.append(self._part(request_id, request, k, num_tokens))
            # A prompt that ends with this chunk is answered with the next step's token, as vLLM does it.
            if request.num_computed_tokens + num_tokens >= len(request.prompt_token_ids):
                finished[request_id] = request.in_progress_prompt_logprobs_cpu
        for chunk in _chunks(parts, self._chunk):
            self._score(chunk, hidden_states)
        for request_id in finished:
            del runner.num_prompt_logprobs[request_id]
            runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
        return finished

    def _part(self, request_id: str, request: CachedRequestState, k: int, num_tokens: int) -> _Part:
        """The rows that this step computes. The hidden state of position p scores token p + 1, row p + 1 − P.

        `num_computed_tokens` counts what came out of the prefix cache as well: the step's hidden states begin there.
        """
        first = first_row(request.sampling_params)
        start = request.num_computed_tokens
        begin = max(start, first - 1)
        end = min(start + num_tokens, len(request.prompt_token_ids) - 1)
        offset = int(self._runner.query_start_loc.np[self._runner.input_batch.req_id_to_index[request_id]])
        return _Part(request, k, row=begin + 1 - first, hidden=begin - start + offset, count=max(0, end - begin))

    def _score(self, chunk: list[_Part], hidden_states: torch.Tensor) -> None:
        """Fill the rows of a chunk: the head for all of them at once, the rest tile by tile."""
        hidden = torch.cat([hidden_states[part.hidden : part.hidden + part.count] for part in chunk])
        logits = self._runner.model.compute_logits(hidden)
        logprobs = torch.empty((min(self._tile, len(logits)), logits.shape[1]), device=logits.device)
        begin = 0
        for part in chunk:
            for at in range(0, part.count, self._tile):
                tile = part.cut(at, min(self._tile, part.count - at))
                rows = logits[begin : begin + tile.count].float()
                _fill(tile, torch.log_softmax(rows, dim=-1, out=logprobs[: tile.count]))
                begin += tile.count


def _chunks(parts: list[_Part], size: int) -> Iterator[list[_Part]]:
    """All rows of the parts in order, `size` at a time."""
    chunk, room = [], size
    for part in parts:
        begin = 0
        while begin < part.count:
            count = min(room, part.count - begin)
            chunk.append(part.cut(begin, count))
            begin, room = begin + count, room - count
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _empty_answer(request: CachedRequestState, k: int) -> LogprobsTensors:
    """Actual ids known, everything else NaN: a row that was never computed cannot pass for an answer."""
    wanted = request.sampling_params.extra_args[_EXTRA]
    scored = request.prompt_token_ids[wanted["first"] :]
    num_rows = len(scored)
    ids = torch.zeros(num_rows * (1 + k), dtype=torch.int32)
    ids[:num_rows] = torch.tensor(scored, dtype=torch.int32)
    logprobs = torch.full((num_rows * (1 + k + wanted["num_candidates"]),), torch.nan)
    return LogprobsTensors(ids, logprobs, selected_token_ranks=torch.empty(0, dtype=torch.int32))


def _fill(part: _Part, logprobs: torch.Tensor) -> None:
    """Write a part's rows of its request's answer from their log-softmax [n, V]."""
    wanted = part.request.sampling_params.extra_args[_EXTRA]
    num_rows = len(part.request.prompt_token_ids) - wanted["first"]
    ids, values, _ = part.request.in_progress_prompt_logprobs_cpu[:3]
    answer = columns(ids, values, num_rows, part.top_k, wanted["num_candidates"])
    rows = slice(part.row, part.row + part.count)
    answer.logprobs[rows] = logprobs.gather(1, answer.ids[rows, None].to(logprobs.device, torch.int64))[:, 0]
    if part.top_k:
        answer.top_logprobs[rows], answer.top_ids[rows] = top_k(logprobs, part.top_k)
    if wanted["num_candidates"]:
        table = _candidates(wanted, rows).to(logprobs.device, torch.int64)
        answer.candidate_logprobs[rows] = logprobs.gather(1, table)


def _candidates(wanted: dict[str, Any], rows: slice) -> torch.Tensor:
    """The ids [n, C] that these rows are asked about."""
    row_bytes = 4 * wanted["num_candidates"]
    own = bytearray(memoryview(wanted["candidates"])[rows.start * row_bytes : rows.stop * row_bytes])
    return torch.frombuffer(own, dtype=torch.int32).view(-1, wanted["num_candidates"])
