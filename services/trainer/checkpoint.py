"""Checkpoints on disk: `step-00000020/` with one file per rank and `state.json`, written aside, synced, renamed.

`state.json` is written last and holds the size and CRC-32 of every file, and its own CRC-32; a folder without it, or
whose bytes do not match it, is no checkpoint and the one before it is taken.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from shared import log
from shared.errors import RunFailed

_LOG = log.get(__name__)
_STATE = "state.json"
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class RunState:
    """Where the run stands besides the model's and optimizer's own state.

    Attributes:
        step: optimizer steps taken.
        version: policy version that was current.
        ledger_length: bytes of the ledger that belong to this lineage.
        evaluations: (policy version, step) of every evaluation asked for.
        config: the trainer's part of the run's configuration; a resumed run must agree with it (`shared.resume`).
    """

    step: int = 0
    version: int = 0
    ledger_length: int = 0
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest whole checkpoint, None when there is none; broken ones are named in a warning."""
        for path in sorted(self._root.glob("step-*[0-9]"), reverse=True):
            try:
                return path, _read(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                _LOG.warning("checkpoint_broken", extra=log.fields(path=str(path), reason=repr(error)))
        return None

    def write(self, state: RunState, save_ranks: Callable[[Path], None]) -> Path:
        """Write a checkpoint and delete the oldest beyond `keep`.

        Args:
            save_ranks: lets every rank write its files into the folder that it is given.

        Raises:
            RunFailed: the disk is full or not writable; the last good checkpoint stays.
        """
        path = self._root / f"step-{state.step:08d}"
        aside = path.with_suffix(".tmp")
        try:
            for left_over in self._root.glob("*.tmp"):
                shutil.rmtree(left_over)
            aside.mkdir(parents=True)
            save_ranks(aside)
            files = {file.name: _fingerprint(file) for file in sorted(aside.iterdir())}
            body = {"state": asdict(state), "files": files}
            (aside / _STATE).write_text(json.dumps({**body, "crc32": _crc32_of(body)}))
            for file in aside.iterdir():
                _sync(file)
            _sync(aside)
            if path.exists():
                shutil.rmtree(path)  # a broken one of the same step, see `latest`
            os.rename(aside, path)
            _sync(self._root)
        except (OSError, safetensors.SafetensorError) as error:  # the latter is how safetensors reports a full disk
            shutil.rmtree(aside, ignore_errors=True)
            raise RunFailed(
                f"checkpoint {path} cannot be written: {error}; make room or change run.dir, then start again to resume"
            ) from error
        self._tidy(path)
        return path

    def _tidy(self, newest: Path) -> None:
        """Keep the `keep` checkpoints up to the newest; later steps are of a lineage whose checkpoint is damaged."""
        found = sorted(self._root.glob("step-*[0-9]"))
        lineage = [path for path in found if path <= newest]
        for path in {*found} - {*lineage[-self._keep :]}:
            shutil.rmtree(path)


def _read(path: Path) -> RunState:
    """The state of one checkpoint. An error of reading or of what was read when it is not whole."""
    body = json.loads((path / _STATE).read_text())
    if body.pop("crc32") != _crc32_of(body):
        raise ValueError(f"{_STATE} was altered")
    for name, written in body["files"].items():
        if (found := _fingerprint(path / name)) != written:
            raise ValueError(f"{name} has {found}, not {written}")
    state = body["state"]
    return RunState(**{**state, "evaluations": [(v, s) for v, s in state["evaluations"]]})


def _fingerprint(file: Path) -> dict[str, int | str]:
    """What `state.json` says of a file; reads all of it."""
    crc = 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return {"bytes": file.stat().st_size, "crc32": f"{crc:08x}"}


def _crc32_of(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
