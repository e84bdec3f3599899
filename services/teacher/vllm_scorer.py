"""A teacher on vLLM's AsyncLLM in this process, the engine core in one child process.

The scored sequence goes in as a prompt with `prompt_logprobs`; one token is generated because vLLM generates at least
one, and thrown away. Logprobs are raw (temperature 1) and come from a float32 head. Sequences with the same beginning
share its key-value blocks; every row served was computed for its own request (vllm_scheduler.py, vllm_rows.py).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from services.teacher.processes import end_children
from services.teacher.scorer import ScorerInfo, ScoringError, check_scores
from shared import log
from shared.config import TeacherSection
from shared.errors import ConfigError, RunFailed
from shared.wire import SequenceScores

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_log = log.get(__name__)
_KV_BLOCK = 32  # tokens, the least that vLLM's CPU attention takes; what is shared is a multiple of it
_SHUTDOWN_TIMEOUT_S = 0.5  # then it is killed: a teacher has nothing to save


class VllmScorer:
    """See scorer.Scorer."""

    def __init__(self, section: TeacherSection) -> None:
        self._section = section
        self._model_config = _read_json(section.model / "config.json")
        self._max_model_len = _engine_len(section, self._model_config)
        _check_kv_cache(section, self._model_config, self._max_model_len)
        self._engine: AsyncLLM | None = None
        self._sockets = tempfile.TemporaryDirectory(prefix="opd-teacher-")  # vLLM leaves its own in there
        self._info: ScorerInfo | None = None
        self._request_ids = itertools.count()

    @property
    def info(self) -> ScorerInfo:
        if self._info is None:
            raise ScoringError("the engine is still starting")
        return self._info

    @property
    def alive(self) -> bool:
        return self._engine is None or not self._engine.errored

    @property
    def num_unfinished(self) -> int:
        return 0 if self._engine is None else self._engine.get_num_unfinished_requests()

    async def start(self) -> None:
        _set_environment(self._section.threads, self._sockets.name)
        started = time.monotonic()
        # A thread, because importing vLLM and waiting for the engine core would block health answers and SIGTERM.
        try:
            await asyncio.to_thread(self._create_engine)
        except (RuntimeError, ValueError, OSError) as error:
            raise RunFailed(f"the engine did not start with {self._section.model}: {error}") from error
        await self._running.collective_rpc("opd_end_with", args=(os.getpid(),))
        await self._running.collective_rpc("opd_score_rows")
        import vllm

        config = self._running.model_config
        vocab_size = config.get_vocab_size()
        self._info = ScorerInfo(
            engine=f"vllm {vllm.__version__}",
            dtype=str(config.dtype).removeprefix("torch."),
            vocab_size=vocab_size,
            max_model_len=self._max_model_len - 1,
            max_top_k=min(self._section.max_top_k, vocab_size),
        )
        _log.info("engine_started", extra=log.fields(start_s=round(time.monotonic() - started, 1)))

    def _create_engine(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from services.teacher.vllm_arrays import KeepTimestamps, keep_arrays

        section = self._section
        eager = current_platform.is_cpu()  # a GPU replays CUDA graphs instead
        if eager:
            # What vLLM compiles in eager mode is a rank count that nobody reads; without it no C++ compiler is needed.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        arguments = AsyncEngineArgs(
            model=str(section.model),
            dtype=section.dtype,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=section.max_num_batched_tokens,
            max_num_seqs=min(section.max_num_seqs, section.max_num_batched_tokens),
            max_logprobs=section.max_top_k,
            kv_cache_memory_bytes=section.kv_cache_bytes,
            hf_overrides={"head_dtype": "float32"},
            logprobs_mode="raw_logprobs",
            enforce_eager=eager,
            enable_prefix_caching=section.prefix_caching,
            block_size=_KV_BLOCK,
            scheduler_cls="services.teacher.vllm_scheduler.RowScheduler",
            async_scheduling=False,  # RowScorer waits for each step's rows, and RowScheduler is not an AsyncScheduler
            enable_sleep_mode=current_platform.is_sleep_mode_available(),
            skip_tokenizer_init=True,
            generation_config="vllm",
            # The worker lives in the engine core's process: one process and one import of torch fewer to start.
            distributed_executor_backend=UniProcExecutor,
            worker_extension_cls="services.teacher.vllm_worker.WorkerExtension",
            disable_log_stats=True,
            enable_log_requests=False,
        )
        # Into the attribute at once: vLLM's imports keep this frame alive, and with it every local variable.
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[KeepTimestamps])
        keep_arrays(self._engine)

    async def score(
        self,
        token_ids: list[int],
        prompt_len: int | None,
        top_k: int,
        candidate_ids: np.ndarray | None = None,
    ) -> SequenceScores:
        first = 1 if prompt_len is None else prompt_len
        num_candidates = None if candidate_ids is None else candidate_ids.shape[1]
        sizes = len(token_ids) - first, top_k, num_candidates
        if first == len(token_ids):
            return _scores(np.empty(0, np.int32), np.empty(0, np.float32), *sizes)
        output = await self._run(token_ids, _scoring_params(first, top_k, candidate_ids))
        arrays: Any = output.prompt_logprobs  # PromptArrays
        if arrays is None:
            raise ScoringError("the engine returned no logprobs")
        scores = _scores(arrays.token_ids, arrays.logprobs, *sizes)
        stamps: Any = output.metrics
        scores.queue_ms = 1000 * (stamps.scheduled_ts - stamps.queued_ts)
        scores.cached_tokens = output.num_cached_tokens or 0
        check_scores(token_ids, first, scores)
        return scores

    async def generate(self, token_ids: list[int], max_tokens: int, stop_token_ids: list[int]) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        (output,) = (await self._run(token_ids, params)).outputs
        if output.finish_reason not in ("stop", "length"):
            raise ScoringError(f"the engine ended a continuation with {output.finish_reason!r}")
        return list(output.token_ids)

    async def _run(self, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        """The engine's last word on a request."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt: Any = {"prompt_token_ids": token_ids}
        output = None
        try:
            async for step in self._running.generate(prompt, params, f"request-{next(self._request_ids)}"):
                output = step
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise ScoringError(f"the engine failed: {type(error).__name__}: {error}") from error
        if output is None:
            raise ScoringError("the engine returned nothing")
        return output

    async def sleep(self) -> None:
        # Level 1: weights to the host's memory, KV cache and prefix cache dropped. vLLM's CPU build only stops
        # scheduling and keeps its memory.
        await self._command(self._running.sleep(level=1, mode="wait"))

    async def wake(self) -> None:
        await self._command(self._running.wake_up())

    async def _command(self, work: Awaitable[object]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await work
        except (EngineDeadError, RuntimeError, ValueError) as error:  # RuntimeError: what failed inside the engine
            raise ScoringError(f"the engine failed: {type(error).__name__}: {error}") from error

    def abandon(self) -> None:
        end_children()
        self._sockets.cleanup()

    @property
    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise ScoringError("the engine is not running")
        return self._engine

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # or it logs the end of the engine core as a failure
            await asyncio.to_thread(partial(engine.shutdown, timeout=_SHUTDOWN_TIMEOUT_S))
            del engine
            self._sockets.cleanup()
            gc.collect()  # it is part of a reference cycle, and its __del__ fails at interpreter exit


def _scoring_params(first: int, top_k: int, candidate_ids: np.ndarray | None) -> SamplingParams:
    """What asks the engine for the rows from position `first` on."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from services.teacher.vllm_rows import extra_args

    candidates = np.empty((0, 0), np.int32) if candidate_ids is None else candidate_ids
    return SamplingParams(
        extra_args=extra_args(first, candidates.astype(np.int32, copy=False).tobytes(), candidates.shape[1]),
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=top_k,
        skip_reading_prefix_cache=False,  # vLLM's default for prompt logprobs is to read nothing from the cache
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _scores(ids: np.ndarray, logprobs: np.ndarray, num_rows: int, k: int, num_candidates: int | None) -> SequenceScores:
    """Scores as views of what the engine sent."""
    from services.teacher.vllm_rows import columns

    try:
        found = columns(ids, logprobs, num_rows, k, num_candidates or 0)
    except ValueError as error:
        raise ScoringError(f"the engine returned {error}") from error
    return SequenceScores(
        token_ids=found.ids,
        logprobs=found.logprobs,
        top_ids=found.top_ids if k else None,
        top_logprobs=found.top_logprobs if k else None,
        candidate_logprobs=None if num_candidates is None else found.candidate_logprobs,
    )


def engine_environment(threads: int) -> dict[str, str]:
    """What vLLM and the libraries under it read when they start. The benchmark gives it to vLLM's own server too."""
    return {
        # Pinning by vLLM puts every engine of a machine on the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait make engines many times slower once they outnumber the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        # glibc maps fresh pages for every block over 32 MiB: half of the head's time went into page faults.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        # V2 has no place for RowScorer (docs/decisions/0006-our-own-row-scorer-in-the-engine.md).
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _set_environment(threads: int, sockets: str) -> None:
    """For the engine core, a child of this process; what the user has set stays."""
    for name, value in (engine_environment(threads) | {"VLLM_RPC_BASE_PATH": sockets}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # for what it logs before it has read its own settings


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a model configuration")
    return value


def _engine_len(section: TeacherSection, model_config: dict[str, Any]) -> int:
    """The engine's length limit: one more than a scored sequence may have, for the token that is thrown away."""
    longest = model_config.get("max_position_embeddings")
    wanted = section.max_model_len + 1
    return wanted if longest is None else min(wanted, int(longest))


def _check_kv_cache(section: TeacherSection, model_config: dict[str, Any], engine_len: int) -> None:
    """One sequence of full length must fit; vLLM would say so only after half a minute."""
    try:
        heads = model_config["num_attention_heads"]
        head_dim = model_config.get("head_dim") or model_config["hidden_size"] // heads
        kv_heads = model_config.get("num_key_value_heads") or heads
        per_token = 2 * model_config["num_hidden_layers"] * kv_heads * head_dim
    except (KeyError, TypeError, ZeroDivisionError):
        return  # an unusual architecture: the engine itself checks
    num_blocks = -(-engine_len // _KV_BLOCK) + 1  # vLLM keeps one block for itself
    needed = num_blocks * _KV_BLOCK * per_token * (4 if section.dtype == "float32" else 2)
    if needed > section.kv_cache_bytes:
        raise ConfigError(
            f"kv_cache_bytes={section.kv_cache_bytes} cannot hold one sequence of {engine_len} tokens: "
            f"set it to {needed} or more for {section.model}, or lower max_model_len={section.max_model_len}"
        )
