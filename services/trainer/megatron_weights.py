"""Weights between a Hugging Face folder and the ranks: each rank reads its slices, rank 0 gathers one tensor at a time.

At load every rank turns its parameters back and compares with what it read, bit by bit, and the folder's tensors
with those that the model must have: a conversion that would not survive the way back stops the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from transformers import PretrainedConfig

from services.trainer import megatron_parallel as ranks
from services.trainer.megatron_families import num_experts
from services.trainer.megatron_names import Source, all_hf_names, merge, piece, pieces, source_of
from services.trainer.tensors import dtype_name
from shared.errors import ConfigError
from shared.safetensors_file import TensorSpec


@dataclass(frozen=True)
class _Piece:
    """What this rank has of a Hugging Face tensor: piece `index` of a parameter."""

    parameter: torch.Tensor
    source: Source
    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """What some rank has of a Hugging Face tensor; parts of several ranks lie one behind the other along `dim`."""

    rank: int
    dim: int
    shape: tuple[int, ...]


class Weights:
    """This rank's parameters and where they belong in the Hugging Face model."""

    def __init__(self, gpt: torch.nn.Module, config: PretrainedConfig) -> None:
        """Parallel state must be initialised; all ranks must make one at the same time."""
        self._config = config
        self._layout = layout = ranks.layout()
        first_layer = gpt.decoder.layers[0].layer_number - 1
        first_expert = num_experts(config) // layout["ep"] * layout["ep_rank"]
        self._parameters = [
            (parameter, source_of(name, config, first_layer=first_layer, first_expert=first_expert))
            for name, parameter in gpt.named_parameters()
        ]
        self._mine = dict(self._pieces())
        self._plan: dict[str, list[_Part]] = {}
        described = _gather_json([[name, mine.source.dim, mine.shape] for name, mine in self._mine.items()])
        for rank, parts in enumerate(described):
            for name, dim, shape in parts:
                self._plan.setdefault(name, []).append(_Part(rank, dim or 0, tuple(shape)))

    def load(self, model_path: Path) -> None:
        """Fill the parameters from the folder's safetensors; only this rank's slices are read.

        Raises:
            ConfigError: the folder's tensors are not those of the model, or would not survive the way back.
        """
        with ExitStack() as stack, torch.no_grad():
            files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(model_path.glob("*.safetensors"))]
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no dict
            _check_names(set(where), self._config, model_path)
            for parameter, source in self._parameters:
                parts = [
                    self._slice(where[name].get_slice(name), source, parameter).to(parameter.dtype)
                    for name in source.hf_names
                ]
                merged = merge(source, parts, self._config, len(parameter))
                if merged.shape != parameter.shape:
                    raise ConfigError(
                        f"student.model: {model_path}: {source.hf_names[0]} has another shape than config.json says"
                    )
                parameter.copy_(merged)
                back = pieces(source, parameter, self._config, self._num_real(parameter))
                if not all(torch.equal(mine.cpu(), part) for mine, part in zip(back, parts)):
                    raise ConfigError(
                        f"student.model: {model_path}: {source.hf_names[0]} does not survive the conversion and back; "
                        "this is a fault of the trainer"
                    )

    def specs(self) -> list[TensorSpec]:
        """All Hugging Face tensors, in the order in which `export` yields them."""
        dtype = dtype_name(self._parameters[0][0].dtype)
        return [TensorSpec(name, dtype, _whole_shape(parts)) for name, parts in self._plan.items()]

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 all Hugging Face tensors, on its CPU, one after the other; nothing elsewhere, but all must call it.

        A tied embedding is there once, under its embedding's name. No rank holds more than its own weights, one
        gathered tensor and a part of one: drop a tensor before asking for the next.
        """
        for name, parts in self._plan.items():
            if self._layout["rank"]:
                if name in self._mine:
                    dist.send(self._piece(name).contiguous(), 0)
            else:
                yield name, self._gathered(name, parts)

    def _gathered(self, name: str, parts: list[_Part]) -> torch.Tensor:
        """A whole tensor on the CPU of rank 0, the only one that calls it."""
        whole = torch.empty(_whole_shape(parts), dtype=self._parameters[0][0].dtype, device="cpu")
        start = 0
        for part in parts:
            if part.rank:
                received = self._empty(part.shape)
                dist.recv(received, part.rank)
            else:
                received = self._piece(name)
            whole.narrow(part.dim, start, part.shape[part.dim]).copy_(received)
            start += part.shape[part.dim]
        return whole

    def _piece(self, name: str) -> torch.Tensor:
        """This rank's part of a tensor, made when it is needed: interleaved heads are copied for it."""
        mine = self._mine[name]
        return piece(mine.source, mine.parameter, self._config, self._num_real(mine.parameter), mine.index).detach()

    def _pieces(self) -> Iterator[tuple[str, _Piece]]:
        """What this rank contributes to an export, by name: of several copies of a weight the first rank's."""
        for parameter, source in self._parameters:
            if not self._is_first_copy(source):
                continue
            parts = pieces(source, parameter, self._config, self._num_real(parameter))
            for index, (name, part) in enumerate(zip(source.hf_names, parts)):
                if len(part):  # a rank may hold nothing but padding of the vocabulary
                    yield name, _Piece(parameter, source, index, tuple(part.shape))

    def _is_first_copy(self, source: Source) -> bool:
        if source.expert:
            return parallel_state.get_expert_data_parallel_rank() == 0
        layout = self._layout
        first = layout["cp_rank"] == layout["dp_rank"] == 0 and (source.dim is not None or layout["tp_rank"] == 0)
        return first and not source.copy

    def _slice(self, stored: Any, source: Source, parameter: torch.Tensor) -> torch.Tensor:
        if source.dim is None:
            return stored[:]
        rank, tp = self._layout["tp_rank"], self._layout["tp"]
        size = stored.get_shape()[source.dim]
        step = len(parameter) if source.vocabulary else size // tp
        part = slice(min(rank * step, size), min((rank + 1) * step, size))
        return stored[part] if source.dim == 0 else stored[:, part]

    def _num_real(self, parameter: torch.Tensor) -> int:
        """Rows of this rank's part of the vocabulary that are tokens (of no meaning for other parameters)."""
        size = len(parameter)
        return max(0, min(size, int(self._config.vocab_size) - self._layout["tp_rank"] * size))

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        first = self._parameters[0][0]
        return torch.empty(shape, dtype=first.dtype, device=first.device)


def _whole_shape(parts: list[_Part]) -> tuple[int, ...]:
    dim, first = parts[0].dim, parts[0].shape
    return (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])


def _check_names(found: set[str], config: PretrainedConfig, model_path: Path) -> None:
    wanted = all_hf_names(config)
    extra = {name for name in found - wanted if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        extra.discard("lm_head.weight")  # some folders have the tied head a second time
    for names, words in ((wanted - found, "lacks"), (extra, "has, and the trainer does not know,")):
        if names:
            raise ConfigError(
                f"student.model: {model_path} {words} {min(names)}"
                + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
            )


def _gather_json(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    world = dist.get_world_size()
    if world == 1:
        return [json.loads(json.dumps(value))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    longest = int(max(sizes))
    padded = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(padded, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(padded, sizes)]
