from __future__ import annotations

from typing import Any

from opd.progress import describe
from opd.report import build, percentile, summary_table
from opd.report_html import chart, render
from shared.config import RunConfig, parse
from tests.builders import make_run_tree

BOOKS = {"produced": 8, "trained": 8, "dropped_stale": 0, "dead_letter": 0, "queued": 0, "lost": 0, "trained_twice": 0}


def step(number: int, seconds: float) -> dict[str, Any]:
    return {
        "step": number,
        "version": number + 1,
        "loss": 1.0 / number,
        "teachers": {"math": {"loss": 1.0 / number, "reverse_kl": 0.5}},
        "accuracy": {"add": 0.25},
        "queue": {"trajectories": 3, "bytes": 2**20},
        "staleness": {"mean": 0.5, "max": number, "histogram": {"0": 4}},
        "tokens_per_s": 1234.5,
        "dropped_stale": 2,
        "skipped": False,
        "pushed_bytes": 100,
        "time_s": {"wait": 0.1, "compute": 0.2, "push": 0.1, "checkpoint": 0.0, "step": seconds},
    }


def evaluation(accuracy: float | None, kl: float) -> dict[str, Any]:
    sources = {"add": {"accuracy": accuracy, "reverse_kl": kl}}
    return {"data_sources": sources, "teacher_accuracy": {"math": {"add": 0.95 if accuracy is not None else None}}}


def make_report(before: float | None = 0.2, after: float | None = 0.9) -> dict[str, Any]:
    config = parse(RunConfig, make_run_tree(), origin="run.yaml")
    evaluations = [
        {"version": 1, "step": 0, "result": evaluation(before, 2.0)},
        {"version": 3, "step": 2, "result": evaluation(after, 0.5)},
    ]
    return build(
        config,
        [step(1, 1.0), step(2, 3.0)],
        evaluations,
        BOOKS,
        {"requeued": 1, "pushes": 3, "pushed_bytes": 290},
        wall_s=9.0,
    )


def test_report_has_the_promised_keys_and_values() -> None:
    report = make_report()
    assert report["teachers"]["math"] == {
        "accuracy": 0.95,
        "student_before": 0.2,
        "student_after": 0.9,
        "kl_before": 2.0,
        "kl_after": 0.5,
    }
    assert report["steps"] == 2 and report["wall_s"] == 9.0
    assert report["step_s"] == {"median": 2.0, "p95": 3.0}
    assert report["trajectories"] == BOOKS
    assert report["weights"] == {"versions": 3, "bytes_dense": 300, "bytes_pushed": 290}
    assert report["max_staleness"] == 2
    assert report["config"]["run"]["name"] == "test"


def test_accuracy_without_a_checker_is_null() -> None:
    row = make_report(None, None)["teachers"]["math"]
    assert (row["accuracy"], row["student_before"], row["student_after"]) == (None, None, None)
    assert row["kl_after"] == 0.5


def test_the_table_shows_what_the_report_holds() -> None:
    table = summary_table(make_report())
    assert "math" in table and "0.950" in table and "0.200" in table and "lost 0" in table


def test_a_step_as_a_line() -> None:
    line = describe(step(2, 3.0), 40)
    assert "step    2/40" in line and "loss math 0.500" in line and "accuracy add 0.25" in line
    assert "queue 3 (1.0 MiB)" in line and "1,234 tokens/s" in line and "2 dropped as stale" in line


def test_page_draws_a_line_per_series_and_escapes_names() -> None:
    picture = chart("KL <a>", {"<b>": [(1, 0.0), (2, 2.0)], "empty": []})
    assert picture.count("<polyline") == 1 and "&lt;b&gt;" in picture and "KL &lt;a&gt;" in picture
    assert chart("nothing", {"empty": []}) == ""
    page = render(make_report(), [step(1, 1.0), step(2, 3.0)], [])
    assert page.count("<svg") == 6 and "trained twice" in page


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([float(i) for i in range(100)], 0.95) == 95.0
