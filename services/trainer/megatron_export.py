"""From Megatron's parameters back to Hugging Face tensors and folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from mbridge.core.bridge import Bridge
from safetensors.torch import save_file

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files of a model folder, beside config and weights, that a student's export takes over."""


def hf_tensors(bridge: Bridge, gpt: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All tensors by Hugging Face name, gathered over TP and PP, copied to the CPU.

    A tied embedding is there once, under its embedding's name.
    """
    parts = bridge.export_weights([gpt]) if bridge.mpu.pp_size > 1 or bridge.mpu.tp_size > 1 else _local(bridge, gpt)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in parts:
        if name not in tensors:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return list(tensors.items())


def write_hf_folder(path: Path, source: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Weights, the source's configuration with the tensors' dtype, and its tokenizer; all files mode 0644."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    for file in path.iterdir():
        os.chmod(file, 0o644)


def _local(bridge: Bridge, gpt: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The single-rank case without a collective per tensor."""
    names = bridge._weight_name_mapping_mcore_local_to_global(gpt)
    pairs: list[tuple[str, torch.Tensor]] = []
    for local, parameter in gpt.named_parameters():
        pairs.extend(zip(*bridge._weight_to_hf_format(names[local], parameter.detach())))
    return pairs
