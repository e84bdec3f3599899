"""`python -m benchmarks.scoring`: the scoring plane measured against its targets (issue 3, "Measured").

Prints a table, writes runs/bench/scoring.json, and ends with status 1 when a target is missed. About thirteen minutes
on two cores; `--only serve,gateway` measures parts. Every other number than a ratio depends on the machine, and on what
else runs on it: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import replicas, report, serve, smollm2, through
from benchmarks.models import bench_model
from benchmarks.report import Line
from benchmarks.servers import EngineSettings
from shared.errors import run_main

SECTIONS = ("serve", "gateway", "replicas", "router", "smollm2")
_FOLDER = Path("runs/bench")
_SMOLLM2 = Path("models/smollm2-135m")
_IDLE_LOAD = 0.5
_BUSY = "The machine was busy before anything was measured (load {load_before} on {cores} cores): ratios suffer."


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write; exits with 1 on a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument("--only", type=_sections, default=SECTIONS, help=f"some of {','.join(SECTIONS)}")
    sections = parser.parse_args(argv).only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with their contexts
    settings = EngineSettings(model=bench_model(_FOLDER / "model"), threads=len(os.sched_getaffinity(0)))
    lines: list[Line] = []
    machine = report.machine()
    notes = [_BUSY.format(**machine)] if machine["load_before"] > _IDLE_LOAD else []
    for section in sections:
        print(f"measuring: {section}", file=sys.stderr, flush=True)
        found, remarks = _measure(section, settings)
        lines += found
        notes += remarks
    report.write(_FOLDER / "scoring.json", lines, asdict(settings) | {"model": str(settings.model)}, machine, notes)
    print(report.table(lines))
    for note in notes:
        print(note)
    missed = report.missed(lines)
    print(f"{len(missed)} of {sum(bool(line.verdict) for line in lines)} targets missed; {_FOLDER / 'scoring.json'}")
    sys.exit(1 if missed else 0)


def _measure(section: str, settings: EngineSettings) -> tuple[list[Line], list[str]]:
    logs = _FOLDER / "logs"
    match section:
        case "serve":
            return serve.run(settings, logs), []
        case "gateway":
            return through.run_gateway(settings, logs), []
        case "replicas":
            return replicas.run(settings, logs), []
        case "router":
            return through.run_router(settings, logs)
        case _:
            return smollm2.run(settings, logs, _SMOLLM2), []


def _sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known sections are {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    run_main(main)
