"""Megatron-core on a machine without CUDA.

Megatron asks for CUDA in three ways: through functions of `torch.cuda` (device, streams, random state), through
`device="cuda"` and `.cuda()`, and by comparing `Tensor.type()` with "torch.cuda.*". Inside `megatron_device()` all
three answer for the CPU; with CUDA present it does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed instead of giving them back to the kernel, CPU only.

    A training step frees and takes the same gigabytes again and again, and each time the kernel must zero the pages:
    filling an embedding's gradient took 29 ms with that and 8 without. Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not torch.cuda.is_available():
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # -1: never


@contextmanager
def megatron_device() -> Iterator[None]:
    """Everything that calls into Megatron runs inside this; it may be entered again inside itself."""
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.multiple(
            torch.cuda,
            current_device=_cpu,
            set_device=_nothing,
            synchronize=_nothing,
            Stream=_NoStream,
            current_stream=_NoStream,
            stream=nullcontext,
        ),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # 0.16.1 forgets it without the engine
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _as_numpy_if_asked),
        mock.patch.multiple(random, _get_cuda_rng_state=_no_rng_state, _set_cuda_rng_state=_nothing),
        torch.compiler.set_stance("force_eager"),  # Megatron compiles small functions, which pays on GPUs alone
        _CudaMeansCpu(),
    ):
        yield


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """Recomputation saves the device's random state; nothing here is random on the way."""
    return torch.empty(0, dtype=torch.uint8)


def _as_numpy_if_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The dispatcher of tokens to experts wants its sizes as numpy; Megatron's own function minds only CUDA tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _NoStream:
    """A stream of a device that has none: everything is done in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self


class _CudaMeansCpu(TorchFunctionMode):
    """Sends `device="cuda"` and `.cuda()` to the CPU, and names tensor types as CUDA would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _cpu()}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
