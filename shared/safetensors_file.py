"""The one writer of safetensors files: pushes, checkpoints and exported students go through it.

The format is a length, a JSON header and the tensors' bytes. The library's own writer wants all tensors in memory at
once; this one asks for the bytes of one after the other, and lets other threads run while they go to the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file's header says of a tensor; `dtype` is a key of `ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_safetensors(file: Path, specs: Sequence[TensorSpec], data: Iterable[bytes | memoryview]) -> None:
    """Write the tensors of `specs` in their order; `data` yields the little-endian bytes of each.

    Nothing of `data` is held while the next item is asked for. Tensors lie one behind the other: put those of wide
    types first, or a reader could not map them.

    Raises:
        OSError: the disk is full or the folder cannot be written.
        ValueError: `data` has other sizes than `specs` says, or a tensor would not be aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        if offset % ITEM_BYTES[spec.dtype]:
            raise ValueError(f"{file}: {spec.name} would begin at byte {offset}, unaligned for {spec.dtype}")
        end = offset + spec.num_bytes
        entry = {"dtype": SAFETENSORS_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        header[spec.name] = entry
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    items = iter(data)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for spec in specs:
            item = next(items, b"")
            if len(item) != spec.num_bytes:
                raise ValueError(f"{file}: {spec.name} came with {len(item)} bytes, not {spec.num_bytes}")
            out.write(item)
            del item  # before the next one is made
