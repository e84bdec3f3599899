"""A whole run with every real process: smaller than the demo, with a trainer and a worker killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.conftest import Service, wait_until
from tests.integration.conftest import demo_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

STEPS = 12


def pids_of(configs: Path) -> dict[str, int]:
    """Processes that read a file of the run's folder `configs`, by service module."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it ended meanwhile
            if "-m" in argv and any(Path(argument).parent == configs for argument in argv):
                found[argv[argv.index("-m") + 1]] = int(entry.name)
    return found


def marked(variable: str) -> list[int]:
    """Live processes with NAME=VALUE in their environment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue  # it ended meanwhile
            if variable in environment and not is_zombie:
                found.append(int(entry.name))
    return found


async def test_a_run_survives_kills_and_accounts_for_every_trajectory(
    tmp_path: Path, run_service: Callable[..., Service]
) -> None:
    config = demo_config(
        tmp_path,
        run={"steps": STEPS},
        eval={"size": 32},
        trainer={"batch_size": 64, "checkpoint_every": 3},
        rollout={"lease_s": 5.0},
    )
    run = run_service("opd", "up", "--config", config)
    configs, metrics = tmp_path / "run" / "config", tmp_path / "run" / "metrics.jsonl"

    def steps_done() -> int:
        assert run.process.poll() is None or run.process.returncode == 0, run.output()[-4000:]
        return metrics.read_text().count("\n") if metrics.exists() else 0

    await wait_until(lambda: steps_done() >= 4, 240, "four steps")
    os.kill(pids_of(configs)["services.trainer"], signal.SIGKILL)
    await wait_until(lambda: "trainer ended unexpectedly" in run.output(), 20)
    await wait_until(lambda: "resumed" in (tmp_path / "run" / "logs" / "trainer.log").read_text(), 120)
    os.kill(pids_of(configs)["services.rollout"], signal.SIGKILL)
    await wait_until(lambda: run.process.poll() is not None, 300, "the end of the run")
    assert run.process.returncode == 0, run.output()[-4000:]

    report = json.loads((tmp_path / "run" / "report.json").read_text())
    books = report["trajectories"]
    assert report["steps"] == STEPS
    assert books["trained"] == STEPS * 64
    assert (books["lost"], books["trained_twice"], books["dead_letter"]) == (0, 0, 0)
    assert books["produced"] == books["trained"] + books["dropped_stale"] + books["queued"]
    assert report["max_staleness"] <= 3
    for row in report["teachers"].values():
        assert row["accuracy"] >= 0.9
        assert row["kl_after"] < 0.8 * row["kl_before"]
    assert pids_of(configs) == {}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student")
    assert (tmp_path / "run" / "report.html").read_text().count("<svg") == 8

    again = run_service("opd", "up", "--config", config)
    assert again.process.wait(60) == 2
    assert re.search(r"error: the run in .* is finished: give --fresh", again.output())


async def test_a_run_that_is_interrupted_and_killed_still_accounts_for_every_trajectory(
    tmp_path: Path, run_service: Callable[..., Service]
) -> None:
    """Neither way leaves a process behind, engines included, and the last start completes what the first began."""
    config = demo_config(
        tmp_path, run={"steps": 9}, eval={"size": 8}, trainer={"batch_size": 32, "checkpoint_every": 100}
    )
    folder, marker = tmp_path / "run", f"OPD_TEST_RUN={tmp_path}"

    def start() -> Service:
        return run_service("opd", "up", "--config", config, env={"OPD_TEST_RUN": str(tmp_path)})

    async def until_step(run: Service, step: int) -> None:
        def reached() -> bool:
            assert run.process.poll() is None, run.output()[-4000:]
            metrics = folder / "metrics.jsonl"
            return metrics.exists() and f'"step": {step},' in metrics.read_text()

        await wait_until(reached, 240, f"step {step}")

    interrupted = start()
    await until_step(interrupted, 3)
    assert interrupted.stop(signal.SIGINT, 40) == 130
    assert marked(marker) == []
    (saved,) = (folder / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= 3, "a stop writes a checkpoint of its own"

    killed = start()
    await until_step(killed, 7)
    killed.stop(signal.SIGKILL)
    await wait_until(lambda: marked(marker) == [], 30, "all that it started has ended")

    last = start()
    await wait_until(lambda: last.process.poll() is not None, 300, "the end of the run")
    assert last.process.returncode == 0, last.output()[-4000:]
    books = json.loads((folder / "report.json").read_text())["trajectories"]
    assert books["trained"] == 9 * 32
    assert (books["lost"], books["trained_twice"], books["dead_letter"]) == (0, 0, 0)
    assert marked(marker) == []
    assert sorted(item.name for item in tmp_path.iterdir() if item.suffix == ".lock") == []
