"""Keeps the logprobs that vLLM samples with as arrays on their way through the front end.

vLLM makes Python numbers of them, 1 + k of each kind a token. The subclasses below leave the engine's arrays alone.
They lean on private API of the pinned version; `keep_arrays` fails when it has moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from shared.pinned import check_signatures


class SampledArrays:
    """Logprobs of one completion, a piece per engine step: [n, 1 + k] ids and logprobs, the sampled token first."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def append(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Takes copies: what the engine sends are views of a whole step's arrays, all requests together."""
        self._ids.append(ids.astype(np.int32))
        self._logprobs.append(logprobs.astype(np.float32))

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """[R, 1 + k] int32 and float32."""
        return np.concatenate(self._ids), np.concatenate(self._logprobs)


class ArrayLogprobsProcessor(LogprobsProcessor):
    """Stores the engine's arrays, cut to what its request asked for: a step is as wide as its widest request."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        width = 1 + (self.num_logprobs or 0)
        ids, logprobs, *_ = logprobs_lists
        self.logprobs.append(ids[:, :width], logprobs[:, :width])  # type: ignore[union-attr,call-arg]


class ArrayOutputProcessor(OutputProcessor):
    """Gives every new request the processor above."""

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        state = self.request_states.get(request.request_id)
        if state is not None and state.logprobs_processor is not None and state.logprobs_processor.logprobs is not None:
            state.logprobs_processor.__class__ = ArrayLogprobsProcessor
            state.logprobs_processor.logprobs = SampledArrays()


def keep_arrays(engine: AsyncLLM) -> None:
    """Makes an engine return `SampledArrays` in `CompletionOutput.logprobs`.

    The class is exchanged, not the object: the engine's output loop may hold the object already.

    Raises:
        ConfigError: the private methods used here are not those of the pinned vLLM.
    """
    expected = {
        LogprobsProcessor._update_sample_logprobs: ["self", "logprobs_lists"],
        OutputProcessor.add_request: ["self", "request", "prompt", "parent_req", "request_index", "queue"],
    }
    check_signatures(expected, library="vLLM", project="services/rollout/pyproject.toml")
    engine.output_processor.__class__ = ArrayOutputProcessor
