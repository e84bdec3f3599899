"""Weight pushes in a shared folder: `v00000012/` holds `model.safetensors` and `manifest.json`.

A push is written aside and renamed, so a reader sees a whole one or none; it is announced (`shared.policy`) after
that. Checksums are of each tensor's bytes as they shall be in the end.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import WeightsError
from shared.safetensors_file import ITEM_BYTES, SAFETENSORS_NAMES, TensorSpec, write_safetensors

_MAX_HEADER_BYTES = 100 * 2**20
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor on its way into a push: its Hugging Face name and its raw little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a manifest says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    encoding: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of one push. `base_version` is None when the push stands for itself (dense)."""

    version: int
    base_version: int | None
    tensors: dict[str, TensorRecord]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(record.num_bytes for record in self.tensors.values())


def push_folder(root: Path, version: int) -> Path:
    """Where a version's push lies."""
    return root / f"v{version:08d}"


def write_push(root: Path, version: int, tensors: Iterable[TensorBytes], *, keep: int) -> tuple[Path, Manifest]:
    """Write a push and delete all but the newest `keep`.

    Raises:
        WeightsError: the folder cannot be written (full disk, permissions).
    """
    path = push_folder(root, version)
    aside = path.with_suffix(".tmp")
    records: dict[str, TensorRecord] = {}
    blobs = list(tensors)
    for tensor in blobs:
        checksum = f"crc32:{zlib.crc32(tensor.data):08x}"
        records[tensor.name] = TensorRecord(tensor.dtype, tensor.shape, "dense", len(tensor.data), checksum)
    manifest = Manifest(version, None, records)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        aside.mkdir(parents=True)
        specs = [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in blobs]
        write_safetensors(aside / WEIGHTS_FILE, specs, (tensor.data for tensor in blobs))
        (aside / MANIFEST_FILE).write_text(json.dumps(_to_json(manifest)))
        for file in aside.iterdir():
            file.chmod(0o644)
        os.rename(aside, path)
        for old in sorted(root.glob("v[0-9]*[0-9]"))[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # on a full disk the half of a push is in everybody's way
        raise WeightsError(f"weights of version {version} cannot be written to {path}: {error}") from error
    return path, manifest


def read_manifest(path: Path) -> Manifest:
    """A push's manifest. Raises WeightsError when it is missing or malformed."""
    try:
        body = json.loads((path / MANIFEST_FILE).read_text())
        tensors = {
            name: TensorRecord(item["dtype"], tuple(item["shape"]), item["encoding"], item["bytes"], item["checksum"])
            for name, item in body["tensors"].items()
        }
        return Manifest(body["version"], body["base_version"], tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"the manifest of {path} cannot be read: {error!r}") from error


def read_push(path: Path) -> Manifest:
    """Check a whole push against its manifest: names, dtypes, shapes, sizes and checksums.

    Raises:
        WeightsError: names the first tensor that is not what the manifest says.
    """
    manifest = read_manifest(path)
    file = path / WEIGHTS_FILE
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
            header_bytes = int.from_bytes(view[:8], "little")
            if header_bytes > min(_MAX_HEADER_BYTES, len(view) - 8):
                raise WeightsError(f"{file} is truncated")
            header = json.loads(view[8 : 8 + header_bytes])
            header.pop("__metadata__", None)
            if header.keys() != manifest.tensors.keys():
                names = sorted(header.keys() ^ manifest.tensors.keys())
                raise WeightsError(f"{file} and its manifest differ in tensors: {names[:3]}")
            with memoryview(view) as whole, whole[8 + header_bytes :] as body:
                for name, record in manifest.tensors.items():
                    _check_tensor(f"{file}: {name}", header[name], record, body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{file} cannot be read: {error!r}") from error
    return manifest


def _check_tensor(where: str, entry: dict[str, Any], record: TensorRecord, body: memoryview) -> None:
    if record.encoding != "dense":
        raise WeightsError(f"{where}: encoding {record.encoding!r} is unknown")
    if record.dtype not in ITEM_BYTES or entry["dtype"] != SAFETENSORS_NAMES[record.dtype]:
        raise WeightsError(f"{where}: dtype {entry['dtype']} is not the manifest's {record.dtype}")
    if tuple(entry["shape"]) != record.shape:
        raise WeightsError(f"{where}: shape {entry['shape']} is not the manifest's {list(record.shape)}")
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body) or end - start != record.num_bytes:
        raise WeightsError(f"{where}: {record.num_bytes} bytes expected at {start}, the file is too short or altered")
    with body[start:end] as data:
        checksum = f"crc32:{zlib.crc32(data):08x}"
    if checksum != record.checksum:
        raise WeightsError(f"{where}: checksum {checksum} is not the manifest's {record.checksum}")


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "base_version": manifest.base_version,
        "tensors": {
            name: {
                "dtype": record.dtype,
                "shape": list(record.shape),
                "encoding": record.encoding,
                "bytes": record.num_bytes,
                "checksum": record.checksum,
            }
            for name, record in manifest.tensors.items()
        },
    }
