"""report.html: one self-contained page with inline SVG curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 28
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;color:#1f2937}
h1{font-size:1.4rem} h2{font-size:1rem;margin:0 0 .3rem} table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .8rem;border-bottom:1px solid #e5e7eb;text-align:right}
td:first-child,th:first-child{text-align:left}
.grid{display:flex;flex-wrap:wrap;gap:1.2rem} figure{margin:0} .key{font-size:.8rem;color:#4b5563}
.key b{font-weight:400;margin-right:1rem} .bad{color:#b91c1c;font-weight:600}
"""

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of the line."""


def render(
    report: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """The page."""
    charts = [
        chart("Sampled reverse KL per token on rollouts, by teacher (nats)", _by_teacher(steps, "reverse_kl")),
        chart("Loss per token, by teacher (nats)", _by_teacher(steps, "loss")),
        chart("Accuracy of sampled answers, by data source", _accuracy(steps), top=1.0),
        chart("Held-out greedy accuracy, by data source", _held_out(evaluations, "accuracy"), top=1.0),
        chart("Held-out reverse KL per token, by data source (nats)", _held_out(evaluations, "reverse_kl")),
        chart("Staleness of trained tokens (policy versions)", _staleness(steps)),
        chart(
            "Queue: trajectories published and not yet trained",
            {"queue": _line(steps, lambda r: r["queue"]["trajectories"])},
        ),
        chart("Time per stage of the trainer (seconds a step)", _stages(steps)),
    ]
    name = html.escape(report["config"]["run"]["name"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>opd run {name}</title><style>{_STYLE}</style>"
        f"<h1>Run {name}: {report['steps']} steps in {report['wall_s']:.0f} s</h1>"
        f"{_teacher_table(report)}{_books_table(report)}<div class=grid>{''.join(charts)}</div></html>\n"
    )


def chart(title: str, series: Series, top: float | None = None) -> str:
    """One figure with a line per series; empty series are left out."""
    lines = {name: points for name, points in series.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    y0, y1 = min(0.0, min(ys)), top if top is not None else max(max(ys) * 1.05, 1e-6)

    def place(x: float, y: float) -> str:
        px = _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        py = _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{px:.1f},{py:.1f}"

    parts = [_axes(x0, x1, y0, y1, place)]
    keys = []
    for colour, (name, points) in zip(_COLOURS * 4, sorted(lines.items()), strict=False):
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>')
        keys.append(f'<b><span style="color:{colour}">&#9632;</span> {html.escape(name)}</b>')
    picture = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<figure><h2>{html.escape(title)}</h2>{picture}<div class=key>{''.join(keys)}</div></figure>"


def _axes(x0: float, x1: float, y0: float, y1: float, place: Any) -> str:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y0 + share * (y1 - y0)
        left, height = place(x0, y).split(",")
        right = place(x1, y).split(",")[0]
        marks.append(f'<line x1="{left}" x2="{right}" y1="{height}" y2="{height}" stroke="#e5e7eb"/>')
        marks.append(
            f'<text x="{_LEFT - 6}" y="{float(height) + 4:.1f}" font-size="11" text-anchor="end">{y:.3g}</text>'
        )
        x = x0 + share * (x1 - x0)
        across = place(x, y0).split(",")[0]
        marks.append(f'<text x="{across}" y="{_HEIGHT - 8}" font-size="11" text-anchor="middle">{x:.0f}</text>')
    return "".join(marks)


def _line(steps: Sequence[Mapping[str, Any]], value: Any) -> list[tuple[float, float]]:
    return [(record["step"], float(value(record))) for record in steps]


def _by_teacher(steps: Sequence[Mapping[str, Any]], metric: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for record in steps:
        for teacher, values in record["teachers"].items():
            if metric in values:
                found.setdefault(teacher, []).append((record["step"], values[metric]))
    return found


def _accuracy(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for record in steps:
        for source, value in record["accuracy"].items():
            found.setdefault(source, []).append((record["step"], value))
    return found


def _held_out(evaluations: Sequence[Mapping[str, Any]], metric: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for item in evaluations:
        for source, values in (item["result"] or {"data_sources": {}})["data_sources"].items():
            if values[metric] is not None:
                found.setdefault(source, []).append((item["step"], values[metric]))
    return found


def _staleness(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    return {
        "mean": _line(steps, lambda record: record["staleness"]["mean"]),
        "max": _line(steps, lambda record: record["staleness"]["max"]),
    }


def _stages(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    stages = [stage for stage in (steps[0]["time_s"] if steps else {}) if stage != "step"]
    return {stage: _line(steps, lambda record, stage=stage: record["time_s"][stage]) for stage in stages}


def _teacher_table(report: Mapping[str, Any]) -> str:
    head = "<tr><th>teacher<th>its accuracy<th>student before<th>student after<th>KL before<th>KL after</tr>"
    rows = []
    for name, row in report["teachers"].items():
        keys = ("accuracy", "student_before", "student_after", "kl_before", "kl_after")
        cells = "".join(f"<td>{'–' if row[key] is None else format(row[key], '.3f')}" for key in keys)
        rows.append(f"<tr><td>{html.escape(name)}{cells}</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _books_table(report: Mapping[str, Any]) -> str:
    books = report["trajectories"]
    head = "".join(f"<th>{name.replace('_', ' ')}" for name in books)
    cells = "".join(
        f"<td class={'bad' if count and name in ('lost', 'trained_twice') else 'good'}>{count}"
        for name, count in books.items()
    )
    return f"<table><tr>{head}</tr><tr>{cells}</tr></table>"
