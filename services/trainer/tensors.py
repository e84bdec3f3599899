"""Tensors in the form in which files take them."""

from __future__ import annotations

import torch

from shared.safetensors_file import TensorSpec


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a file's header says of a tensor."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as configurations and file headers name it."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The little-endian bytes of a tensor on the CPU; no copy when it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
