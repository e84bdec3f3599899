"""Checkpoints on disk: `step-00000020/` with one file per rank and `state.json`, written aside, synced, renamed.

`state.json` is written last and lists the size of every file; a folder without it, or whose files do not match it, is
no checkpoint and the one before it is taken.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from shared import log
from shared.errors import RunFailed

_LOG = log.get(__name__)
_STATE = "state.json"


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
                body = json.loads((path / _STATE).read_text())
                for name, size in body["files"].items():
                    if (path / name).stat().st_size != size:
                        raise ValueError(f"{name} has {(path / name).stat().st_size} bytes, not {size}")
                state = body["state"]
                return path, RunState(**{**state, "evaluations": [(v, s) for v, s in state["evaluations"]]})
            except (OSError, ValueError, KeyError, TypeError) as error:
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
            files = {file.name: file.stat().st_size for file in sorted(aside.iterdir())}
            (aside / _STATE).write_text(json.dumps({"state": asdict(state), "files": files}))
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
        for old in sorted(self._root.glob("step-*[0-9]"))[: -self._keep]:
            if old != path:
                shutil.rmtree(old)
        return path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
