"""Which model this is: a hash of the tokenizer and of the weight files' identity.

Two replicas of a teacher must agree on it, and a trajectory carries it. Weights are not read in full: names, shapes,
dtypes and offsets (the safetensors header), the size, and samples spread over each file tell models apart that
differ by training, in milliseconds for any size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ConfigError

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 64 * 2**20


def fingerprint(model: Path, tokenizer_hash: str, dtype: str) -> str:
    """32 hex digits; the dtype that the model is served in is part of it."""
    digest = hashlib.sha256(f"{tokenizer_hash} {dtype}".encode())
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.name.encode())
        _add_file(digest, file)
    return digest.hexdigest()[:32]


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    try:
        with file.open("rb") as handle:
            size = file.stat().st_size
            header_bytes = int.from_bytes(handle.read(8), "little")
            if header_bytes > min(size, _MAX_HEADER_BYTES):
                raise ConfigError(f"{file} is damaged: its header claims {header_bytes} bytes; fetch the file again")
            digest.update(f"{size} ".encode())
            digest.update(handle.read(header_bytes))
            start = 8 + header_bytes
            for sample in range(_SAMPLES):
                handle.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(handle.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
