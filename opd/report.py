"""The report of a run: computed from the ledger, the stream, the step log and the evaluations, never assumed."""

from __future__ import annotations

import json
import statistics
from typing import Any

from opd.report_html import render
from shared.config import RunConfig
from shared.keys import Keys
from shared.ledger import audit
from shared.policy import Policy
from shared.redis_client import connect
from shared.stream import TrajectoryStream


async def report_run(config: RunConfig, redis_url: str, *, wall_s: float) -> dict[str, Any]:
    """Write report.json and report.html into the run's folder and return the report."""
    client = await connect(redis_url)
    stream = TrajectoryStream(client, Keys(config.run.name))
    books = audit(config.run.dir / "ledger.jsonl", await stream.produced_ids(), await stream.waiting_ids())
    counters = await stream.counters()
    state = await Policy(client, Keys(config.run.name)).state()
    counters |= {name: int(state.get(name, 0)) for name in ("pushes", "pushed_bytes")}
    await client.aclose()
    steps = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = json.loads((config.run.dir / "evaluations.json").read_text())
    report = build(config, steps, evaluations, books, counters, wall_s)
    (config.run.dir / "report.json").write_text(json.dumps(report, indent=1))
    (config.run.dir / "report.html").write_text(render(report, steps, evaluations))
    return report


def build(
    config: RunConfig,
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    books: dict[str, int],
    counters: dict[str, int],
    wall_s: float,
) -> dict[str, Any]:
    """Assemble the report from its sources; times in seconds, KL in nats per token."""
    step_s = [record["time_s"]["step"] for record in steps]
    dense = max((record["pushed_bytes"] for record in steps), default=0)
    return {
        "config": config.model_dump(mode="json", exclude={"redis"}),
        "steps": len(steps),
        "wall_s": wall_s,
        "step_s": {"median": statistics.median(step_s), "p95": percentile(step_s, 0.95)},
        "teachers": teachers_of(config, evaluations),
        "trajectories": books,
        "prompts_failed": counters.get("prompts_failed", 0),
        "requeued": counters.get("requeued", 0),
        "lease_lost": counters.get("lease_lost", 0),
        "skipped_steps": sum(record["skipped"] for record in steps),
        "weights": {
            "versions": counters["pushes"],
            "bytes_dense": dense * counters["pushes"],
            "bytes_pushed": counters["pushed_bytes"],
        },
        "max_staleness": max((record["staleness"]["max"] for record in steps), default=0),
        "cross_accuracy": _first(evaluations)["teacher_accuracy"],
    }


def teachers_of(config: RunConfig, evaluations: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Per teacher: its own accuracy, the student's before and after, and KL before and after, over its data sources."""
    first, last = _first(evaluations), evaluations[-1]["result"]
    at_start = evaluations[0]["step"] == 0 and evaluations[0]["result"] is not None
    before = first["data_sources"] if at_start else {}  # a later measurement is not "before"
    found: dict[str, dict[str, float | None]] = {}
    for name in config.teachers:
        sources = [
            source for source, teacher in config.routes.items() if teacher == name and source in first["data_sources"]
        ]
        own = first["teacher_accuracy"].get(name, {})
        found[name] = {
            "accuracy": mean([own.get(source) for source in sources]),
            "student_before": mean([before.get(source, {}).get("accuracy") for source in sources]),
            "student_after": mean([last["data_sources"][source]["accuracy"] for source in sources]),
            "kl_before": mean([before.get(source, {}).get("reverse_kl") for source in sources]),
            "kl_after": mean([last["data_sources"][source]["reverse_kl"] for source in sources]),
        }
    return found


def mean(values: list[float | None]) -> float | None:
    """Mean of what is there, None when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary_table(report: dict[str, Any]) -> str:
    """What a person wants to know first, as text."""
    lines = [f"\n{'teacher':<12}{'its accuracy':>13}{'student before':>16}{'after':>8}{'KL before':>12}{'after':>8}"]
    for name, row in report["teachers"].items():
        lines.append(
            f"{name:<12}{_number(row['accuracy']):>13}{_number(row['student_before']):>16}{_number(row['student_after']):>8}"
            f"{_number(row['kl_before']):>12}{_number(row['kl_after']):>8}"
        )
    books, step_s = report["trajectories"], report["step_s"]
    lines.append("")
    lines.append(
        f"{report['steps']} steps in {report['wall_s']:.0f} s, "
        f"a step {step_s['median']:.2f} s (p95 {step_s['p95']:.2f} s)"
    )
    lines.append("trajectories: " + ", ".join(f"{name} {count}" for name, count in books.items()))
    weights = report["weights"]
    lines.append(f"weights: {weights['versions']} versions, {weights['bytes_pushed'] / 2**20:,.1f} MiB pushed")
    lines.append(f"staleness: at most {report['max_staleness']} versions")
    return "\n".join(lines)


def _first(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    return next(item["result"] for item in evaluations if item["result"] is not None)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no minus before a zero
