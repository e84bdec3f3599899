"""A folder that plain transformers loads, written tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from services.trainer.tensors import bytes_of
from shared.safetensors_file import TensorSpec, write_safetensors

MAX_FILE_BYTES = 2 * 2**30
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


def write_hf_folder(
    path: Path, source: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Weights, the source's configuration with the tensors' dtype, and its tokenizer; all files mode 0644.

    Written aside and renamed: `path` is a whole folder or what it was before. Weights beyond `MAX_FILE_BYTES` go to
    several files, with the index that transformers expects.

    Args:
        specs: all tensors in the order in which `tensors` yields them; one at a time is in memory.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    aside = path.with_name(path.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write_weights(aside, specs, tensors)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = specs[0].dtype
        (aside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in SIDE_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        for file in aside.iterdir():
            os.chmod(file, 0o644)
        if path.exists():
            shutil.rmtree(path)
        os.rename(aside, path)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_weights(folder: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    parts = list(_parts(specs))
    data = _data(specs, tensors)
    where: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        write_safetensors(folder / name, part, data)
        where.update(dict.fromkeys((spec.name for spec in part), name))
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs)}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _parts(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The specs by file; a tensor that is larger than a file may be has one for itself."""
    part: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if part and size + spec.num_bytes > MAX_FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(spec)
        size += spec.num_bytes
    yield part


def _data(specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    """The tensors' bytes; nothing of one is held when the next is asked for."""
    stream = iter(tensors)
    for spec in specs:
        name, tensor = next(stream)
        if name != spec.name:
            raise ValueError(f"{name} came where {spec.name} was due")
        data = bytes_of(tensor)
        del tensor
        yield data
        del data
