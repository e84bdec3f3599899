"""Arrays inside msgpack: `{"dtype": "<i4", "shape": [R, k], "data": bytes}`, checked before anything is allocated.

Row-major, little endian, always. The reader names the dtypes and the shape it expects; whatever else arrives is a
`WireError`, never a surprise later. `unpack` returns a read-only view of the received bytes: no copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from shared.errors import WireError

INT32 = "<i4"
FLOAT32 = "<f4"
FLOAT16 = "<f2"
UINT8 = "|u1"

_DTYPES = {name: np.dtype(name) for name in (INT32, FLOAT32, FLOAT16, UINT8, "<i8", "<f8")}
_MAX_NDIM = 4
_FIELDS = {"dtype", "shape", "data"}


def pack(array: np.ndarray) -> dict[str, Any]:
    """The wire form of an array; `data` is a view of the array's own memory when it is contiguous already.

    Raises:
        WireError: the dtype has no wire form (text, objects, complex numbers, …).
    """
    array = np.asarray(array)
    name = array.dtype.newbyteorder("<").str
    if name not in _DTYPES:
        raise WireError(f"arrays of dtype {array.dtype} have no wire form; use one of {', '.join(_DTYPES)}")
    contiguous = np.ascontiguousarray(array, dtype=_DTYPES[name])
    data = contiguous.reshape(-1).view(np.uint8).data if array.size else b""
    return {"dtype": name, "shape": list(array.shape), "data": data}


def is_packed(value: object) -> bool:
    """Whether a decoded value has the keys of a packed array."""
    return isinstance(value, Mapping) and set(value) == _FIELDS


def unpack(
    value: object,
    *,
    dtypes: Collection[str],
    shape: Sequence[int | None] | None = None,
    ndim: int | None = None,
    max_bytes: int,
    name: str = "array",
) -> np.ndarray:
    """The array of a wire form, as a read-only view.

    Args:
        value: what the decoder returned for the field.
        dtypes: wire names that may arrive, e.g. {"<f4", "<f2"}.
        shape: expected shape, None for a free dimension; `ndim` alone fixes only their number.
        max_bytes: upper bound of the data.
        name: the field, for error messages.

    Raises:
        WireError: anything differs from what was expected or from what the value itself declares.
    """
    if not is_packed(value):
        raise WireError(f"{name}: expected a map with dtype, shape and data, found {type(value).__name__}")
    dtype_name, dims, data = value["dtype"], value["shape"], value["data"]  # type: ignore[index]
    if not isinstance(dtype_name, str) or dtype_name not in dtypes or dtype_name not in _DTYPES:
        # only text is shown: str() of a deeply nested list raises RecursionError
        shown = repr(dtype_name[:20]) if isinstance(dtype_name, str) else type(dtype_name).__name__
        raise WireError(f"{name}: dtype {shown} where one of {sorted(dtypes)} is expected")
    _check_shape(dims, shape, ndim, name)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WireError(f"{name}: data is {type(data).__name__}, expected bytes")
    num_bytes = math.prod(dims) * _DTYPES[dtype_name].itemsize
    if num_bytes > max_bytes:
        raise WireError(f"{name}: {num_bytes} bytes, at most {max_bytes} are accepted")
    if memoryview(data).nbytes != num_bytes:
        raise WireError(f"{name}: shape {dims} of {dtype_name} needs {num_bytes} bytes, found {len(data)}")
    array = np.frombuffer(data, dtype=_DTYPES[dtype_name]).reshape(dims)
    array.flags.writeable = False
    return array


def _check_shape(dims: object, shape: Sequence[int | None] | None, ndim: int | None, name: str) -> None:
    if not isinstance(dims, list | tuple) or len(dims) > _MAX_NDIM:
        raise WireError(f"{name}: shape must be a list of at most {_MAX_NDIM} sizes")
    if not all(type(size) is int and 0 <= size < 2**31 for size in dims):
        raise WireError(f"{name}: sizes of a shape are integers from 0 to 2^31 - 1")
    if ndim is not None and len(dims) != ndim:
        raise WireError(f"{name}: {len(dims)} dimensions where {ndim} are expected")
    if shape is None:
        return
    matches = len(dims) == len(shape) and all(want in (None, have) for have, want in zip(dims, shape, strict=True))
    if not matches:
        expected = ["any" if size is None else size for size in shape]
        raise WireError(f"{name}: shape {list(dims)} where {expected} is expected")
