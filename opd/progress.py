"""Live progress: follows the trainer's metrics file and prints a line per step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class Progress:
    """Prints the steps that were added since the last look."""

    def __init__(self, metrics: Path, *, steps: int) -> None:
        self._metrics = metrics
        self._steps = steps
        self._file: BinaryIO | None = None
        self._last_time = 0.0

    def skip_existing(self) -> None:
        """Do not print what an earlier process of this run has written."""
        for record in self._new():
            self._last_time = record["time"]

    def show_new(self) -> None:
        """Print all whole lines that were added."""
        for record in self._new():
            # a resumed trainer starts a new file with the steps up to its checkpoint, which were shown before
            if record["time"] > self._last_time:
                self._last_time = record["time"]
                print(describe(record, self._steps), flush=True)

    def _new(self) -> Iterator[dict[str, Any]]:
        """Records not yielded before, then those of the file that has taken its place, if one has."""
        while True:
            if self._file is not None:
                yield from self._whole_lines(self._file)
            try:
                current = self._metrics.open("rb")
            except FileNotFoundError:
                return
            if self._file is not None:
                if os.path.sameopenfile(self._file.fileno(), current.fileno()):
                    current.close()
                    return
                self._file.close()
            self._file = current

    @staticmethod
    def _whole_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
        while True:
            start = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):
                file.seek(start)
                return
            yield json.loads(line)


def describe(record: dict[str, Any], steps: int) -> str:
    """One step as a line for people."""
    losses = "  ".join(f"{name} {values['loss']:.3f}" for name, values in sorted(record["teachers"].items()))
    accuracy = "  ".join(f"{source} {value:.2f}" for source, value in sorted(record["accuracy"].items()))
    parts = [
        f"step {record['step']:>4}/{steps}",
        f"loss {losses}",
        f"accuracy {accuracy}" if accuracy else "",
        f"queue {record['queue']['trajectories']} ({record['queue']['bytes'] / 2**20:.1f} MiB)",
        f"staleness {record['staleness']['mean']:.1f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{record['time_s']['step']:.2f} s",
    ]
    if record["dropped_stale"]:
        parts.append(f"{record['dropped_stale']} dropped as stale")
    if record["skipped"]:
        parts.append("skipped: gradient not finite")
    return "  |  ".join(part for part in parts if part)
