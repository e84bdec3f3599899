"""The values that `POST /logprobs` and `POST /generate` carry, and the limits that a teacher sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

LogprobsDtype = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a teacher accepts; /info shows the same numbers."""

    vocab_size: int
    max_model_len: int
    max_top_k: int
    max_body_bytes: int = 8 * 2**20
    max_sequences: int = 256
    max_candidates: int = 1024


@dataclass(slots=True)
class LogprobsRequest:
    """One request: sequences of token ids, or one text to tokenize.

    Attributes:
        token_ids: per sequence, prompt + response.
        prompt_len: per sequence, number of prompt tokens P; None scores every position from 1 on.
        candidate_ids: per sequence [R, C] int32, ids to score at each row.
        logprobs_dtype: wire dtype of `top_logprobs` and `candidate_logprobs`; `logprobs` is always float32.
    """

    token_ids: list[list[int]] | None = None
    prompt_len: list[int] | None = None
    top_k: int = 0
    candidate_ids: list[np.ndarray] | None = None
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    completion: str | None = None
    logprobs_dtype: LogprobsDtype = "float32"

    @property
    def num_tokens(self) -> int:
        """Tokens the engine has to read."""
        return sum(len(ids) for ids in self.token_ids or ())


@dataclass(slots=True)
class SequenceScores:
    """Scores of one sequence: token_ids [R] int32, logprobs [R] float32, the rest [R, k] or [R, C] or absent.

    `queue_ms` (waiting in the engine's queue) and `cached_tokens` (not computed, out of the prefix cache) do not travel
    by themselves: the answer's `usage` has the longest and the sum.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None
    tokens: list[str] | None = None
    top_tokens: list[list[str]] | None = None
    queue_ms: float = 0.0
    cached_tokens: int = 0


@dataclass(slots=True)
class LogprobsResponse:
    """All sequences of a request, in the order asked."""

    model: str
    fingerprint: str
    results: list[SequenceScores]
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GenerateRequest:
    """One request for greedy continuations (temperature 0).

    Attributes:
        token_ids: the prompts.
        max_tokens: most tokens that each continuation may have, the stop token included.
    """

    token_ids: list[list[int]]
    max_tokens: int
    model: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the engine has to read or write at most."""
        return sum(len(ids) + self.max_tokens for ids in self.token_ids)


@dataclass(slots=True)
class GenerateResponse:
    """The continuation of every prompt, in the order asked; the model's end-of-sequence token is the last of it, where
    the model wrote one."""

    model: str
    fingerprint: str
    results: list[list[int]]
    usage: dict[str, Any] = field(default_factory=dict)
