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
from services.trainer.megatron_names import Source, all_hf_names, merge, pieces, source_of
from shared.errors import ConfigError


@dataclass(frozen=True)
class _Piece:
    """A rank's part of a Hugging Face tensor."""

    name: str
    dim: int | None
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
        self._mine = [piece for _, piece in self._pieces()]
        self._of_all = _gather_json([[piece.name, piece.dim, piece.shape] for piece in self._mine])

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

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 all Hugging Face tensors, on its CPU, one after the other; nothing elsewhere, but all must call it.

        A tied embedding is there once, under its embedding's name. No rank holds more than its own weights and one
        gathered tensor.
        """
        mine = {piece.name: tensor.detach() for tensor, piece in self._pieces()}
        plan: dict[str, list[tuple[int, int | None, list[int]]]] = {}
        for rank, described in enumerate(self._of_all):
            for name, dim, shape in described:
                plan.setdefault(name, []).append((rank, dim, shape))
        for name, owners in plan.items():
            if self._layout["rank"]:
                if name in mine:
                    dist.send(mine[name].contiguous(), 0)
                continue
            parts = []
            for rank, _, shape in owners:
                part = mine[name] if rank == 0 else self._empty(shape)
                if rank:
                    dist.recv(part, rank)
                parts.append(part.to("cpu", copy=len(owners) == 1 and rank == 0))
            yield name, parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=owners[0][1] or 0)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, _Piece]]:
        """What this rank contributes to an export: of several copies of a weight the first rank's."""
        for parameter, source in self._parameters:
            if not self._is_first_copy(source):
                continue
            parts = pieces(source, parameter, self._config, self._num_real(parameter))
            for name, part in zip(source.hf_names, parts):
                if len(part):  # a rank may hold nothing but padding of the vocabulary
                    yield part, _Piece(name, source.dim, tuple(part.shape))

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

    def _empty(self, shape: list[int]) -> torch.Tensor:
        first = self._parameters[0][0]
        return torch.empty(shape, dtype=first.dtype, device=first.device)


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
