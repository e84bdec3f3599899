"""The folder of a run: who may use it, what may be deleted in it, and the configuration files that services read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import yaml

from shared.config import RunConfig, Section, parse, read_tree
from shared.errors import ConfigError
from shared.parts import GatewayPart, RolloutPart, TeacherPart, TrainerPart, select
from shared.resume import check_same_run

_OURS = frozenset(
    {
        "config",
        "config.yaml",
        "redis",
        "logs",
        "weights",
        "checkpoints",
        "ledger.jsonl",
        "metrics.jsonl",
        "evaluations.json",
        "student",
        "report.json",
        "report.html",
    }
)
"""All that a run makes in its folder, each also with `.tmp` after it while it is being written."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Holds a lock beside the run's folder, so that a second `opd up` cannot delete or mix up one that goes on.

    Neither the lock nor an empty folder above it is left behind.
    """
    lock = folder.with_name(folder.name + ".lock")
    made = [parent for parent in lock.parents if not parent.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(lock)
    except BlockingIOError as error:
        raise ConfigError(f"another `opd up` is running in {folder}: stop it, or take another run.dir") from error
    except OSError as error:
        raise ConfigError(f"run.dir {folder} cannot be used: {lock}: {error.strerror}") from error
    with handle:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: the run has begun
                for parent in made:
                    parent.rmdir()


def prepare(config: RunConfig, *, fresh: bool) -> None:
    """Make the folder, without what an earlier run left in it if `fresh`.

    What the run was started with stays there as config.yaml, without the Redis password.

    Raises:
        ConfigError: it holds files of somebody else, a finished run, or one that this configuration cannot resume.
    """
    folder = config.run.dir
    if fresh and folder.exists():
        strange = {item.name for item in folder.iterdir() if item.name.removesuffix(".tmp") not in _OURS}
        if strange:
            raise ConfigError(f"--fresh would delete {folder}, but it holds {min(strange)}, which no run of opd made")
        shutil.rmtree(folder)
    if (folder / "report.json").exists():
        raise ConfigError(f"the run in {folder} is finished: give --fresh to start it anew, or another --set run.dir=…")
    record = folder / "config.yaml"
    if record.exists() and (folder / "ledger.jsonl").exists():  # the trainer's first act: before it nothing is lost
        check_same_run(_read_record(record), config, where=f"the run in {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(record, config.model_copy(update={"redis": _without_password(config)}))
    except OSError as error:
        raise ConfigError(f"run.dir {folder} cannot be written: {error}; make room or take another run.dir") from error


def write_parts(config: RunConfig, url: str) -> dict[str, Path]:
    """Write what each service reads, with the Redis url where it is needed; returns service name → file.

    Names are "teacher-NAME", "gateway", "rollout" and "trainer". Only this user may read the files: the url may hold a
    password.
    """
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
    parts: dict[str, Section] = {
        f"teacher-{name}": TeacherPart(teachers={name: teacher}) for name, teacher in config.teachers.items()
    }
    parts |= {"gateway": select(GatewayPart, config), "rollout": select(RolloutPart, config)}
    parts["trainer"] = select(TrainerPart, config)
    folder = config.run.dir / "config"
    shutil.rmtree(folder, ignore_errors=True)  # an earlier process may have had other teachers
    folder.mkdir()
    for name, part in parts.items():
        _write(folder / f"{name}.yaml", part)
    return {name: folder / f"{name}.yaml" for name in parts}


def _locked(lock: Path) -> IO[str]:
    while True:
        handle = lock.open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(handle.fileno()), lock.stat()):
                return handle
        except OSError:
            handle.close()
            raise
        handle.close()  # its holder deleted it between our opening and locking it


def _read_record(path: Path) -> RunConfig:
    try:
        return parse(RunConfig, read_tree(path), origin=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"the run in {path.parent} cannot be resumed, its configuration is not readable any more ({error}): "
            "start anew with --fresh, or take another --set run.dir=…"
        ) from error


def _write(path: Path, section: Section) -> None:
    """In place of an earlier one, whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    aside.unlink(missing_ok=True)
    with open(aside, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as out:
        yaml.safe_dump(section.model_dump(mode="json"), out, sort_keys=False)
    aside.rename(path)


def _without_password(config: RunConfig) -> Section:
    url = config.redis.url
    if url is not None:
        parts = urlsplit(url)
        user, sign, host = parts.netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:***@{host}" if sign else host
        url = parts._replace(netloc=netloc, query="").geturl()  # redis-py takes a password from the query too
    return config.redis.model_copy(update={"url": url})
