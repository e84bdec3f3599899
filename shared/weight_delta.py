"""What changed in a tensor: encoded by the trainer, applied in place by a worker (docs/protocol.md, "Weights").

Elements are compared and sent as the integers that their bits are, so NaNs and negative zeros are values like others. A
tensor is cut into blocks, small enough to stay in a core's cache, and each block says in which of five ways it is
written: the one that takes the fewest bytes, by exact count. Values are absolute, never differences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

BLOCK = 2**18
"""Elements of a block; the last one of a tensor may be shorter."""

WORDS = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2")}
"""The integers that stand for the elements of a dtype."""

_HEADER = struct.Struct("<BII")  # kind, changed elements, bytes of the index


class Kind(IntEnum):
    """How a block says which elements it changes."""

    SKIP = 0
    GAPS8 = 1
    GAPS16 = 2
    BITMAP = 3
    DENSE = 4


_GAPS = {Kind.GAPS8: np.dtype("u1"), Kind.GAPS16: np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class Delta:
    """A tensor's change. `parts`, one behind the other, are the payload; they may be views of the new tensor."""

    encoding: str
    parts: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return sum(part.nbytes for part in self.parts)


def encode(old: np.ndarray, new: np.ndarray) -> Delta:
    """The shortest way from `old` to `new`, both [N] of the same dtype out of `WORDS`.

    The encoding is "skip" (they are equal, no payload), "sparse" (blocks) or "dense" (the payload is `new`).
    """
    blocks = [_encode_block(old[start : start + BLOCK], new[start : start + BLOCK]) for start in _starts(new)]
    if all(kind is Kind.SKIP for kind, _ in blocks):
        return Delta("skip", [])
    sparse = Delta("sparse", [part for _, parts in blocks for part in parts])
    return sparse if sparse.num_bytes < new.nbytes else Delta("dense", [new])


def apply(target: np.ndarray, encoding: str, payload: memoryview) -> None:
    """Change `target`, [N] of a dtype out of `WORDS`, in place.

    Everything is checked before it is allocated or written, block by block: after an error the target may be changed in
    part. Whether the result is right is for its checksum to say.

    Raises:
        ValueError: the payload is not one for such a tensor.
    """
    if encoding == "dense":
        if len(payload) != target.nbytes:
            raise ValueError(f"{len(payload)} bytes for a tensor of {target.nbytes}")
        target[:] = np.frombuffer(payload, target.dtype)
        return
    if encoding not in ("skip", "sparse"):
        raise ValueError(f"encoding {encoding!r} is unknown")
    offset = 0
    for start in _starts(target) if encoding == "sparse" else ():
        offset = _apply_block(target[start : start + BLOCK], payload, offset)
    if offset != len(payload):
        raise ValueError(f"{len(payload) - offset} bytes too many")


def _starts(tensor: np.ndarray) -> Iterator[int]:
    return iter(range(0, len(tensor), BLOCK))


def _encode_block(old: np.ndarray, new: np.ndarray) -> tuple[Kind, list[np.ndarray]]:
    mask = old != new
    count = int(np.count_nonzero(mask))
    if not count:
        return Kind.SKIP, [_header(Kind.SKIP, 0, 0)]
    kind, index, places = _index(mask, count)
    values = new[places]
    if index.nbytes + values.nbytes >= new.nbytes:
        return Kind.DENSE, [_header(Kind.DENSE, len(new), 0), new]
    return kind, [_header(kind, count, index.nbytes), index, values]


def _index(mask: np.ndarray, count: int) -> tuple[Kind, np.ndarray, np.ndarray]:
    """The shortest index of the `count` places where `mask` is true; and what numpy selects them by."""
    bitmap_bytes = -(-len(mask) // 8)
    if count < bitmap_bytes:  # gaps take at least a byte each
        places = np.flatnonzero(mask)
        gaps = np.diff(places, prepend=-1) - 1
        sizes = {kind: _gaps_size(gaps, dtype) for kind, dtype in _GAPS.items()}
        kind = min(sizes, key=lambda kind: sizes[kind])
        if sizes[kind] < bitmap_bytes:
            return kind, _encode_gaps(gaps, _GAPS[kind]), places
    return Kind.BITMAP, np.packbits(mask, bitorder="little"), mask


def _gaps_size(gaps: np.ndarray, dtype: np.dtype) -> int:
    return dtype.itemsize * (len(gaps) + int((gaps // _escape(dtype)).sum()))


def _encode_gaps(gaps: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Unchanged elements before each changed one; the largest number stands for that many and no changed one."""
    escapes, rest = np.divmod(gaps, _escape(dtype))
    ends = np.cumsum(escapes + 1)
    encoded = np.full(int(ends[-1]), _escape(dtype), dtype)
    encoded[ends - 1] = rest
    return encoded


def _escape(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)


def _header(kind: Kind, count: int, index_bytes: int) -> np.ndarray:
    return np.frombuffer(_HEADER.pack(kind, count, index_bytes), np.uint8)


def _apply_block(target: np.ndarray, payload: memoryview, offset: int) -> int:
    """Change a block; returns where the next one begins."""
    if offset + _HEADER.size > len(payload):
        raise ValueError("the payload ends within a block's header")
    kind_number, count, index_bytes = _HEADER.unpack_from(payload, offset)
    if kind_number not in list(Kind):
        raise ValueError(f"kind of block {kind_number} is unknown")
    kind = Kind(kind_number)
    _check_sizes(kind, count, index_bytes, len(target))
    values_at = offset + _HEADER.size + index_bytes
    end = values_at + count * target.itemsize
    if end > len(payload):
        raise ValueError("the payload ends within a block")
    index = payload[offset + _HEADER.size : values_at]
    values = np.frombuffer(payload[values_at:end], target.dtype)
    if kind is Kind.DENSE:
        target[:] = values
    elif kind is Kind.BITMAP:
        target[_decode_bitmap(index, count, len(target))] = values
    elif kind is not Kind.SKIP:
        target[_decode_gaps(np.frombuffer(index, _GAPS[kind]), count, len(target))] = values
    return end


def _check_sizes(kind: Kind, count: int, index_bytes: int, size: int) -> None:
    if kind in (Kind.SKIP, Kind.DENSE):
        fits = index_bytes == 0 and count == (size if kind is Kind.DENSE else 0)
    elif kind is Kind.BITMAP:
        fits = index_bytes == -(-size // 8) and 0 < count <= size
    else:
        step = _GAPS[kind].itemsize
        fits = 0 < count <= size and index_bytes % step == 0 and count * step <= index_bytes <= size * step
    if not fits:
        raise ValueError(f"{count} changes with an index of {index_bytes} bytes cannot be in a block of {size}")


def _decode_gaps(encoded: np.ndarray, count: int, size: int) -> np.ndarray:
    """[count] strictly increasing places below `size`."""
    is_escape = encoded == _escape(encoded.dtype)
    ends = np.cumsum(encoded + np.where(is_escape, 0, 1))  # int64: cannot overflow
    if is_escape[-1] or len(encoded) - np.count_nonzero(is_escape) != count or ends[-1] > size:
        raise ValueError(f"the gaps do not name {count} places in a block of {size}")
    return ends[~is_escape] - 1


def _decode_bitmap(encoded: memoryview, count: int, size: int) -> np.ndarray:
    """[size] bool, true at `count` places."""
    bits = np.unpackbits(np.frombuffer(encoded, np.uint8), bitorder="little")
    if np.count_nonzero(bits) != count or bits[size:].any():
        raise ValueError(f"the bitmap does not name {count} places in a block of {size}")
    return bits[:size].view(bool)
