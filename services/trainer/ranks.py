"""How rank 0 leads the others: it names an operation and its argument, every rank runs it, rank 0 gets the result.

A call returns when every rank is done, and raises when any of them failed: a checkpoint that lacks a rank's file is
none. Only rank 0 knows the stream, the clock and the disk's layout. Messages are msgpack bytes in a broadcast tensor;
with one rank nothing is sent at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from shared import log
from shared.errors import OpdError

Operation = Callable[[Any], Any]
_STOP = "stop"
_MAX_REASON_BYTES = 1024
_LOG = log.get(__name__)
_REPORTED = (OpdError, OSError, SafetensorError)
"""What an operation raises after the collectives in it, or on every rank; anything else ends the whole group."""


class Ranks:
    """The operations that all ranks run together."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = dict(operations)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def call(self, name: str, argument: Any = None) -> Any:
        """Rank 0: run an operation on every rank and return this rank's result. `argument` must be msgpack-able.

        Raises:
            OSError: another rank failed; the message has its reason. An error of this rank is raised as it is.
        """
        self._broadcast(msgpack.packb([name, argument], use_bin_type=True))
        try:
            result = self._operations[name](argument)
        except _REPORTED as error:
            self._failures(str(error))
            raise
        failures = self._failures("")
        if failures:
            raise OSError("; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items()))
        return result

    def stop(self) -> None:
        """Rank 0: let the others return from `follow`."""
        self._broadcast(msgpack.packb([_STOP, None]))

    def follow(self) -> None:
        """Other ranks: run what rank 0 calls until it stops. What fails here is rank 0's to judge."""
        while True:
            name, argument = msgpack.unpackb(self._broadcast(None), raw=False)
            if name == _STOP:
                return
            failure = ""
            try:
                self._operations[name](argument)
            except _REPORTED as error:
                failure = str(error) or type(error).__name__
                _LOG.error("operation_failed", extra=log.fields(operation=name, reason=failure))
            self._failures(failure)

    def _failures(self, mine: str) -> dict[int, str]:
        """Rank → reason, of all ranks that failed; `mine` is empty when this one did not. Collective."""
        if dist.get_world_size() == 1:
            return {}
        text = mine.encode()[:_MAX_REASON_BYTES].ljust(_MAX_REASON_BYTES, b"\0")
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        reasons = [part.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace") for part in gathered]
        return {rank: reason for rank, reason in enumerate(reasons) if reason}

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
