"""Arrays on the wire: what is written is read back bit by bit; what lies about itself is refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared import arrays
from shared.errors import WireError

DTYPES = [arrays.INT32, arrays.FLOAT32, arrays.FLOAT16, arrays.UINT8]


def send(array: np.ndarray) -> dict:
    return msgpack.unpackb(msgpack.packb(arrays.pack(array)))


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    )
)
def test_round_trip_keeps_bits_dtype_and_shape(array: np.ndarray) -> None:
    back = arrays.unpack(send(array), dtypes=set(DTYPES), max_bytes=4096)
    assert back.dtype.str == array.dtype.str
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert not back.flags.writeable


def test_rows_of_a_strided_or_big_endian_array_arrive_in_order() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.testing.assert_array_equal(arrays.unpack(send(table.T), dtypes={"<i4"}, max_bytes=99), table.T)
    np.testing.assert_array_equal(arrays.unpack(send(table.astype(">i4")), dtypes={"<i4"}, max_bytes=99), table)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.array([1j])])
def test_types_without_a_wire_form_are_refused(array: np.ndarray) -> None:
    with pytest.raises(WireError, match="no wire form"):
        arrays.pack(array)


GOOD = {"dtype": "<i4", "shape": [2, 2], "data": b"\0" * 16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "<f8"}, "dtype"),
        ({"dtype": "O"}, "dtype"),
        ({"dtype": ["<i4"]}, "dtype"),
        ({"shape": [2, 3]}, "needs 24 bytes"),
        ({"shape": [2]}, "dimensions"),
        ({"shape": [-2, -2]}, "sizes of a shape"),
        ({"shape": [True, 4]}, "sizes of a shape"),
        ({"shape": [2.0, 2]}, "sizes of a shape"),
        ({"shape": [2**40, 2**40]}, "sizes of a shape"),
        ({"shape": [2**30, 2**30]}, "at most 64"),
        ({"shape": "22"}, "shape must be a list"),
        ({"shape": [1] * 9}, "shape must be a list"),
        ({"data": b"\0" * 15}, "found 15"),
        ({"data": "\0" * 16}, "expected bytes"),
        ({"extra": 1}, "expected a map"),
    ],
)
def test_a_value_that_lies_is_refused(change: dict, words: str) -> None:
    assert arrays.unpack(GOOD, dtypes={"<i4"}, ndim=2, max_bytes=64).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(WireError, match=words):
        arrays.unpack({**GOOD, **change}, dtypes={"<i4"}, ndim=2, max_bytes=64, name="top_ids")


def test_shape_may_leave_dimensions_free() -> None:
    assert arrays.unpack(GOOD, dtypes={"<i4"}, shape=[2, None], max_bytes=64).shape == (2, 2)
    with pytest.raises(WireError, match=r"logs: shape \[2, 2\] where \[3, 'any'\] is expected"):
        arrays.unpack(GOOD, dtypes={"<i4"}, shape=[3, None], max_bytes=64, name="logs")


@given(st.recursive(st.none() | st.integers() | st.binary() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_any_other_value_is_a_wire_error(value: object) -> None:
    for candidate in (value, {"dtype": value, "shape": value, "data": value}):
        with pytest.raises(WireError):
            arrays.unpack(candidate, dtypes={"<i4"}, max_bytes=64, ndim=1)
