"""Live progress follows a metrics file that grows, is cut off mid-line, and is replaced by a resumed trainer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.progress import Progress
from services.trainer.metrics import StepLog


def _line(step: int, time: float) -> str:
    record = {
        "step": step,
        "time": time,
        "teachers": {"math": {"loss": 1.0}},
        "accuracy": {"add": 0.5},
        "queue": {"trajectories": 1, "bytes": 2},
        "staleness": {"mean": 0.0},
        "tokens_per_s": 3.0,
        "time_s": {"step": 0.1},
        "dropped_stale": 0,
        "skipped": False,
    }
    return json.dumps(record) + "\n"


def _shown(progress: Progress, capsys: pytest.CaptureFixture[str]) -> list[int]:
    progress.show_new()
    return [int(line.split("/")[0].removeprefix("step")) for line in capsys.readouterr().out.splitlines()]


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_step_is_shown_once_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path, steps=9)
    assert _shown(progress, capsys) == []
    half = _line(2, 20.0)
    _append(path, _line(1, 10.0) + half[:30])
    assert _shown(progress, capsys) == [1]
    _append(path, half[30:])
    assert _shown(progress, capsys) == [2]
    assert _shown(progress, capsys) == []


def test_a_resumed_trainer_replaces_the_file_while_it_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when the new file has outgrown the old one before the next look, with lines of other lengths."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(_line(1, 10.0) + _line(2, 20.0) + _line(3, 30.0))
    progress = Progress(path, steps=9)
    assert _shown(progress, capsys) == [1, 2, 3]
    _append(path, _line(4, 40.0) + '{"step": 5, "ti')  # written, and cut off by the crash, after the last look
    StepLog(path, last_step=2).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    _append(path, "".join(_line(step, 50.125 + step) for step in (3, 4, 5)))
    assert _shown(progress, capsys) == [4, 3, 4, 5]


def test_what_an_earlier_process_wrote_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(_line(1, 10.0) + _line(2, 20.0) + _line(3, 30.0))
    progress = Progress(path, steps=9)
    progress.skip_existing()
    StepLog(path, last_step=2).close()
    _append(path, _line(3, 40.0))
    assert _shown(progress, capsys) == [3]
