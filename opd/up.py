"""`opd up`: start every service of a run on this machine, follow it, report, and stop all that was started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from opd import preflight
from opd.embedded_redis import embedded_redis
from opd.processes import Process, stop_all
from opd.progress import Progress
from opd.report import report_run, summary_table
from shared.config import RunConfig
from shared.errors import ConfigError, RunFailed

_POLL_S = 0.25


class Interrupted(Exception):
    """SIGINT or SIGTERM."""


def up(config: RunConfig, *, fresh: bool) -> int:
    """Run to the end; returns the exit status (0 only when every produced trajectory is accounted for).

    Args:
        fresh: delete what an earlier run left in run.dir instead of resuming it.

    Raises:
        ConfigError: something makes a start impossible; nothing runs any more.
        RunFailed: the run ended early; nothing runs any more.
    """
    started = time.monotonic()
    _prepare_folder(config.run.dir, fresh=fresh)
    preflight.check(config)
    with _signals(), contextlib.ExitStack() as stack:
        url = config.redis.url or stack.enter_context(embedded_redis(config.run.dir))
        processes = _processes(config, _write_resolved(config, url))
        stack.callback(_stop, processes)
        _start(processes, config)
        _follow(processes, config)
        report = asyncio.run(report_run(config, url, wall_s=time.monotonic() - started))
    print(summary_table(report))
    print(f"\nreport: {config.run.dir / 'report.json'}, {config.run.dir / 'report.html'}")
    print(f"student: {config.run.dir / 'student'} (loads in plain transformers)")
    return _verdict(report)


def _prepare_folder(folder: Path, *, fresh: bool) -> None:
    if fresh and folder.exists():
        known = {"redis", "logs", "weights", "checkpoints", "student", "config.yaml", "metrics.jsonl", "ledger.jsonl"}
        strange = {item.name for item in folder.iterdir()} - known - {"report.json", "report.html", "evaluations.json"}
        if strange:
            raise ConfigError(
                f"--fresh would delete {folder}, but it holds {sorted(strange)[0]}, which no run of opd made"
            )
        shutil.rmtree(folder)
    if (folder / "evaluations.json").exists():
        raise ConfigError(f"the run in {folder} is finished: give --fresh to start it anew, or another --set run.dir=…")


def _write_resolved(config: RunConfig, url: str) -> Path:
    """The configuration with the Redis url filled in: what every service reads."""
    tree = config.model_dump(mode="json")
    tree["redis"]["url"] = url
    path = config.run.dir / "config.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    path.chmod(0o600)  # the url may hold a password
    return path


def _processes(config: RunConfig, path: Path) -> list[Process]:
    def process(name: str, module: str, *arguments: str) -> Process:
        argv = [sys.executable, "-m", module, "--config", str(path), *arguments]
        return Process(name, argv, config.run.dir / "logs" / f"{name}.log")

    teachers = [
        process(f"teacher-{name}-{replica}", "services.teacher", "--name", name, "--replica", str(replica))
        for name, teacher in config.teachers.items()
        for replica in range(len(teacher.ports))
    ]
    others = [process(name, f"services.{name}") for name in ("gateway", "rollout", "trainer")]
    return teachers + others


def _start(processes: list[Process], config: RunConfig) -> None:
    names = ", ".join(process.name for process in processes)
    print(f"run {config.run.name}: starting {names}; logs in {config.run.dir / 'logs'}", flush=True)
    for process in processes:
        process.start()


def _follow(processes: list[Process], config: RunConfig) -> None:
    """Return when the trainer is done; start again what dies by accident, end the run when something gives up."""
    trainer = next(process for process in processes if process.name == "trainer")
    progress = Progress(config.run.dir / "metrics.jsonl", steps=config.run.steps)
    progress.skip_existing()
    while True:
        progress.show_new()
        if trainer.status() == 0 and (config.run.dir / "evaluations.json").exists():
            return
        for process in processes:
            if process.status() is None:
                continue
            if not process.may_restart():
                raise RunFailed(f"{process.name}: {process.complaint()}")
            print(f"{process.name} ended unexpectedly, starting it again: {process.complaint()}", flush=True)
            process.restart()
        time.sleep(_POLL_S)


def _stop(processes: list[Process]) -> None:
    for name in stop_all(processes):
        print(f"{name} did not stop in time and was killed", file=sys.stderr)


def _verdict(report: dict) -> int:
    books = report["trajectories"]
    faults = [
        f"{books[name]} trajectories {text}"
        for name, text in (("lost", "lost"), ("trained_twice", "trained twice"))
        if books[name]
    ]
    if report["prompts_failed"]:
        faults.append(f"{report['prompts_failed']} prompts given up")
    for fault in faults:
        print(f"failed: {fault}: {json.dumps(books)}", file=sys.stderr)
    return 1 if faults else 0


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into an exception, and ignore further ones while things are being stopped."""

    def interrupt(signum: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(signum).name)

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
