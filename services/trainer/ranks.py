"""How rank 0 leads the others: it names an operation and its argument, every rank runs it, rank 0 gets the result.

Only rank 0 knows the stream, the clock and the disk's layout. Messages are msgpack bytes in a broadcast tensor; with
one rank nothing is sent at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist

Operation = Callable[[Any], Any]
_STOP = "stop"


class Ranks:
    """The operations that all ranks run together."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = dict(operations)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def call(self, name: str, argument: Any = None) -> Any:
        """Rank 0: run an operation on every rank and return this rank's result. `argument` must be msgpack-able."""
        self._broadcast(msgpack.packb([name, argument], use_bin_type=True))
        return self._operations[name](argument)

    def stop(self) -> None:
        """Rank 0: let the others return from `follow`."""
        self._broadcast(msgpack.packb([_STOP, None]))

    def follow(self) -> None:
        """Other ranks: run what rank 0 calls until it stops."""
        while True:
            name, argument = msgpack.unpackb(self._broadcast(None), raw=False)
            if name == _STOP:
                return
            self._operations[name](argument)

    def _broadcast(self, message: bytes | None) -> bytes:
        if dist.get_world_size() == 1:
            return message or b""
        size = torch.tensor([len(message or b"")], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        if message is None:
            body = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        else:
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        dist.broadcast(body, src=0)
        return body.cpu().numpy().tobytes()
