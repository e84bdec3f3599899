from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shared.errors import WeightsError
from shared.weights import MANIFEST_FILE, WEIGHTS_FILE, TensorBytes, push_folder, read_push, write_push


def tensors(seed: int = 0) -> list[TensorBytes]:
    rng = np.random.default_rng(seed)
    return [
        TensorBytes("model.a", "float32", (2, 3), rng.random((2, 3), np.float32).tobytes()),
        TensorBytes("model.b", "bfloat16", (5,), rng.bytes(10)),
    ]


def test_a_push_reads_back(tmp_path: Path) -> None:
    path, written = write_push(tmp_path, 3, tensors(), keep=2)
    assert path == push_folder(tmp_path, 3)
    assert read_push(path) == written
    assert written.num_bytes == 34
    assert [file.name for file in tmp_path.iterdir()] == ["v00000003"]


def test_the_newest_pushes_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 3, 10):
        write_push(tmp_path, version, tensors(version), keep=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["v00000003", "v00000010"]


def test_every_flipped_byte_of_the_tensors_is_seen(tmp_path: Path) -> None:
    path, _ = write_push(tmp_path, 1, tensors(), keep=2)
    good = (path / WEIGHTS_FILE).read_bytes()
    for offset in range(1, 35):
        bad = bytearray(good)
        bad[-offset] ^= 1
        (path / WEIGHTS_FILE).write_bytes(bad)
        with pytest.raises(WeightsError, match="checksum"):
            read_push(path)


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    path, _ = write_push(tmp_path, 1, tensors(), keep=2)
    good = (path / WEIGHTS_FILE).read_bytes()
    (path / WEIGHTS_FILE).write_bytes(good[:kept])
    with pytest.raises(WeightsError):
        read_push(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"shape": [3, 2]}, "shape"),
        ({"encoding": "sparse"}, "encoding 'sparse' is unknown"),
        ({"bytes": 23}, "23 bytes expected"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path, _ = write_push(tmp_path, 1, tensors(), keep=2)
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["tensors"]["model.a"].update(change)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=said):
        read_push(path)


def test_missing_push_and_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="manifest"):
        read_push(tmp_path / "none")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WeightsError, match="cannot be written"):
        write_push(blocked, 1, tensors(), keep=2)
