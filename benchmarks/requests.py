"""Bodies of the benchmark's requests, in our protocol and in vLLM's, for the same token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from shared.wire import MSGPACK, LogprobsRequest, encode_request

TEACHER = "teacher"
VLLM = "vllm"


def token_ids(num_sequences: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random sequences; no two share a prefix, so that no prefix cache can help."""
    generator = np.random.default_rng(seed)
    ids: list[list[int]] = generator.integers(0, vocab_size, (num_sequences, num_tokens)).tolist()
    return ids


def body(
    api: str,
    url: str,
    ids: Sequence[int],
    top_k: int | None,
    prompt_len: int | None,
    logprobs_dtype: str,
    teacher: str,
) -> tuple[str, bytes, dict[str, str]]:
    """URL, body and headers of a request.

    Args:
        api: TEACHER or VLLM.
        top_k: None asks vLLM for no logprobs at all.
        prompt_len: rows from there on; vLLM has no such thing and scores every row.
    """
    if api == VLLM:
        fields = {"model": "bench", "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        if top_k is not None:
            fields["prompt_logprobs"] = top_k
        return f"{url}/v1/completions", json.dumps(fields).encode(), {"content-type": "application/json"}
    request = LogprobsRequest(
        top_k=top_k or 0,
        token_ids=[list(ids)],
        prompt_len=None if prompt_len is None else [prompt_len],
        logprobs_dtype=logprobs_dtype,  # type: ignore[arg-type]
    )
    headers = {"content-type": MSGPACK, "accept": MSGPACK, "x-teacher": teacher}
    return f"{url}/logprobs", encode_request(request), headers
