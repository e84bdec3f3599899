"""`opd up`: start every service of a run on this machine, follow it, report, and stop all that was started."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from opd import preflight
from opd.embedded_redis import forget_run, redis_process, wait_ready
from opd.processes import Process, stop_all
from opd.progress import Progress
from opd.report import report_run, summary_table
from shared.config import RunConfig
from shared.errors import ConfigError, RunFailed

_POLL_S = 0.25
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal to stop."""


def up(config: RunConfig, *, fresh: bool) -> int:
    """Run to the end; returns the exit status (0 only when every produced trajectory is accounted for).

    Args:
        fresh: delete what an earlier run left in run.dir instead of resuming it.

    Raises:
        ConfigError: something makes a start impossible; nothing runs any more.
        RunFailed: the run ended early; nothing runs any more.
    """
    started = time.monotonic()
    with _signals(), contextlib.ExitStack() as stack:
        stack.enter_context(_only_one(config.run.dir))
        preflight.check(config)
        _prepare_folder(config.run.dir, fresh=fresh)
        url, servers = _start_redis(config, stack, fresh=fresh)
        services = _services(config, _write_resolved(config, url))
        stack.callback(_stop, services)
        _start(services, config)
        _follow(servers + services, config)
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
    if (folder / "report.json").exists():
        raise ConfigError(f"the run in {folder} is finished: give --fresh to start it anew, or another --set run.dir=…")


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds a lock beside the run's folder, so that a second `opd up` cannot delete or mix up one that goes on."""
    lock = folder.with_name(folder.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise ConfigError(f"run.dir {folder} cannot be used: {lock}: {error.strerror}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another `opd up` is running in {folder}: stop it, or take another run.dir") from error
        yield


def _start_redis(config: RunConfig, stack: contextlib.ExitStack, *, fresh: bool) -> tuple[str, list[Process]]:
    """The url of the run's Redis, and the process to watch where it is our own."""
    if config.redis.url is not None:
        if fresh:
            forget_run(config.redis.url, config.run.name)
        return config.redis.url, []
    process, url = redis_process(config.run.dir)
    stack.callback(_stop, [process])
    process.start()
    wait_ready(process, url)
    return url, [process]


def _write_resolved(config: RunConfig, url: str) -> Path:
    """The configuration with the Redis url filled in: what every service reads."""
    tree = config.model_dump(mode="json")
    tree["redis"]["url"] = url
    path = config.run.dir / "config.yaml"
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:  # the url may hold a password
        yaml.safe_dump(tree, out, sort_keys=False)
    return path


def _services(config: RunConfig, path: Path) -> list[Process]:
    def process(name: str, module: str, *arguments: str) -> Process:
        argv = [sys.executable, "-m", module, "--config", str(path), *arguments]
        return Process(name, argv, config.run.dir / "logs" / f"{name}.log")

    teachers = [
        process(f"teacher-{name}-{replica}", "services.teacher", "--name", name, "--replica", str(replica))
        for name, teacher in config.teachers.items()
        for replica in range(len(teacher.ports))
    ]
    trainer = process("trainer", "services.trainer")
    ranks = config.trainer.tensor_parallel * config.trainer.pipeline_parallel
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        trainer.argv = [*torchrun, *trainer.argv[1:]]
    # The worker last: it looks for the gateway first thing.
    return [*teachers, process("gateway", "services.gateway"), trainer, process("rollout", "services.rollout")]


def _start(services: list[Process], config: RunConfig) -> None:
    names = ", ".join(service.name for service in services)
    print(f"run {config.run.name}: starting {names}; logs in {config.run.dir / 'logs'}", flush=True)
    for service in services:
        if service.name == "rollout":
            _wait_gateway(services, config)
        service.start()


def _wait_gateway(services: list[Process], config: RunConfig) -> None:
    """Return once the gateway answers, or something has ended (which `_follow` then explains)."""
    url = f"http://{config.gateway.host}:{config.gateway.port}/healthz"
    while all(service.status() is None for service in services if service.pid):
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(_POLL_S)


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
    """Turn the first signal to stop into an exception, and ignore further ones while things are being stopped."""

    def interrupt(signum: int, frame: object) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(signum).name)

    before = {each: signal.signal(each, interrupt) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
