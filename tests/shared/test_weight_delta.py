"""Changes of tensors: whatever changed arrives bit by bit, in the fewest bytes; what was altered is refused."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.weight_delta import BLOCK, WORDS, Delta, Kind, apply, encode

HEADER = 9


def payload(delta: Delta) -> bytes:
    return b"".join(part.tobytes() for part in delta.parts)


def applied(old: np.ndarray, delta: Delta) -> np.ndarray:
    target = old.copy()
    apply(target, delta.encoding, memoryview(payload(delta)))
    return target


def changed(size: int, places: list[int] | np.ndarray, dtype: str = "bfloat16") -> tuple[np.ndarray, np.ndarray]:
    """Random old elements, and the same with other values at `places`."""
    old = np.random.default_rng(size).integers(0, 2**16, size).astype(WORDS[dtype])
    new = old.copy()
    new[places] ^= 1
    return old, new


@given(st.data())
def test_any_bits_become_any_other_bits(data: st.DataObject) -> None:
    """NaN payloads, negative zeros, empty tensors, scalars: all are integers here."""
    word = data.draw(st.sampled_from([np.dtype("<u2"), np.dtype("<u4")]))
    size = data.draw(st.integers(0, 700))
    few = st.sampled_from([0, 1, 0x8000, 0x7FC1])  # equal values must occur too
    old = data.draw(hnp.arrays(word, size, elements=few))
    new = data.draw(hnp.arrays(word, size, elements=few, fill=st.just(1)))
    delta = encode(old, new)
    assert applied(old, delta).tobytes() == new.tobytes()
    assert delta.num_bytes == len(payload(delta)) <= new.nbytes
    assert (delta.encoding == "skip") == (old.tobytes() == new.tobytes())


@given(st.sets(st.integers(0, 3 * BLOCK - 1), max_size=40))
def test_any_places_over_several_blocks(places: set[int]) -> None:
    old, new = changed(3 * BLOCK, sorted(places))
    delta = encode(old, new)
    assert applied(old, delta).tobytes() == new.tobytes()


@pytest.mark.parametrize(
    ("places", "kind", "index_bytes"),
    [
        ([0], Kind.GAPS8, 1),
        ([254], Kind.GAPS8, 1),
        ([255], Kind.GAPS8, 2),  # one escape
        ([254, 510], Kind.GAPS8, 3),
        ([60_000], Kind.GAPS16, 2),
        ([65_535, 200_000], Kind.GAPS16, 2 * (2 + 1 + 2)),
        (list(range(0, BLOCK, 9)), Kind.GAPS8, -(-BLOCK // 9)),
        (list(range(0, BLOCK, 8)), Kind.BITMAP, BLOCK // 8),
        (list(range(0, BLOCK, 2)), Kind.BITMAP, BLOCK // 8),
    ],
)
def test_the_shortest_index_is_taken(places: list[int], kind: Kind, index_bytes: int) -> None:
    old, new = changed(BLOCK, places)
    delta = encode(old, new)
    assert struct.unpack("<BII", payload(delta)[:HEADER]) == (kind, len(places), index_bytes)
    assert delta.num_bytes == HEADER + index_bytes + 2 * len(places)
    assert applied(old, delta).tobytes() == new.tobytes()


def test_a_tensor_that_changed_almost_everywhere_is_dense() -> None:
    old, new = changed(BLOCK, np.arange(BLOCK - BLOCK // 20))
    assert encode(old, new).encoding == "dense"
    assert payload(encode(old, new)) == new.tobytes()


def test_one_block_of_a_sparse_tensor_may_be_dense() -> None:
    old, new = changed(2 * BLOCK, np.arange(BLOCK))
    delta = encode(old, new)
    assert delta.encoding == "sparse"
    assert delta.num_bytes == 2 * BLOCK + 2 * HEADER
    assert applied(old, delta).tobytes() == new.tobytes()


@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.01, 0.03, 0.1, 0.5])
def test_bytes_at_a_share_of_random_changes(share: float) -> None:
    """Per change 2 bytes of value and about one of index; where it is rare more, where it is common an eighth."""
    size = 4 * BLOCK
    old, new = changed(size, np.flatnonzero(np.random.default_rng(0).random(size) < share))
    changes = np.count_nonzero(old != new)
    per_change = {1e-4: 4.1, 1e-3: 4.0, 0.01: 3.1, 0.03: 3.01, 0.1: 3.01, 0.5: 2.26}[share]
    assert encode(old, new).num_bytes <= per_change * changes + 4 * HEADER


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        ("skip", b"x", "1 bytes too many"),
        ("dense", bytes(20), "20 bytes for a tensor of 600"),
        ("gzip", b"", "encoding 'gzip' is unknown"),
        ("sparse", b"", "ends within a block's header"),
        ("sparse", struct.pack("<BII", 9, 1, 1) + bytes(3), "kind of block 9"),
        ("sparse", struct.pack("<BII", Kind.SKIP, 0, 0) + b"x", "1 bytes too many"),
        ("sparse", struct.pack("<BII", Kind.GAPS8, 1, 1) + b"\0\0", "ends within a block"),
        ("sparse", struct.pack("<BII", Kind.GAPS8, 2**32 - 1, 2**32 - 1), "cannot be in a block of 300"),
        ("sparse", struct.pack("<BII", Kind.GAPS8, 0, 0), "cannot be in a block of 300"),
        ("sparse", struct.pack("<BII", Kind.GAPS16, 1, 3) + bytes(5), "cannot be in a block of 300"),
        ("sparse", struct.pack("<BII", Kind.GAPS8, 1, 2) + b"\xff\xff" + bytes(2), "do not name 1 places"),
        ("sparse", struct.pack("<BII", Kind.GAPS8, 1, 2) + b"\xff\x2d" + bytes(2), "do not name 1 places"),  # 300
        ("sparse", struct.pack("<BII", Kind.GAPS8, 1, 2) + b"\1\1" + bytes(2), "do not name 1 places"),
        ("sparse", struct.pack("<BII", Kind.GAPS16, 1, 2) + b"\x2c\x01" + bytes(2), "do not name 1 places"),  # 300
        ("sparse", struct.pack("<BII", Kind.BITMAP, 1, 38) + bytes(38) + bytes(2), "does not name 1 places"),
        ("sparse", struct.pack("<BII", Kind.BITMAP, 1, 38) + bytes(37) + b"\x10" + bytes(2), "does not name 1"),  # 300
        ("sparse", struct.pack("<BII", Kind.DENSE, 299, 0) + bytes(598), "cannot be in a block of 300"),
    ],
)
def test_what_is_no_change_of_this_tensor_is_refused(encoding: str, body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        apply(np.zeros(300, "<u2"), encoding, memoryview(body))


def test_the_last_place_of_a_block_may_change() -> None:
    target = np.zeros(300, "<u2")
    apply(target, "sparse", memoryview(struct.pack("<BII", Kind.GAPS8, 1, 2) + b"\xff\x2c" + b"\7\0"))
    assert target[299] == 7 and np.count_nonzero(target) == 1


def test_ten_thousand_altered_payloads_never_crash_and_never_pass_unseen() -> None:
    """Applied or refused with a ValueError; where applied, the checksum of the result tells a wrong one."""
    rng = random.Random(0)
    shares = (0.001, 0.02, 0.3, 1.0)
    pairs = [changed(3000, np.flatnonzero(np.random.default_rng(1).random(3000) < share)) for share in shares]
    refused = 0
    for _ in range(10_000):
        old, new = rng.choice(pairs)
        delta = encode(old, new)
        body = bytearray(payload(delta))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(min(len(body), 40) if rng.random() < 0.5 else len(body))
            body[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        target = old.copy()
        try:
            apply(target, delta.encoding, memoryview(bytes(body)))
        except ValueError:
            refused += 1
            continue
        assert (zlib.crc32(target) == zlib.crc32(new)) == (target.tobytes() == new.tobytes())
    assert 3000 < refused < 10_000
