"""Prefix affinity bounded by load: requests with one prompt meet at one replica, unless it is too busy.

Rendezvous hashing (Thaler and Ravishankar, 1998): every gateway ranks the replicas for a key by a hash of both, so that
gateways agree without a word between them, and a replica that joins or leaves moves only its own share of the keys.
The bound on the load follows Mirrokni, Thorup and Zadimoghaddam (2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from services.gateway.replica import Replica

BOUND = 1.25
"""A replica so many times busier than the mean takes no more of its groups; the next in their order does."""

FREE_TOKENS = 2048
"""A replica with less outstanding is not busy, whatever the mean is: its engine reads as much in one step."""


def rank(key: str, replicas: Collection[Replica]) -> list[Replica]:
    """The replicas in the key's own order, the same at every gateway."""
    return sorted(replicas, key=lambda replica: _weight(key, replica.name))


def home(key: str, replicas: Collection[Replica]) -> Replica | None:
    """The first of the key's replicas within the bound; None where failures weigh on all of them."""
    mean = sum(replica.outstanding_tokens for replica in replicas) / len(replicas)
    bound = max(BOUND * mean, FREE_TOKENS)
    # load() has the debt of failures, the mean has not: who fails must not raise the bound for itself
    return next((replica for replica in rank(key, replicas) if replica.load() <= bound), None)


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{key}\n{name}".encode(), digest_size=8).digest()
