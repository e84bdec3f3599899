"""The student on vLLM's AsyncLLM: sampling with logprobs, scoring for canaries, weight loads under running requests.

**Loading weights.** vLLM's keep-pause freezes what is in flight between two engine steps; then the worker extension
(`vllm_worker.py`) replaces the weights, the engine's weight version is set, the KV cache is dropped *also for running
requests* (so that their context is computed again with the new weights), and the engine goes on. Nothing in flight is
lost or restarted: a completion that lived through a load has one version span per version that wrote tokens of it,
and each token's logprob is that of the version that sampled it. Spans are the engine's own: it stamps the outputs of
every step with the version in force, and the version only changes while no step runs.

**Logprobs** are the raw ones (temperature 1, before any sampling filter) of the sampled token, from a float32 head, and
the top k of a row are the likeliest by the same logprobs. They stay arrays all the way (`vllm_arrays.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from services.rollout.sampler import Completion
from shared.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

SHUTDOWN_TIMEOUT_S = 1.0  # then it is killed: it has nothing to save
_MAX_BATCHED_TOKENS = 2048

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # OpenMP threads that spin while they wait make an engine many times slower once processes outnumber cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class VllmSampler:
    """See sampler.Sampler. One engine on one device; several workers are several processes.

    Args:
        model: Hugging Face folder; its weights are served as version 0 until the first load.
        dtype: "float32" or "bfloat16".
        kv_cache_bytes: size of the KV cache.
        threads: OpenMP threads of the CPU build; None leaves binding to vLLM (one engine per machine).
        stop_token_ids: tokens that end a completion, the end-of-sequence tokens among them.
        max_top_k: the largest `top_k` that `sample` is asked for.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_bytes: int,
        stop_token_ids: list[int],
        threads: int | None = None,
        seed: int = 0,
        max_top_k: int = 0,
    ) -> None:
        self.model = model
        self._threads = threads
        self._stop_token_ids = stop_token_ids
        self._engine: AsyncLLM | None = None
        self._starting: asyncio.Future[AsyncLLM] | None = None
        self._foreign: frozenset[BaseProcess] = frozenset()
        self._request_ids = itertools.count()
        self._loading = asyncio.Lock()
        self._engine_args: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(_MAX_BATCHED_TOKENS, max_num_seqs),
            "kv_cache_memory_bytes": kv_cache_bytes,
            "seed": seed,
            "max_logprobs": max_top_k,
            # No compiled graph may hold on to old weights, and warm-up is most of the start-up time.
            "enforce_eager": True,
            # Prompts come and responses go as token ids; where to stop is said with every request.
            "skip_tokenizer_init": True,
            "hf_overrides": {"head_dtype": "float32"},
            # Sampling defaults in the folder's generation_config (top_p, penalties) would bend the policy unseen.
            "generation_config": "vllm",
            "logprobs_mode": "raw_logprobs",
            "worker_extension_cls": "services.rollout.vllm_worker.WorkerExtension",
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
        }

    async def start(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._threads is not None:
            # vLLM's own binding puts every engine of a machine on the same cores.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["OMP_NUM_THREADS"] = str(self._threads)
        self._foreign = frozenset(multiprocessing.active_children())
        # In a thread: it takes tens of seconds, in which signals and health checks must be answered.
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._create))
        try:
            self._engine = await asyncio.shield(self._starting)
        except (ValueError, RuntimeError, OSError) as error:
            reason = _first_line(error)
            raise ConfigError(f"student.model {self.model}: the engine cannot serve it: {reason}") from error
        await self._engine.collective_rpc("opd_end_with", args=(os.getpid(),))
        await self._engine.update_weight_version("0")

    def _create(self) -> AsyncLLM:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from services.rollout.vllm_arrays import keep_arrays

        # The worker lives in the engine core's process: one process and one import of torch fewer to start and to stop.
        arguments = AsyncEngineArgs(**self._engine_args, distributed_executor_backend=UniProcExecutor)
        engine = AsyncLLM.from_engine_args(arguments)
        keep_arrays(engine)
        return engine

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
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=top_k,
            detokenize=False,
            stop_token_ids=self._stop_token_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = await self._generate(token_ids, params)
        return [_completion(output) for output in sorted(outputs, key=lambda output: output.index)]

    async def score(self, token_ids: list[int]) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = await self._run(token_ids, params)
        flat = request.prompt_logprobs
        # Position 0 has no row; position i > 0 has its own token first.
        starts = np.asarray(flat.start_indices[1:])
        return np.asarray(flat.logprobs, np.float32)[starts]

    async def load_weights(self, path: Path, version: int) -> None:
        engine = self._running()
        async with self._loading:
            # The cache is kept here and dropped below: only then are the new weights in place.
            await engine.pause_generation(mode="keep", clear_cache=False)
            try:
                await engine.collective_rpc("opd_load_weights", args=(str(path),))
                await engine.update_weight_version(str(version))
                dropped = await engine.reset_prefix_cache(reset_running_requests=True)
            except Exception as error:  # whatever the engine raises, its weights are now undefined
                raise WeightsError(f"weights v{version} from {path}: the engine cannot load them: {error}") from error
            if not dropped:
                raise WeightsError(f"weights v{version}: the engine did not drop its KV cache of older weights")
            await engine.resume_generation()

    async def close(self) -> None:
        if self._starting is not None and not self._starting.done():
            for process in self._processes():
                process.kill()
            await asyncio.wait({self._starting})
        processes = self._processes()
        engine, self._engine, self._starting = self._engine, None, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # else it reports the engine that we stop as dead
            await asyncio.to_thread(engine.shutdown, SHUTDOWN_TIMEOUT_S)
            # Its finalizer shuts down once more, and complains when that is as late as the interpreter's end.
            engine.shutdown = _already_shut_down
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 1.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, 5.0)

    def _processes(self) -> list[psutil.Process]:
        """The engine's processes: the core, a child of this process, and its workers."""
        found = []
        for child in multiprocessing.active_children():
            if child in self._foreign or child.pid is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                core = psutil.Process(child.pid)
                found += [core, *core.children(recursive=True)]
        return found

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise RuntimeError("the sampler is not started, or closed")
        return self._engine

    async def _generate(self, token_ids: list[int], params: SamplingParams) -> list[CompletionOutput]:
        return (await self._run(token_ids, params)).outputs

    async def _run(self, token_ids: list[int], params: SamplingParams) -> Any:
        """The final RequestOutput. Cancelling the caller aborts the request in the engine."""
        final = None
        request_id = str(next(self._request_ids))
        async for output in self._running().generate({"prompt_token_ids": token_ids}, params, request_id):
            final = output
        if final is None or not final.finished:
            raise RuntimeError(f"engine request {request_id} ended without an output")
        return final


def _completion(output: CompletionOutput) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"completion ended with {output.finish_reason!r}: the engine aborted it")
    token_ids = list(output.token_ids)
    ids, logprobs = output.logprobs.joined()
    spans = [(int(span.version), span.end - span.start) for span in output.weight_versions or []]
    if ids[:, 0].tolist() != token_ids or sum(num for _, num in spans) != len(token_ids):
        raise RuntimeError(f"engine output is inconsistent: {len(token_ids)} tokens, {len(logprobs)} logprobs, {spans}")
    return Completion(token_ids, logprobs[:, 0].copy(), spans, output.finish_reason, ids[:, 1:].copy())


def _already_shut_down(timeout: float | None = None) -> None:
    """Takes the place of AsyncLLM.shutdown on an engine that has been shut down."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
