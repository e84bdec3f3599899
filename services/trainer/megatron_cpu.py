"""Megatron-core on a machine without CUDA.

Megatron asks for CUDA in three ways: through `torch.cuda.current_device/set_device/synchronize`, through
`device="cuda"` and `.cuda()`, and by comparing `Tensor.type()` with "torch.cuda.*". Inside `megatron_device()` all
three answer for the CPU; with CUDA present it does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
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
        mock.patch.multiple(torch.cuda, current_device=_cpu, set_device=_nothing, synchronize=_nothing),
        _CudaMeansCpu(),
    ):
        yield


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


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
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _cpu()}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
