"""Checks before anything starts: whatever would stop a run later is said here, in one line, with the mend."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shared.config import RunConfig
from shared.errors import ConfigError
from shared.model_folder import check_model_folder
from shared.prompts import PromptSet
from shared.service import check_port_free
from shared.tokenizer import tokenizer_hash

_BIG_PARTS = ("checkpoints", "weights")
_STATE_BYTES_PER_PARAMETER = 12
"""float32 master weights and both Adam moments in a checkpoint."""


def check(config: RunConfig) -> None:
    """Raises ConfigError for the first thing that makes the run impossible."""
    check_models(config)
    check_ports(config)
    check_prompts(config)
    check_disk(config)


def check_models(config: RunConfig) -> None:
    """Model folders exist and every teacher speaks the student's token ids."""
    check_model_folder(config.student.model, setting="student.model")
    mine = tokenizer_hash(config.student.model)
    for name, teacher in config.teachers.items():
        check_model_folder(teacher.model, setting=f"teachers.{name}.model")
        if tokenizer_hash(teacher.model) != mine:
            raise ConfigError(
                f"teachers.{name}.model: the tokenizer of {teacher.model} differs from the student's "
                f"({config.student.model}); token ids would mean other text, so take a teacher of the same family"
            )


def check_prompts(config: RunConfig) -> None:
    """Every prompt can be read, and every data source, also one that only a line of a file names, has a teacher."""
    prompts = PromptSet(config.prompts.sources, config.run.seed, config.prompts.shuffle)
    unrouted = sorted(prompts.data_sources - set(config.routes))
    if unrouted:
        raise ConfigError(f"data_source {unrouted[0]!r} has no teacher: add `{unrouted[0]}: TEACHER` under routes")


def check_ports(config: RunConfig) -> None:
    """All ports are free and none is given twice."""
    wanted = [("gateway.port", config.gateway.host, config.gateway.port)]
    wanted.append(("rollout.port", config.rollout.host, config.rollout.port))
    wanted.append(("trainer.port", config.trainer.host, config.trainer.port))
    for name, teacher in config.teachers.items():
        wanted += [(f"teachers.{name}.ports", teacher.host, port) for port in teacher.ports]
    used: dict[int, str] = {}
    for setting, host, port in wanted:
        if port in used:
            raise ConfigError(f"port {port} is given to both {used[port]} and {setting}: change one of them")
        used[port] = setting
        check_port_free(host, port, setting=setting)


def check_disk(config: RunConfig) -> None:
    """The run's folder is writable and has room for checkpoints and weight pushes."""
    folder = config.run.dir
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ConfigError(f"run.dir {folder} cannot be made: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir {folder} cannot be used: {place} is not writable for this user")
    needed = needed_bytes(config)
    # What an earlier process of this run has written is part of what it needs.
    there = sum(file.stat().st_size for part in _BIG_PARTS for file in (folder / part).rglob("*") if file.is_file())
    free = shutil.disk_usage(place).free + there
    if free < needed:
        raise ConfigError(
            f"run.dir {folder} has {free / 2**20:,.0f} MiB free, checkpoints and weight pushes need "
            f"{needed / 2**20:,.0f} MiB: make room, or lower trainer.keep_checkpoints and trainer.keep_weights"
        )


def needed_bytes(config: RunConfig) -> int:
    """Bytes that checkpoints and pushes take at their most, one of each being written."""
    weights = _weights_bytes(config.student.model)
    parameters = weights // 2
    checkpoint = parameters * _STATE_BYTES_PER_PARAMETER + weights
    return checkpoint * (config.trainer.keep_checkpoints + 1) + 2 * weights * (config.trainer.keep_weights + 1)


def _weights_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
