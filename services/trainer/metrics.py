"""What the trainer shows of itself: a JSON line per step in the run's folder, and Prometheus gauges."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import prometheus_client

from services.trainer.intake import Batch

STEP = prometheus_client.Gauge("opd_trainer_step", "Optimizer steps taken")
VERSION = prometheus_client.Gauge("opd_trainer_policy_version", "Current policy version")
LOSS = prometheus_client.Gauge("opd_trainer_loss", "Loss of the last step, mean per token")
TEACHER = prometheus_client.Gauge("opd_trainer_teacher", "Metrics of the last step by teacher", ["teacher", "metric"])
STAGE = prometheus_client.Counter("opd_trainer_stage_seconds", "Time by stage", ["stage"])
TRAJECTORIES = prometheus_client.Counter("opd_trainer_trajectories", "Trajectories by what became of them", ["fate"])
QUEUE = prometheus_client.Gauge("opd_trainer_queue_trajectories", "Trajectories published and not yet trained")
QUEUE_BYTES = prometheus_client.Gauge("opd_trainer_queue_bytes", "Bytes of trajectories published and not yet trained")
STALENESS = prometheus_client.Counter(
    "opd_trainer_staleness_tokens", "Trained tokens by staleness in policy versions", ["staleness"]
)


def describe_batch(batch: Batch, version: int) -> dict[str, Any]:
    """Staleness per token, task reward per data source, and sizes of a batch."""
    staleness: dict[int, int] = defaultdict(int)
    rewards: dict[str, list[float]] = defaultdict(list)
    for item in batch.trajectories:
        for span_version, num_tokens in item.version_spans:
            staleness[version - span_version] += num_tokens
        if item.reward is not None:
            rewards[item.data_source].append(item.reward)
    tokens = sum(staleness.values())
    return {
        "staleness": {
            "mean": sum(age * count for age, count in staleness.items()) / tokens,
            "max": max(staleness),
            "histogram": {str(age): count for age, count in sorted(staleness.items())},
        },
        "accuracy": {source: sum(values) / len(values) for source, values in sorted(rewards.items())},
        "num_trajectories": len(batch.trajectories),
        "num_tokens": sum(len(item.token_ids) for item in batch.trajectories),
        "num_response_tokens": tokens,
    }


class StepLog:
    """`metrics.jsonl`: one object per step. A resumed run starts a new file with the steps up to its checkpoint.

    Never shortened in place: who follows the file would go on in the middle of a line.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= last_step]
        aside = path.with_name(path.name + ".tmp")
        aside.write_text("".join(kept))
        aside.rename(path)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Append a step and show it to Prometheus."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        STEP.set(record["step"])
        VERSION.set(record["version"])
        LOSS.set(record["loss"])
        QUEUE.set(record["queue"]["trajectories"])
        QUEUE_BYTES.set(record["queue"]["bytes"])
        for teacher, values in record["teachers"].items():
            for metric, value in values.items():
                TEACHER.labels(teacher, metric).set(value)
        for stage, seconds in record["time_s"].items():
            STAGE.labels(stage).inc(seconds)
        for age, count in record["staleness"]["histogram"].items():
            STALENESS.labels(age).inc(count)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _lines(path: Path) -> list[str]:
    """Whole lines; the last one may have been cut off by a crash."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
