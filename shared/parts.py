"""What each service gets of a run's configuration: its part, and nothing else.

`opd up` writes one file per service with that service's sections; a service that is started by hand or in a container
may be given the whole run's file instead, and then takes its part from it. Both are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from shared.config import (
    EvalSection,
    FlowSection,
    GatewaySection,
    ObjectiveSection,
    PromptsSection,
    RedisSection,
    ReplicasSection,
    RolloutSection,
    RunConfig,
    RunSection,
    Section,
    ServiceName,
    StudentSection,
    TeacherSection,
    TrainerSection,
    load_run,
    parse,
    read_tree,
)
from shared.errors import ConfigError
from shared.overrides import apply_override


class TeacherPart(Section):
    """What a teacher reads; the file that `opd up` writes for it holds that one teacher."""

    teachers: dict[ServiceName, TeacherSection] = Field(min_length=1)


class GatewayPart(Section):
    """What the gateway reads: of the teachers only where they listen."""

    gateway: GatewaySection
    teachers: dict[ServiceName, ReplicasSection] = Field(min_length=1)


class RolloutPart(Section):
    """What a rollout worker reads: of the teachers what their losses ask for, of the trainer the batch size alone.

    (The gate is measured in steps.)
    """

    run: RunSection
    student: StudentSection
    objectives: dict[ServiceName, ObjectiveSection]
    routes: dict[str, str]
    prompts: PromptsSection
    gateway: GatewaySection
    redis: RedisSection
    rollout: RolloutSection
    flow: FlowSection
    trainer: TrainerSection
    eval: EvalSection


class TrainerPart(Section):
    """What the trainer reads."""

    run: RunSection
    student: StudentSection
    teachers: dict[ServiceName, TeacherSection]
    redis: RedisSection
    rollout: RolloutSection
    flow: FlowSection
    trainer: TrainerSection
    eval: EvalSection


PartT = TypeVar("PartT", bound=Section)


def select(part: type[PartT], run: RunConfig) -> PartT:
    """A service's part of a run's configuration: the sections that are fields of `part`."""
    return part.model_validate({name: getattr(run, name) for name in part.model_fields})


def load_part(part: type[PartT], path: Path, overrides: Sequence[str] = ()) -> PartT:
    """Read a service's part from a file that holds it alone, or from a whole run's file.

    A file with a section that is not of this part is taken for a whole run's, so that a misspelled section is an
    error that names the nearest known one.

    Raises:
        ConfigError: as `load_run`.
    """
    tree = read_tree(path)
    if not tree.keys() <= part.model_fields.keys():
        return select(part, load_run(path, overrides))
    for override in overrides:
        apply_override(tree, override)
    if strange := sorted(tree.keys() - part.model_fields.keys()):
        raise ConfigError(
            f"--set {strange[0]}…: {path} is one service's part of a run's configuration and has no such section; "
            f"it has {', '.join(part.model_fields)}"
        )
    return parse(part, tree, origin=str(path))
