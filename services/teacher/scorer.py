"""The seam between the service and an engine: everything above it is HTTP, everything below it one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.errors import OpdError
from shared.wire import SequenceScores


class ScoringError(OpdError):
    """The engine answered something that must not be served (NaN, wrong rows), or did not answer."""


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """What the engine turned out to be. `max_model_len` counts prompt + response tokens of a sequence."""

    engine: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_top_k: int


class Scorer(Protocol):
    """Scores and continues sequences; many calls of `score` and `generate` may be in flight at once."""

    @property
    def info(self) -> ScorerInfo:
        """Known once `start` has returned."""
        ...

    @property
    def alive(self) -> bool:
        """False for good once the engine has died."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine holds, waiting or running."""
        ...

    async def start(self) -> None:
        """Load the model. Raises RunFailed when the engine does not start."""
        ...

    async def score(
        self,
        token_ids: list[int],
        prompt_len: int | None,
        top_k: int,
        candidate_ids: np.ndarray | None = None,
    ) -> SequenceScores:
        """Logprobs of the response tokens (R = S - prompt_len rows), and of the `top_k` most likely ids of each row.

        Cancelling the call frees the engine.

        Raises:
            ScoringError: the engine failed, or its answer has NaN.
        """
        ...

    async def generate(self, token_ids: list[int], max_tokens: int, stop_token_ids: list[int]) -> list[int]:
        """The greedy continuation of a prompt: at most `max_tokens` ids, the last a stop token where one was written.

        Cancelling the call frees the engine.

        Raises:
            ScoringError: the engine failed.
        """
        ...

    async def sleep(self) -> None:
        """Finish what runs, then give back the accelerator's memory, where the engine can. Raises ScoringError."""
        ...

    async def wake(self) -> None:
        """Be as before `sleep`, prefixes that were cached forgotten. Raises ScoringError."""
        ...

    def abandon(self) -> None:
        """End a start that is still under way, and what it has made. The process must exit after it."""
        ...

    async def close(self) -> None:
        """Stop the engine and all its processes."""
        ...


def check_scores(token_ids: Sequence[int], prompt_len: int, scores: SequenceScores) -> None:
    """Raises ScoringError unless the rows belong to the sequence and every logprob is a number or -inf."""
    if not np.array_equal(scores.token_ids, np.asarray(token_ids[prompt_len:], dtype=np.int32)):
        raise ScoringError("the engine scored other token ids than those asked for")
    for name in ("logprobs", "top_logprobs", "candidate_logprobs"):
        values = getattr(scores, name)
        if values is not None and not np.all(values < np.inf):  # false for NaN and +inf, true for -inf
            raise ScoringError(f"the engine returned NaN or +inf in {name}")
