"""Scores only the rows that were asked for, inside vLLM's worker process (the V1 model runner).

vLLM's own loop takes one request after the other, computes the log-softmax of every prompt position, and holds all of
[tokens, vocabulary] in float32 at once. This one takes the response rows of all requests of an engine step together, in
chunks of bounded size, and per row gives the actual token, the top k, and whatever ids the request names.

What a request wants travels in `SamplingParams.extra_args`; the answer keeps vLLM's form (`LogprobsTensors`), with one
row per response token and the columns: actual token, k most likely, C candidates. Ranks are not computed.

Letters: R rows of a request, N rows of a chunk (of all requests), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

EXTRA = "opd_rows"
"""Key in `SamplingParams.extra_args`: {"first": P, "candidates": int32 bytes of [R, C], "num_candidates": C}."""

_MAX_CHUNK_BYTES = 128 * 2**20
"""Of one chunk's float32 logits [N, V]; log-sum-exp needs as much again."""


def extra_args(first: int, candidates: bytes, num_candidates: int) -> dict[str, Any]:
    """What `RowScorer` reads: score positions `first` … S − 1, each with `num_candidates` ids of its own."""
    return {EXTRA: {"first": first, "candidates": candidates, "num_candidates": num_candidates}}


@dataclass(slots=True)
class _Part:
    """The rows of one request that this engine step computes.

    Attributes:
        tensors: the request's whole answer, [R, 1 + k + C].
        rows: [n] which of its R rows.
        hidden: [n] their places in the step's hidden states.
    """

    tensors: LogprobsTensors
    top_k: int
    rows: torch.Tensor
    hidden: torch.Tensor


class RowScorer:
    """Takes the place of the model runner's `_get_prompt_logprobs_dict`."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        vocab_size = runner.model_config.get_vocab_size()
        self._chunk = max(1, _MAX_CHUNK_BYTES // (4 * vocab_size))

    @torch.inference_mode()
    def collect(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Score what this step's hidden states allow; returns the answers of requests whose prompt is through."""
        runner = self._runner
        parts: list[_Part] = []
        finished: dict[str, LogprobsTensors | None] = {}
        for request_id, top_k in runner.num_prompt_logprobs.items():
            num_tokens = num_scheduled_tokens.get(request_id)
            if num_tokens is None:
                continue  # preempted
            request = runner.requests[request_id]
            if request.in_progress_prompt_logprobs_cpu is None:
                request.in_progress_prompt_logprobs_cpu = _empty_answer(request, top_k)
            tensors = request.in_progress_prompt_logprobs_cpu
            parts.append(self._part(request_id, request, tensors, top_k, num_tokens))
            # A prompt that ends with this chunk is answered with the next step's token, as vLLM does it.
            if request.num_computed_tokens + num_tokens >= len(request.prompt_token_ids):
                finished[request_id] = tensors
        self._score([part for part in parts if len(part.rows)], hidden_states)
        for request_id in finished:
            del runner.num_prompt_logprobs[request_id]
            runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
        return finished

    def _part(
        self, request_id: str, request: CachedRequestState, tensors: LogprobsTensors, top_k: int, num_tokens: int
    ) -> _Part:
        """The hidden state of position p scores token p + 1, which is row p + 1 − first."""
        first = len(request.prompt_token_ids) - len(tensors.logprobs)
        start = request.num_computed_tokens
        begin = max(start, first - 1)
        end = min(start + num_tokens, len(request.prompt_token_ids) - 1)
        positions = torch.arange(begin, max(begin, end))
        offset = int(self._runner.query_start_loc.np[self._runner.input_batch.req_id_to_index[request_id]])
        return _Part(tensors, top_k, rows=positions + 1 - first, hidden=positions - start + offset)

    def _score(self, parts: list[_Part], hidden_states: torch.Tensor) -> None:
        """Fill the logprob columns (and the ids of the top k) of all parts, a chunk of rows at a time."""
        queue = [
            _Part(part.tensors, part.top_k, rows, hidden)
            for part in parts
            for rows, hidden in zip(part.rows.split(self._chunk), part.hidden.split(self._chunk))
        ]
        while queue:
            chunk = [queue.pop(0)]
            while queue and sum(len(part.rows) for part in chunk) + len(queue[0].rows) <= self._chunk:
                chunk.append(queue.pop(0))
            hidden = torch.cat([part.hidden for part in chunk]).to(hidden_states.device)
            logits = self._runner.model.compute_logits(hidden_states[hidden]).float()
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            top_k = max(part.top_k for part in chunk)
            top = logits.topk(top_k, dim=-1) if top_k else None
            begin = 0
            for part in chunk:
                end = begin + len(part.rows)
                own_top = None if top is None else (top.values[begin:end], top.indices[begin:end])
                _fill(part, logits[begin:end], normaliser[begin:end], own_top)
                begin = end


def _empty_answer(request: CachedRequestState, top_k: int) -> LogprobsTensors:
    """[R, 1 + k + C] with the ids that are known beforehand: the actual token's and the candidates'."""
    wanted = request.sampling_params.extra_args[EXTRA]
    first, num_candidates = wanted["first"], wanted["num_candidates"]
    num_rows = len(request.prompt_token_ids) - first
    answer = LogprobsTensors(
        logprob_token_ids=torch.zeros((num_rows, 1 + top_k + num_candidates), dtype=torch.int32),
        logprobs=torch.full((num_rows, 1 + top_k + num_candidates), torch.nan),
        selected_token_ranks=torch.zeros(num_rows, dtype=torch.int32),
    )
    answer.logprob_token_ids[:, 0] = torch.tensor(request.prompt_token_ids[first:], dtype=torch.int32)
    if num_candidates:
        candidates = torch.frombuffer(bytearray(wanted["candidates"]), dtype=torch.int32)
        answer.logprob_token_ids[:, 1 + top_k :] = candidates.view(num_rows, num_candidates)
    return answer


def _fill(
    part: _Part, logits: torch.Tensor, normaliser: torch.Tensor, top: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    """Write one part's rows: logits [n, V], their log-sum-exp [n, 1], the largest logits and their ids [n, >= k]."""
    ids, k = part.tensors.logprob_token_ids, part.top_k
    if top is not None and k:
        ids[part.rows, 1 : 1 + k] = top[1][:, :k].to("cpu", torch.int32)
    wanted = ids[part.rows].long().to(logits.device)
    part.tensors.logprobs[part.rows] = (logits.gather(1, wanted) - normaliser).cpu()
