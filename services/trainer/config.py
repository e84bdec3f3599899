"""What the trainer needs of a run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.config import (
    EvalSection,
    FlowSection,
    RedisSection,
    RolloutSection,
    RunSection,
    Section,
    StudentSection,
    TeacherSection,
    TrainerSection,
    add_config_arguments,
    load_run,
    select,
)


class TrainerConfig(Section):
    """The sections that the trainer reads."""

    run: RunSection
    student: StudentSection
    teachers: dict[str, TeacherSection]
    redis: RedisSection
    rollout: RolloutSection
    flow: FlowSection
    trainer: TrainerSection
    eval: EvalSection


def load(argv: Sequence[str] | None = None) -> TrainerConfig:
    """Read the command line. Raises ConfigError for anything that cannot work."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Trains the student.")
    add_config_arguments(parser, required=True)
    arguments = parser.parse_args(argv)
    return select(TrainerConfig, load_run(arguments.config, arguments.overrides))
