"""`opd up`: start every service of a run on this machine, follow it, report, and stop all that was started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from opd import preflight, run_folder
from opd.embedded_redis import forget_run, redis_process, wait_ready
from opd.processes import Process, stop_all
from opd.progress import Progress
from opd.report import report_run, summary_table
from shared.config import RunConfig
from shared.errors import RunFailed

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
        stack.enter_context(run_folder.only_one(config.run.dir))
        preflight.check(config)
        run_folder.prepare(config, fresh=fresh)
        url, servers = _start_redis(config, stack, fresh=fresh)
        services = _services(config, run_folder.write_parts(config, url))
        stack.callback(_stop, services)
        _start(services, config)
        _follow(servers + services, config)
        report = asyncio.run(report_run(config, url, wall_s=time.monotonic() - started))
    print(summary_table(report))
    print(f"\nreport: {config.run.dir / 'report.json'}, {config.run.dir / 'report.html'}")
    print(f"student: {config.run.dir / 'student'} (loads in plain transformers)")
    return _verdict(report)


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


def _services(config: RunConfig, parts: dict[str, Path]) -> list[Process]:
    def process(name: str, module: str, *arguments: str, part: str | None = None) -> Process:
        argv = [sys.executable, "-m", module, "--config", str(parts[part or name]), *arguments]
        return Process(name, argv, config.run.dir / "logs" / f"{name}.log")

    gateway_url = f"http://{config.gateway.host}:{config.gateway.port}"
    teachers = [
        process(
            f"teacher-{name}-{replica}",
            "services.teacher",
            *("--name", name, "--replica", str(replica)),
            *(("--register", gateway_url) if teacher.discovery == "register" else ()),
            part=f"teacher-{name}",
        )
        for name, teacher in config.teachers.items()
        for replica in range(len(teacher.ports))
    ]
    trainer = process("trainer", "services.trainer")
    ranks = config.trainer.num_ranks
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
