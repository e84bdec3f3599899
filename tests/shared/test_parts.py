"""A service's part of a configuration: from a file of its own, or out of a whole run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import RunConfig, Section, parse
from shared.errors import ConfigError
from shared.parts import GatewayPart, RolloutPart, TeacherPart, TrainerPart, load_part, select
from tests.builders import make_run_tree

PARTS = (TeacherPart, GatewayPart, RolloutPart, TrainerPart)


def write(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_whole_file_can_be_written_and_read_alone(tmp_path: Path, part: type[Section]) -> None:
    tree = make_run_tree(redis={"url": "redis://:secret@host:1/0"}, flow={"max_staleness": 9})
    chosen = load_part(part, write(tmp_path, tree))
    assert chosen == select(part, parse(RunConfig, tree, origin="test"))
    alone = chosen.model_dump(mode="json")
    assert load_part(part, write(tmp_path, alone)).model_dump() == chosen.model_dump()
    assert ("secret" in yaml.safe_dump(alone)) == (part in (RolloutPart, TrainerPart))


def test_the_gateway_learns_addresses_only() -> None:
    part = select(GatewayPart, parse(RunConfig, make_run_tree(), origin="test"))
    (teacher,) = part.model_dump()["teachers"].values()
    assert teacher == {"host": "127.0.0.1", "ports": [8101], "discovery": "ports"}


def test_a_worker_learns_of_a_teacher_only_what_its_loss_asks_for() -> None:
    part = select(RolloutPart, parse(RunConfig, make_run_tree(), origin="test"))
    assert part.model_dump()["objectives"] == {
        "math": {"loss": "forward_kl", "coefficient": 1.0, "beta": None, "alpha": None}
    }


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacherz": {}}, "teacherz: unknown key; did you mean 'teachers'?"),
        ({"teacher_model": "x"}, "teacher_model: this key does not exist here"),
        ({"trainer": {"batchsize": 3}}, "trainer.batchsize: unknown key; did you mean 'batch_size'?"),
        ({"rollout": {"n": 3, "max_tokens": 8}}, "must be a multiple of rollout.n=3"),
    ],
)
def test_a_whole_file_is_checked_as_one(tmp_path: Path, part: type[Section], change: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_part(part, write(tmp_path, make_run_tree(**change)))
    assert said in str(caught.value)


def test_faults_of_a_part_are_explained_as_those_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path, {"gateway": {"prot": 1}, "teachers": {"math": {"host": "h"}}})
    with pytest.raises(ConfigError, match=r"gateway\.prot: unknown key; did you mean 'port'"):
        load_part(GatewayPart, path)
    with pytest.raises(ConfigError, match="teachers: Field required"):
        load_part(GatewayPart, write(tmp_path, {"gateway": {}}))


def test_overrides_reach_the_part_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, {"gateway": {}, "teachers": {"math": {}}})
    part = load_part(GatewayPart, path, ["gateway.port=9", "teachers.math.ports=[7]"])
    assert (part.gateway.port, part.teachers["math"].ports) == (9, [7])
    with pytest.raises(ConfigError, match=r"--set redis…: .* has no such section; it has gateway, teachers"):
        load_part(GatewayPart, path, ["redis.url=redis://x"])
