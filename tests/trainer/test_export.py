"""The exported student's folder: what transformers reads, how large its files are, and how much is in memory for it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from services.trainer import megatron_export
from services.trainer.megatron_export import write_hf_folder
from services.trainer.tensors import spec_of
from tests.trainer.tiny_models import save_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "m", "qwen2", tied=False, dtype=torch.bfloat16)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers loads them."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


@pytest.mark.parametrize("max_bytes", [2**31, 60_000, 1])
def test_transformers_reads_the_same_from_one_file_and_from_several(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    monkeypatch.setattr(megatron_export, "MAX_FILE_BYTES", max_bytes)
    tensors = load_file(source / "model.safetensors")
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    write_hf_folder(tmp_path / "out", source, specs, tensors.items())

    expected, found = weights_of(source), weights_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    index = tmp_path / "out" / "model.safetensors.index.json"
    if max_bytes == 2**31:
        assert list(files) == ["model.safetensors"] and not index.exists()
        return
    assert sorted(files) == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for held in files.values():
        assert len(held) == 1 or sum(spec_of("", tensor).num_bytes for tensor in held.values()) <= max_bytes
    assert len(files) == len(tensors) if max_bytes == 1 else 4 < len(files) < len(tensors)
    body = json.loads(index.read_text())
    assert body["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert body["metadata"]["total_size"] == sum(spec.num_bytes for spec in specs)


def test_one_tensor_is_in_memory_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_export, "MAX_FILE_BYTES", 300)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            alive.append(sum(tensor() is not None for tensor in made))
            tensor = torch.full((25,), float(number))
            made.append(weakref.ref(tensor.untyped_storage()))
            yield str(number), tensor
            del tensor

    specs = [spec_of(str(number), torch.empty(25)) for number in range(9)]
    write_hf_folder(tmp_path / "out", source, specs, tensors())
    assert alive == [0] * 9, "every tensor is gone before the next is made"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_a_write_that_fails_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    write_hf_folder(tmp_path / "out", source, specs, tensors.items())
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def full() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors.items())[:3]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_hf_folder(tmp_path / "out", source, specs, full())
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
