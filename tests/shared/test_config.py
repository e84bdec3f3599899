from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shared.config import RunConfig, load_run, parse
from shared.errors import ConfigError
from shared.model_folder import check_model_folder
from tests.builders import make_run_tree


def _message(**sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, make_run_tree(**sections), origin="run.yaml")
    return str(caught.value)


def test_smallest_run_is_valid() -> None:
    run = parse(RunConfig, make_run_tree(), origin="run.yaml")
    assert run.trainer.batch_size == 64
    assert run.teachers["math"].ports == [8101]


def test_the_trainer_has_as_many_ranks_as_its_sizes_make() -> None:
    sizes = {
        "tensor_parallel": 2,
        "pipeline_parallel": 3,
        "context_parallel": 5,
        "data_parallel": 7,
        "expert_parallel": 2,
    }
    assert parse(RunConfig, make_run_tree(trainer=sizes), origin="run.yaml").trainer.num_ranks == 210


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"batchsize": 3}}, "trainer.batchsize: unknown key; did you mean 'batch_size'?"),
        (
            {"teachers": {"math": {"model": "m", "max_topk": 3}}},
            "teachers.math.max_topk: unknown key; did you mean 'max_top_k'?",
        ),
        (
            {"prompts": {"sources": [{"data_source": "add", "task": "add", "sise": 1}]}},
            "prompts.sources.0.sise: unknown key; did you mean 'size'?",
        ),
        (
            {"enable_resource_pool": True},
            "enable_resource_pool: this key does not exist here; teachers always run on their own",
        ),
        ({"teacher_model": "x"}, "teacher_model: this key does not exist here; name every teacher under `teachers:`"),
        (
            {"teachers": {"math": {"model": "m"}, "teacher_model": {"model": "x"}}},
            "teachers.teacher_model: this key does not exist here; name every teacher under `teachers:`",
        ),
        (
            {"teachers": {"math": {"model": "m"}, "enable_resource_pool": True}},
            "teachers.enable_resource_pool: this key does not exist here; teachers always run on their own",
        ),
        (
            {"trainer": {"enable_resource_pool": True}},
            "trainer.enable_resource_pool: this key does not exist here; teachers always run on their own",
        ),
        (
            {"teachers": {"math": {"model": "m"}, "idle": {"model": "m"}}},
            "teachers.idle: no data_source is routed to it",
        ),
        (
            {"routes": {"add": "maths"}},
            "routes.add: there is no teacher 'maths'; did you mean 'math'? Known teachers: math",
        ),
        ({"routes": {"other": "math"}}, "data_source 'add' has no teacher: add `add: TEACHER` under routes"),
        ({"rollout": {"n": 3, "max_tokens": 8}}, "trainer.batch_size=64 must be a multiple of rollout.n=3"),
        ({"rollout": {"max_tokens": 64}}, "leaves no room for a prompt"),
        ({"rollout": {"max_tokens": 8, "top_k": 300}}, "rollout.top_k=300 is over teachers.math.max_top_k=256"),
        ({"rollout": {"max_tokens": 8, "top_k": 0}}, "forward_kl needs the teacher's top-k: set rollout.top_k to"),
        ({"rollout": {"max_tokens": 8, "temperature": 0.7}}, "no loss here states an objective for that, so write 1.0"),
        ({"trainer": {"lr": -1}}, "trainer.lr: Input should be greater than 0"),
        ({"trainer": {"betas": [0.9, 1.0]}}, "trainer.betas.1: Input should be less than 1"),
        (
            {"trainer": {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 4}},
            "trainer.expert_parallel must divide tensor_parallel x context_parallel x data_parallel",
        ),
        ({"trainer": {"betas": [-0.1, 0.9]}}, "trainer.betas.0: Input should be greater than or equal to 0"),
    ],
)
def test_faults_are_explained(sections: dict[str, object], said: str) -> None:
    assert said in _message(**sections)


def test_all_faults_come_at_once() -> None:
    text = _message(trainer={"lr": -1, "stepps": 1}, student={"model": "m"})
    assert "trainer.lr" in text and "trainer.stepps" in text and "student.max_model_len: Field required" in text


def test_overrides_reach_nested_keys_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make_run_tree()))
    run = load_run(file, ["trainer.lr=1e-4", "prompts.sources.0.size=7", "teachers.math.ports=[9000, 9001]"])
    assert run.trainer.lr == 1e-4
    assert run.prompts.sources[0].size == 7
    assert run.teachers["math"].ports == [9000, 9001]


@pytest.mark.parametrize(
    "override", ["trainer.lr", "=3", "prompts.sources.4.size=1", "run.name.x=1", "teachers.math.ports.0.x=1"]
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make_run_tree(teachers={"math": {"model": "m", "ports": [1]}})))
    with pytest.raises(ConfigError, match="--set"):
        load_run(file, [override])


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot be read"), ("a: [", "is not YAML"), ("- 1", "must hold a mapping")]
)
def test_unreadable_files(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_run(file)


def test_a_misspelled_teacher_is_named_from_both_sides() -> None:
    """The route that leads nowhere, and the teacher that nothing leads to because of it."""
    text = _message(teachers={"math": {"model": "m"}, "spell": {"model": "m"}}, routes={"add": "math", "back": "spel"})
    assert "routes.back: there is no teacher 'spel'; did you mean 'spell'?" in text
    assert "teachers.spell: no data_source is routed to it" in text


def test_model_folder_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"student\.model: there is no model folder"):
        check_model_folder(tmp_path / "none", setting="student.model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no"):
        check_model_folder(tmp_path, setting="student.model")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json"):
        check_model_folder(tmp_path, setting="student.model")
    (tmp_path / "tokenizer.json").write_text("{}")
    check_model_folder(tmp_path, setting="student.model")
