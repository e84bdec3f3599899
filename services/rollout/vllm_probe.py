"""Which weights does the engine compute with? Asked of every layer after a load, and answered exactly.

The canary cannot tell in bfloat16: trainer and engine round by more than an optimizer step changes. Nor can the weights
be read back everywhere: on the CPU linear layers compute with a packed copy and drop the original. But a one-hot vector
sent through a layer gives a column of the matrix that it computes with, and exactly so, since products with 0 and 1 and
sums with 0 do not round. It has to be the pushed column, bit by bit; a layer that kept its old weights differs wherever
the update changed a value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import LinearBase

_COLUMNS = 32
"""Columns compared per matrix, a block at a random place: the cost of a forward pass over as many tokens."""


class PushedTensors:
    """The tensors of a push, of which single columns can be read."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(path.glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)

    def columns(self, name: str, start: int) -> torch.Tensor:
        """[rows, up to _COLUMNS] of a matrix from column `start`; a vector as a whole."""
        part = self._files[name].get_slice(name)
        return part[:] if len(part.get_shape()) == 1 else part[:, start : start + _COLUMNS]

    def width(self, name: str) -> int:
        """Columns of a matrix, 1 for a vector. ValueError when the push has no such tensor."""
        if name not in self._files:
            raise ValueError(f"the push has no tensor {name}: what the engine serves of it cannot be checked")
        shape = self._files[name].get_slice(name).get_shape()
        return int(shape[1]) if len(shape) == 2 else 1

    def __contains__(self, name: str) -> bool:
        return name in self._files


def check_served(model: torch.nn.Module, path: Path) -> None:
    """Compare what every layer of a vLLM model computes with to the push in the folder `path`.

    Raises:
        ValueError: names the first layer that has other values.
    """
    with ExitStack() as stack:
        pushed = PushedTensors(path, stack)
        for layer, parameter, names in _parameters(model, pushed):
            width = pushed.width(names[0])
            start = random.randrange(max(1, width - _COLUMNS + 1))
            expected = torch.cat([pushed.columns(name, start) for name in names])
            served = _served(model, layer, parameter, start, width, len(expected))
            differing = int((served.to("cpu", expected.dtype) != expected).sum())  # true for NaN too
            if differing:
                raise ValueError(
                    f"layer {layer} does not compute with the {parameter} that was pushed: {differing} of "
                    f"{expected.numel()} values that were looked at differ"
                )


def _parameters(model: torch.nn.Module, pushed: PushedTensors) -> Iterator[tuple[str, str, list[str]]]:
    """(layer, parameter, names of the pushed tensors that it is made of, in their order)."""
    merged: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for layer, module in model.named_modules():
        for parameter, _ in module.named_parameters(recurse=False):
            parent, _, last = layer.rpartition(".")
            names = [f"{parent}.{part}.{parameter}".lstrip(".") for part in merged.get(last, [last])]
            if names == ["lm_head.weight"] and names[0] not in pushed:
                names = ["model.embed_tokens.weight"]  # tied: pushed once, computed with in two layers
            yield layer, parameter, names


def _served(model: torch.nn.Module, layer: str, parameter: str, start: int, width: int, rows: int) -> torch.Tensor:
    """The values that the layer computes with: [rows, columns from `start`], or a vector [rows]."""
    module = model.get_submodule(layer)
    values: torch.Tensor = getattr(module, parameter)
    is_head = layer == "lm_head"
    if parameter == "weight" and (isinstance(module, LinearBase) or is_head):
        count = min(_COLUMNS, width)
        probe = torch.zeros(count, width, dtype=values.dtype, device=values.device)
        probe[torch.arange(count), start + torch.arange(count)] = 1
        answer = module.quant_method.apply(module, probe)[:, :rows].t()
        if is_head and not torch.equal(answer, values[:rows, start : start + count]):
            return torch.full_like(answer, torch.nan)  # a float32 head computes with the plain weight, not the packed
        return answer
    return values[:rows] if values.ndim == 1 else values[:rows, start : start + _COLUMNS]
