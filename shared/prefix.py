"""The name of a group of requests that share a prompt: the gateway sends them to one replica, whose cache has it."""

from __future__ import annotations

import hashlib

PREFIX_HEADER = "x-prefix-key"


def prefix_key(prompt: bytes) -> str:
    """A short opaque name of a prompt.

    Args:
        prompt: its token ids as int32, little endian; or a text.
    """
    return hashlib.blake2b(prompt, digest_size=16).hexdigest()
