"""A folder that plain transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
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
