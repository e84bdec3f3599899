"""One rank's training state as safetensors and JSON: nothing in a checkpoint can run code when it is read.

Per parameter the distributed optimizer holds a shard of float32 main weights and Adam's two moments; they are saved
under "<parameter>/param", "/exp_avg", "/exp_avg_sq" and "/step". The weights of the model follow from the main weights,
so they are not saved a second time. A run resumed with `load_rank_state` continues bit by bit on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from services.trainer.megatron_cpu import megatron_device
from services.trainer.megatron_model import PolicyModel
from shared.errors import ConfigError

FORMAT = 2
_SETTINGS = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "data_parallel": "dp",
    "expert_parallel": "ep",
}


def save_rank_state(model: PolicyModel, path: Path) -> None:
    """Write `rank-NNNNN.safetensors` and `.json` of this rank into the folder `path`, flushed to disk.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    tensors, meta = rank_state(model)
    weights, description = _files(path, model.layout["rank"])
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, weights)
    description.write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
    for file in (weights, description):
        os.chmod(file, 0o644)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def load_rank_state(model: PolicyModel, path: Path) -> None:
    """Bring `model` to the state that `save_rank_state` wrote.

    Raises:
        ConfigError: no checkpoint of this rank, a damaged one, or one of another model or split over ranks.
    """
    weights, description = _files(path, model.layout["rank"])
    if not (weights.is_file() and description.is_file()):
        raise ConfigError(f"checkpoint {path} has no state of rank {model.layout['rank']}; resume with as many ranks")
    try:
        meta = json.loads(description.read_text())
        tensors = load_file(weights)
    except (ValueError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {weights} is damaged ({error}); resume from an older one") from error
    restore_rank_state(model, tensors, meta, where=str(path))


def rank_state(model: PolicyModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Named tensors on the CPU, and what JSON can hold."""
    tensors = {"rng/torch": torch.get_rng_state()}
    groups: list[dict[str, Any]] = []
    for optimizer in _distributed(model):
        groups.extend({"step": group["step"]} if "step" in group else {} for group in optimizer.optimizer.param_groups)
        for name, state in _optimizer_states(model, optimizer):
            for key, tensor in state.items():
                tensors[f"{name}/{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    meta = {
        "format": FORMAT,
        "num_updates": model.num_updates,
        "layout": model.layout,
        "dtype": str(model.dtype),
        "groups": groups,
    }
    return tensors, meta


def restore_rank_state(
    model: PolicyModel, tensors: dict[str, torch.Tensor], meta: dict[str, Any], *, where: str
) -> None:
    """Inverse of `rank_state`; `where` names the checkpoint in errors.

    Raises:
        ConfigError: the state is of another format, split, dtype or model.
    """
    for key, value in {"format": FORMAT, "dtype": str(model.dtype)}.items():
        if meta.get(key) != value:
            raise ConfigError(f"checkpoint {where} has {key} {meta.get(key)}, this run {value}")
    _check_layout(model.layout, meta["layout"], where)
    _check_parameters(model, tensors, where)
    groups = iter(meta["groups"])
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit("/", 1)
        saved.setdefault(name, {})[kind] = tensor
    with megatron_device(), torch.no_grad():
        for optimizer in _distributed(model):
            for group in optimizer.optimizer.param_groups:
                group.update(next(groups))
            for name, main in _main_parameters(model, optimizer):
                state = dict(saved[name])
                main.copy_(state.pop("param"))
                optimizer.optimizer.state[main] = {key: tensor.to(main.device) for key, tensor in state.items()}
            optimizer._copy_main_params_to_model_params()
        model.module.start_param_sync(force_sync=True)
    torch.set_rng_state(tensors["rng/torch"])
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    model.num_updates = meta["num_updates"]


def _check_layout(mine: dict[str, int], saved: dict[str, int], where: str) -> None:
    differing = [setting for setting, size in _SETTINGS.items() if saved.get(size) != mine[size]]
    if differing:
        there, here = (
            ", ".join(f"trainer.{setting}={layout.get(_SETTINGS[setting])}" for setting in differing)
            for layout in (saved, mine)
        )
        raise ConfigError(
            f"checkpoint {where} was written with {there}, this run has {here}: resume with the sizes of the "
            "checkpoint, or start a new run from an exported student"
        )


def _check_parameters(model: PolicyModel, tensors: dict[str, torch.Tensor], where: str) -> None:
    """The checkpoint holds exactly this rank's parameters, in the same shapes."""
    mine = {
        name: state["param"].shape
        for optimizer in _distributed(model)
        for name, state in _optimizer_states(model, optimizer)
    }
    theirs = {key.removesuffix("/param"): t.shape for key, t in tensors.items() if key.endswith("/param")}
    if mine != theirs:
        odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise ConfigError(f"checkpoint {where} is of another model: {odd[0]} and {len(odd) - 1} more do not match")


def _distributed(model: PolicyModel) -> list[DistributedOptimizer]:
    return list(model.optimizer.chained_optimizers)


def _main_parameters(model: PolicyModel, optimizer: DistributedOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and this rank's shard of float32 main weights, of every parameter that it has a shard of."""
    for name, parameter in model.gpt.named_parameters():
        if parameter in optimizer.model_param_group_index_map:
            group, order = optimizer.model_param_group_index_map[parameter]
            yield name, optimizer.optimizer.param_groups[group]["params"][order]


def _optimizer_states(
    model: PolicyModel, optimizer: DistributedOptimizer
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Name, and {"param", "exp_avg", "exp_avg_sq", "step"} as far as a step has made them already."""
    for name, main in _main_parameters(model, optimizer):
        state = {k: v for k, v in optimizer.optimizer.state[main].items() if isinstance(v, torch.Tensor)}
        yield name, {"param": main, **state}


def _files(path: Path, rank: int) -> tuple[Path, Path]:
    return path / f"rank-{rank:05d}.safetensors", path / f"rank-{rank:05d}.json"
