"""The trainer's ledger: what became of each trajectory, a JSON line per event, and the audit computed from it.

A checkpoint remembers the ledger's length; a resumed trainer cuts off what came later, so that the file tells the
surviving lineage only. The other side of the books, the ids ever produced, is written by the stream itself.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from shared.errors import ConfigError

TRAINED = "trained"
DROPPED_STALE = "dropped_stale"
DEAD_LETTER = "dead_letter"
KINDS = (TRAINED, DROPPED_STALE, DEAD_LETTER)


class Ledger:
    """Append-only file of events."""

    def __init__(self, path: Path, length: int) -> None:
        """Open the ledger and cut it to `length` bytes, the length that the resumed checkpoint remembers.

        Raises:
            ConfigError: the file is shorter than that, so it is not the one that the checkpoint belongs to.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if path.stat().st_size < length:
            raise ConfigError(
                f"{path} holds {path.stat().st_size} bytes, its checkpoint remembers {length}: the ledger was altered; "
                "restore it, or start the run afresh in another run.dir"
            )
        os.truncate(path, length)
        self.counts: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        for kind, ids in _events(path):
            self.counts[kind] += len(ids)
            self._kinds.update(dict.fromkeys(ids, kind))
        self._file: IO[str] = path.open("a")

    def kind(self, trajectory_id: str) -> str | None:
        """What became of a trajectory, None when nothing is recorded."""
        return self._kinds.get(trajectory_id)

    def check_produced(self, produced: Iterable[str]) -> None:
        """Raises ConfigError when the ledger knows trajectories that the stream has never seen."""
        strange = self._kinds.keys() - set(produced)
        if strange:
            raise ConfigError(
                f"ledger and checkpoint of this run know {len(strange)} trajectories that Redis has never seen, e.g. "
                f"{min(strange)}: its data was lost or is another run's; restore it, or start afresh (opd up --fresh)"
            )

    def record(self, kind: str, ids: Sequence[str], *, step: int) -> None:
        """Append an event."""
        if ids:
            self._file.write(json.dumps({"step": step, kind: list(ids)}) + "\n")
            self.counts[kind] += len(ids)
            self._kinds.update(dict.fromkeys(ids, kind))

    def sync(self) -> int:
        """Make all events durable; returns the length to remember."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def audit(path: Path, produced: Iterable[str], queued: Iterable[str]) -> dict[str, int]:
    """Compare what was produced with what the ledger says became of it.

    Args:
        produced: ids of all trajectories ever published.
        queued: ids of those still in the stream.

    Returns:
        produced, trained, dropped_stale, dead_letter, queued, lost, trained_twice – numbers of distinct trajectories.
    """
    times: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, ids in _events(path):
        times[kind].update(ids)
    made = set(produced)
    settled = set().union(*times.values())
    waiting = set(queued) - settled
    return {
        "produced": len(made),
        **{kind: len(times[kind]) for kind in KINDS},
        "queued": len(waiting),
        "lost": len(made - settled - waiting),
        "trained_twice": sum(count > 1 for count in times[TRAINED].values()),
    }


def _events(path: Path) -> Iterable[tuple[str, list[str]]]:
    if not path.exists():
        return
    with path.open() as lines:
        for line in lines:
            event = json.loads(line)
            for kind in KINDS:
                if kind in event:
                    yield kind, event[kind]
