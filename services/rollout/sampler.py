"""The seam between the rollout worker and the engine that holds the student.

Everything the worker needs from an engine is this protocol; `vllm_sampler.py` is the engine behind it, tests put a
fake there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Completion:
    """One sampled response of R tokens (R >= 1), the end-of-sequence token included when the student wrote it.

    token_ids: [R]. logprobs: [R] float32, log q(y_t | prompt, y_<t) of each sampled token at temperature 1, under the
    version that wrote it. version_spans: [(policy_version, num_tokens)] in order; num_tokens sum to R.
    finish_reason: "stop" (end of sequence or a stop token) or "length". top_ids: [R, k] int32, the ids that the version
    which wrote the token found most likely, the likeliest first.
    """

    token_ids: list[int]
    logprobs: np.ndarray
    version_spans: list[tuple[int, int]]
    finish_reason: str
    top_ids: np.ndarray


class Sampler(Protocol):
    """A student that samples, scores and takes new weights. All methods are called from one event loop."""

    async def start(self) -> None:
        """Start the engine with the weights of the model folder. Raises ConfigError when they cannot be served."""

    async def sample(
        self,
        token_ids: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        top_k: int = 0,
    ) -> list[Completion]:
        """n completions of the prompt `token_ids`, each of at most `max_tokens` tokens, with `top_k` ids a row.

        Temperature 0 is greedy.
        """

    async def score(self, token_ids: list[int]) -> np.ndarray:
        """[S-1] float32: row t is log q(token_ids[t+1] | token_ids[:t+1]) at temperature 1."""

    async def load_weights(self, path: Path, version: int) -> None:
        """Replace every weight with the push in folder `path`; what is in flight goes on under the new version.

        Raises WeightsError; the engine then serves nothing that may be trusted and must not be used further.
        """

    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""

    @property
    def alive(self) -> bool:
        """False once the engine has died (or was never started)."""
