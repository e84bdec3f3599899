"""What the benchmark found: lines with a target or without, as a table for people and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """One number.

    Attributes:
        at_least, at_most: its target; at most one of them is given.
    """

    section: str
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def verdict(self) -> str:
        """PASS, MISS, or nothing where there is no target. NaN is a miss."""
        if self.at_least is not None:
            return "PASS" if self.value >= self.at_least else "MISS"
        if self.at_most is not None:
            return "PASS" if self.value <= self.at_most else "MISS"
        return ""

    @property
    def target(self) -> str:
        """The target as text."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"


def table(lines: Iterable[Line]) -> str:
    """One row a line, the columns aligned."""
    rows = [(line.section, line.name, _number(line.value), line.unit, line.target, line.verdict) for line in lines]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(6)]
    texts = []
    for section, name, value, unit, target, verdict in rows:
        cells = [section.ljust(widths[0]), name.ljust(widths[1]), value.rjust(widths[2]), unit.ljust(widths[3])]
        texts.append("  ".join([*cells, target.ljust(widths[4]), verdict]).rstrip())
    return "\n".join(texts)


def missed(lines: Iterable[Line]) -> list[Line]:
    """The lines whose target was not met."""
    return [line for line in lines if line.verdict == "MISS"]


def write(
    path: Path, lines: Iterable[Line], settings: dict[str, Any], machine: dict[str, Any], notes: list[str]
) -> None:
    """The whole run as JSON."""
    document = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "settings": settings,
        "notes": notes,
        "lines": [asdict(line) | {"verdict": line.verdict} for line in lines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the numbers depend on: the processor, its cores, and how busy they are before anything is measured."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [text.partition(":")[2].strip() for text in cpuinfo.read_text().splitlines() if "model name" in text]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
