"""Live progress: follows the trainer's metrics file and prints a line per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Progress:
    """Prints the steps that were added since the last look."""

    def __init__(self, metrics: Path, *, steps: int) -> None:
        self._metrics = metrics
        self._steps = steps
        self._offset = 0
        self.last_step = 0

    def skip_existing(self) -> None:
        """Do not print what an earlier process of this run has written."""
        if self._metrics.exists():
            self._offset = self._metrics.stat().st_size

    def show_new(self) -> None:
        """Print all whole lines that were added."""
        if not self._metrics.exists():
            return
        size = self._metrics.stat().st_size
        if size < self._offset:
            self._offset = 0  # a resumed trainer rewrote the file without the steps after its checkpoint
        with self._metrics.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = json.loads(line)
                if record["step"] > self.last_step:
                    self.last_step = record["step"]
                    print(describe(record, self._steps), flush=True)


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
