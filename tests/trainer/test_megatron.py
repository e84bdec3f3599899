"""The Megatron side on a real CPU engine: equal to transformers, to itself in other shapes, and to itself resumed."""

from __future__ import annotations

import json
import shutil
import stat
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer import megatron_gpt
from services.trainer.batch import Microbatch, pack
from services.trainer.loss import DistillationLoss
from services.trainer.megatron_checkpoint import load_rank_state, save_rank_state
from services.trainer.megatron_model import OptimizerSettings, PolicyModel
from services.trainer.split import Split
from shared.errors import ConfigError
from tests.trainer.tiny_models import VOCAB, reference_logprobs, save_tiny
from tests.trainer.training_samples import make_samples

pytestmark = pytest.mark.engine

MODELS = {
    "llama": ("llama", True),
    "llama-untied": ("llama", False),
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3_moe", False),
}
SETTINGS = OptimizerSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=1.0, warmup_steps=2)
LOSS = DistillationLoss(["a", "b"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, family, tied=tied) for name, (family, tied) in MODELS.items()}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def build(folder: Path, dtype: str = "float32", **changes: Any) -> PolicyModel:
    return PolicyModel.build(folder, dtype=dtype, split=Split(), optim=replace(SETTINGS, **changes), seed=0)


def gradients(model: PolicyModel, batches: list[Microbatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and the gradient of the token mean."""
    result = model.train_step(batches, LOSS)
    return result.loss, {name: p.main_grad.clone() for name, p in model.gpt.named_parameters()}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logprobs_equal_transformers_and_weights_survive_the_round_trip(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = build(folders[name])
    ids = np.random.default_rng(0).integers(0, VOCAB, 50).tolist()
    expected = reference_logprobs(folders[name], ids).numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(model.score(ids), expected, atol=1e-4)

    model.save_hf(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[name], tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    np.testing.assert_allclose(reference_logprobs(tmp_path / "out", ids), expected, atol=0)
    names = {f.name for f in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "out").iterdir()} == {0o644}


def test_an_export_holds_one_tensor_at_a_time(folders: dict[str, Path]) -> None:
    model = build(folders["qwen3_moe"])
    made: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []
    for _, tensor in model.export():
        made.append(weakref.ref(tensor.untyped_storage()))
        del tensor
        alive.append(sum(storage() is not None for storage in made))
    assert len(alive) == len(model.weights.specs()) > 50
    assert max(alive) == 0, "what it yields is neither kept nor a view of the model"


def test_llama3_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = save_tiny(tmp_path / "m", "llama", tied=True, rope_parameters=rope)
    ids = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
    np.testing.assert_allclose(build(folder).score(ids), reference_logprobs(folder, ids).numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'yarn'"),
        ({"attention_bias": True}, "bias"),
    ],
)
def test_models_that_would_be_loaded_wrongly_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "llama", tied=True, **changes)
    with pytest.raises(ConfigError, match=words):
        build(folder)


def test_tensors_that_are_missing_or_unknown_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    for change, words in (("drop", "lacks model.norm.weight"), ("add", "does not know, model.layers.0.extra.weight")):
        folder = tmp_path / change
        shutil.copytree(folders["llama"], folder)
        tensors = load_file(folder / "model.safetensors")
        if change == "drop":
            del tensors["model.norm.weight"]
        else:
            tensors["model.layers.0.extra.weight"] = torch.zeros(2)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=words):
            build(folder)


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("llama", Split(tp=4), "tensor_parallel: 4 does not divide the student's num_key_value_heads, 2"),
        ("llama", Split(pp=3), "pipeline_parallel: 3 does not divide the student's num_hidden_layers, 4"),
        ("llama", Split(cp=4), "context_parallel: 4 does not divide the 2 key-value heads"),
        ("llama", Split(dp=2, ep=2), "the student has no experts"),
        ("qwen3_moe", Split(dp=3, ep=3), "expert_parallel: 3 does not divide the student's num_experts, 4"),
        ("qwen3_moe", Split(tp=2), "with experts and trainer.tensor_parallel=2 it must be at least 2"),
        ("llama", Split(dp=2), "data_parallel 2 are 2 ranks, but 1 was started; give torchrun --nproc-per-node=2"),
    ],
)
def test_splits_that_cannot_be_are_refused_by_name(
    name: str, split: Split, words: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        PolicyModel.build(folders[name], dtype="float32", split=split, optim=SETTINGS, seed=0)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="'gpt2' model"):
        build(tmp_path)


def test_loss_and_gradient_do_not_depend_on_the_packing(folders: dict[str, Path]) -> None:
    samples = make_samples(14)
    model = build(folders["llama"], lr=0.0, weight_decay=0.0)
    loss, gradient = gradients(model, pack(samples, 4096))
    for limit in (1, 64, 150):
        batches = pack(samples, limit)
        other_loss, other = gradients(model, batches[::-1])
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name in gradient:
            assert torch.allclose(gradient[name], other[name], rtol=1e-4, atol=1e-5 * float(gradient[name].abs().max()))


def test_long_sequences_attend_as_short_ones_do(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = pack(make_samples(8), 4096)
    loss, gradient = gradients(build(folders["llama"]), batches)
    monkeypatch.setattr(megatron_gpt, "LONGEST_WRITTEN_OUT", 12)
    other_loss, other = gradients(build(folders["llama"]), batches)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name in gradient:
        assert torch.allclose(gradient[name], other[name], rtol=1e-4, atol=1e-5 * float(gradient[name].abs().max()))


def test_neighbours_in_a_packed_row_never_touch_each_other(folders: dict[str, Path]) -> None:
    model = build(folders["qwen3"], lr=0.0, weight_decay=0.0)
    samples = make_samples(6)
    silent = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples]
    poisoned = [replace(s, token_ids=(s.token_ids + 100) % VOCAB) for s in silent]
    alone = gradients(model, pack([samples[2]], 4096))
    for neighbours in (silent, poisoned):
        packed = pack([*neighbours[:2], samples[2], *neighbours[3:]], 4096)
        assert len(packed) == 1
        loss, gradient = gradients(model, packed)
        assert loss == pytest.approx(alone[0], rel=1e-6)
        for name in gradient:
            scale = float(alone[1][name].abs().max())
            assert torch.allclose(gradient[name], alone[1][name], rtol=1e-4, atol=1e-5 * scale)


def test_an_empty_microbatch_changes_nothing_and_an_empty_batch_is_skipped(folders: dict[str, Path]) -> None:
    model = build(folders["llama"])
    batches = pack(make_samples(4), 64)
    loss, gradient = gradients(build(folders["llama"]), batches)
    other_loss, other = gradients(model, [*batches, batches[0].without_rows()])
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert all(torch.allclose(gradient[name], other[name], atol=1e-7) for name in gradient)
    weights = dict(model.export())
    result = model.train_step([b.without_rows() for b in batches], LOSS)
    assert result.skipped and result.loss == 0.0 and result.num_loss_tokens == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.export())


def test_a_gradient_that_is_not_finite_is_skipped_and_reported(folders: dict[str, Path]) -> None:
    model = build(folders["llama"])
    batches = pack(make_samples(4), 4096)
    weights = dict(model.export())
    bad = replace(batches[0], coefficient=batches[0].coefficient * float("inf"))
    result = model.train_step([bad], LOSS)
    assert result.skipped and not np.isfinite(result.grad_norm)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.export())
    assert not model.train_step(batches, LOSS).skipped
    assert model.num_updates == 1


def test_learning_rate_warms_up_and_the_norm_is_clipped(folders: dict[str, Path]) -> None:
    model = build(folders["llama"], warmup_steps=4, grad_clip=1e-3)
    batches = pack(make_samples(4), 4096)
    results = [model.train_step(batches, LOSS) for _ in range(5)]
    assert [r.lr for r in results] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert results[0].grad_norm > 1e-3
    clipped = torch.sqrt(sum((p.main_grad**2).sum() for p in model.gpt.parameters()))
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(
    dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    batches = [pack(make_samples(6, seed), 96) for seed in range(4)]
    model = build(folders["llama"], dtype)
    for step in batches[:2]:
        model.train_step(step, LOSS)
    save_rank_state(model, tmp_path)
    straight = [model.train_step(step, LOSS) for step in batches[2:]]
    weights = dict(model.export())

    resumed = build(folders["llama"], dtype)
    load_rank_state(resumed, tmp_path)
    assert [resumed.train_step(step, LOSS) for step in batches[2:]] == straight
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.export())
    assert weights["model.embed_tokens.weight"].dtype == getattr(torch, dtype)


def test_a_checkpoint_of_something_else_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = build(folders["llama"])
    save_rank_state(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="another model"):
        load_rank_state(build(folders["qwen3"]), tmp_path / "a")
    with pytest.raises(ConfigError, match="dtype"):
        load_rank_state(build(folders["llama"], "bfloat16"), tmp_path / "a")
    meta = json.loads((tmp_path / "a" / "rank-00000.json").read_text())
    meta["layout"]["tp"] = 2
    (tmp_path / "a" / "rank-00000.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"written with trainer\.tensor_parallel=2, this run has .*=1: resume with"):
        load_rank_state(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="no state of rank 0"):
        load_rank_state(model, tmp_path / "b")
    (tmp_path / "a" / "rank-00000.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        load_rank_state(model, tmp_path / "a")


def test_training_lowers_the_loss_in_bfloat16_as_in_float32(folders: dict[str, Path]) -> None:
    batches = pack(make_samples(8), 4096)
    curves = {}
    for dtype in ("float32", "bfloat16"):
        model = build(folders["llama"], dtype)
        curves[dtype] = [model.train_step(batches, LOSS).metrics["a/loss"] for _ in range(8)]
    assert curves["float32"][-1] < 0.8 * curves["float32"][0]
    np.testing.assert_allclose(curves["bfloat16"], curves["float32"], rtol=0.05)
