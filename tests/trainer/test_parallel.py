"""Real ranks over gloo: the same data gives the same losses and weights after three steps as one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from services.trainer.split import Split
from tests.conftest import REPO, free_port
from tests.trainer.tiny_models import save_tiny

pytestmark = pytest.mark.engine

MODELS = {
    "llama": ("llama", True),
    "llama-untied": ("llama", False),
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "qwen3_moe": ("qwen3_moe", False),
}
TWO_RANKS = [
    ("llama", Split(tp=2)),
    ("llama", Split(pp=2)),
    ("qwen3", Split(dp=2)),
    ("llama-untied", Split(cp=2)),
    ("qwen3_moe", Split(dp=2, ep=2)),
]
FOUR_RANKS = [
    ("qwen2", Split(tp=2, dp=2)),
    ("llama", Split(pp=2, cp=2)),
    ("qwen3_moe", Split(tp=2, pp=2, ep=2)),
    ("qwen3_moe", Split(tp=2, cp=2, ep=2)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, family, tied=tied) for name, (family, tied) in MODELS.items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model trained by a single rank."""
    return launch([(name, Split()) for name in MODELS], folders, tmp_path_factory.mktemp("alone"))


def launch(cases: list[tuple[str, Split]], folders: dict[str, Path], root: Path) -> dict[str, Path]:
    """Train on as many processes as the splits have ranks, one case after the other; the results by model or case."""
    outs = {f"{name} {split}" if split.world > 1 else name: root / str(i) for i, (name, split) in enumerate(cases)}
    described = [
        {"model": str(folders[name]), "split": vars(split), "out": str(out)}
        for (name, split), out in zip(cases, outs.values())
    ]
    (root / "cases.json").write_text(json.dumps(described))
    world = cases[0][1].world
    base = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    argv = [sys.executable, "-W", "ignore", str(REPO / "tests" / "trainer" / "train_rank.py"), str(root / "cases.json")]
    ranks = [subprocess.Popen(argv, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    return outs


def measured(metrics: dict[str, float]) -> dict[str, float]:
    """Without the one that is measured on a choice of the rows, which depends on how they lie on the ranks."""
    return {name: value for name, value in metrics.items() if not name.endswith("/top_k_overlap")}


def compare(found: Path, expected: Path, start: Path) -> None:
    mine, theirs = (json.loads(path.with_suffix(".json").read_text()) for path in (expected, found))
    for one, several in zip(mine["steps"], theirs["steps"], strict=True):
        assert several["num_loss_tokens"] == one["num_loss_tokens"]
        for key in ("loss", "grad_norm"):
            assert several[key] == pytest.approx(one[key], rel=1e-4)
        assert measured(several["metrics"]) == pytest.approx(measured(one["metrics"]), rel=1e-3)
    np.testing.assert_allclose(theirs["scores"], mine["scores"], atol=1e-4)
    weights, others, before = (load_file(path / "model.safetensors") for path in (expected, found, start))
    assert weights.keys() == others.keys() == before.keys()
    for name, tensor in weights.items():
        assert (tensor - before[name]).abs().max() > 3e-4, f"{name} was not trained"
        difference = float((others[name] - tensor).abs().max())
        assert difference < 1e-4, name


@pytest.mark.parametrize("cases", [TWO_RANKS, FOUR_RANKS], ids=["two", "four"])
def test_several_ranks_train_as_one(
    cases: list[tuple[str, Split]], folders: dict[str, Path], alone: dict[str, Path], tmp_path: Path
) -> None:
    found = launch(cases, folders, tmp_path)
    for (name, _), out in zip(cases, found.values(), strict=True):
        compare(out, alone[name], folders[name])
