"""Real server processes of the benchmark, each alive while its context is open."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.teacher.vllm_scorer import engine_environment

_START_S = 180.0
_STOP_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True)
class EngineSettings:
    """What both engines are told alike, so that only the way of the logprobs differs."""

    model: Path
    dtype: str = "bfloat16"
    threads: int = 1
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    kv_cache_bytes: int = 256 * 2**20
    block_size: int = 32  # the teacher's, see services/teacher/vllm_scorer.py
    top_k: int = 64


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        pid: of the process that was started; engines have children of their own.
    """

    name: str
    url: str
    pid: int


@contextlib.contextmanager
def teacher(
    settings: EngineSettings, logs: Path, *overrides: str, name: str = "bench", log: str = "teacher"
) -> Iterator[Server]:
    """Our teacher; `overrides` are `--set` texts of TeacherSection, `log` names its log."""
    port = free_port()
    fields = {
        "max_model_len": settings.max_model_len - 1,  # the engine gets one more, for the token that is thrown away
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_bytes": settings.kv_cache_bytes,
        "threads": settings.threads,
    }
    command = [sys.executable, "-m", "services.teacher", "--name", name, "--model", str(settings.model)]
    command += ["--port", str(port), "--dtype", settings.dtype]
    for text in [*(f"{key}={value}" for key, value in fields.items()), *overrides]:
        command += ["--set", text]
    with _running(log, command, port, "/readyz", logs) as server:
        yield server


@contextlib.contextmanager
def vllm_serve(settings: EngineSettings, logs: Path) -> Iterator[Server]:
    """vLLM's own server with the teacher's engine settings, its float32 head and its environment.

    It is the module behind `vllm serve`; the command itself looks for a distribution named vllm, which the CPU build
    is not.
    """
    port = free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "bench",
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "max-num-seqs": settings.max_num_seqs,
        "max-logprobs": 256,
        "kv-cache-memory-bytes": settings.kv_cache_bytes,
        "hf-overrides": '{"head_dtype": "float32"}',
        "logprobs-mode": "raw_logprobs",
        "generation-config": "vllm",
        "block-size": settings.block_size,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model)]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    command += ["--enforce-eager", "--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    with _running("vllm-serve", command, port, "/health", logs, engine_environment(settings.threads)) as server:
        yield server


@contextlib.contextmanager
def gateway(
    teachers: Mapping[str, Sequence[str]], logs: Path, *overrides: str, log: str = "gateway"
) -> Iterator[Server]:
    """Our gateway in front of teachers, given as {name: urls of its replicas}."""
    port = free_port()
    command = [sys.executable, "-m", "services.gateway", "--port", str(port)]
    command += [part for name, urls in teachers.items() for url in urls for part in ("--teacher", f"{name}={url}")]
    command += [part for text in overrides for part in ("--set", text)]
    with _running(log, command, port, "/readyz", logs) as server:
        yield server


@contextlib.contextmanager
def vllm_router(python: Path, worker_url: str, logs: Path) -> Iterator[Server]:
    """vllm-router from an environment of its own, in front of one `vllm serve`."""
    port = free_port()
    command = [str(python), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", worker_url, "--prometheus-port", str(free_port())]
    with _running("vllm-router", command, port, "/health", logs) as server:
        yield server


@contextlib.contextmanager
def _running(
    name: str,
    command: Sequence[str],
    port: int,
    ready_path: str,
    logs: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A process group that answers 200 at `ready_path`; its output goes to `logs`/NAME.log.

    Raises:
        RuntimeError: it ended, or was not ready in time; names its log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}{ready_path}", log)
        yield Server(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        _end(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{log.stem} ended with status {process.returncode}; see {log}")
        # OSError: not listening yet, or 503; it is asked again until it is ready or the time is up
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(_POLL_S)
    raise RuntimeError(f"{log.stem} was not ready within {_START_S:g} s; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, then whatever is left of its group (an engine core outlives a killed server)."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
