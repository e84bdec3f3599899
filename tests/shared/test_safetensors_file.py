from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.safetensors_file import TensorSpec, write_safetensors


def test_a_file_reads_back_with_the_library(tmp_path: Path) -> None:
    values = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array(7.0, np.float32),
        "c": np.arange(5, dtype=np.uint8),
    }
    specs = [TensorSpec(name, str(value.dtype), value.shape) for name, value in values.items()]
    assert [spec.num_bytes for spec in specs] == [24, 4, 5]
    write_safetensors(tmp_path / "f", specs, (value.tobytes() for value in values.values()))
    found = load_file(tmp_path / "f")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []
    seen: list[int] = []

    def data() -> Iterator[memoryview]:
        for number in range(8):
            seen.append(sum(array() is not None for array in made))
            array = np.full(100, number, np.uint8)
            made.append(weakref.ref(array))
            view = array.data
            del array
            yield view
            del view

    specs = [TensorSpec(str(number), "uint8", (100,)) for number in range(8)]
    write_safetensors(tmp_path / "f", specs, data())
    assert seen == [0] * 8
    assert load_file(tmp_path / "f")["7"].tolist() == [7] * 100


@pytest.mark.parametrize(
    ("specs", "data", "said"),
    [
        ([TensorSpec("w", "float32", (2,))], [bytes(7)], "w came with 7 bytes, not 8"),
        ([TensorSpec("w", "float32", (2,))], [], "w came with 0 bytes, not 8"),
        ([TensorSpec("r", "uint8", (3,)), TensorSpec("w", "float32", (1,))], [], "w would begin at byte 3, unaligned"),
    ],
)
def test_what_would_make_a_broken_file_is_refused(
    tmp_path: Path, specs: list[TensorSpec], data: list[bytes], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        write_safetensors(tmp_path / "f", specs, data)
