"""Keeps vLLM's prompt logprobs as arrays on their way through the front end.

vLLM turns the tensors that its engine sends into one Python object per token and candidate (206 µs a token at k = 64).
The subclasses below leave them alone. They lean on private API of the pinned version; `check_vllm` and
tests/teacher/test_vllm_contract.py fail when it moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.outputs import LogprobsTensors

from shared.pinned import check_signatures


class PromptArrays:
    """Prompt logprobs of one request, flat, laid out as `vllm_rows` says; views of the received bytes."""

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        self.token_ids = token_ids  # [R + R·k] int32
        self.logprobs = logprobs  # [R + R·k + R·C] float32


class ArrayLogprobsProcessor(LogprobsProcessor):
    """Stores the tensors of the last prefill chunk (they cover the whole prompt) as they came."""

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        token_ids, logprobs, *_ = prompt_logprobs_tensors
        self.prompt_logprobs = PromptArrays(token_ids.numpy(), logprobs.numpy())  # type: ignore[assignment]


class ArrayOutputProcessor(OutputProcessor):
    """Gives every new request the processor above."""

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        state = self.request_states.get(request.request_id)
        if state is not None and state.logprobs_processor is not None:
            state.logprobs_processor.__class__ = ArrayLogprobsProcessor


class KeepTimestamps(StatLoggerBase):
    """Logs nothing. With a logger vLLM stamps every request with the times at which it was queued and scheduled."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Takes what vLLM gives to every logger."""

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing to record."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


def keep_arrays(engine: AsyncLLM) -> None:
    """Makes an engine return `PromptArrays` in `RequestOutput.prompt_logprobs`.

    The class is exchanged, not the object: the engine's output loop may hold the object already.
    """
    check_vllm()
    engine.output_processor.__class__ = ArrayOutputProcessor


def check_vllm() -> None:
    """Raises ConfigError when the private methods used here are not those of the pinned vLLM."""
    expected = {
        LogprobsProcessor._update_prompt_logprobs: ["self", "prompt_logprobs_tensors"],
        OutputProcessor.add_request: ["self", "request", "prompt", "parent_req", "request_index", "queue"],
    }
    check_signatures(expected, library="vLLM", project="services/teacher/pyproject.toml")
