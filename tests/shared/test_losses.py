"""Losses that would train towards nothing are refused when the configuration is read, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import ObjectiveSection, RunConfig, parse
from shared.errors import ConfigError
from shared.losses import LOSSES, NO_LOSS
from tests.builders import make_run_tree

TRAINABLE = sorted(name for name, spec in LOSSES.items() if not spec.refused)


def teacher(**changes: Any) -> dict[str, Any]:
    return {"teachers": {"math": {"model": "models/math", **changes}}}


def rollout(**changes: Any) -> dict[str, Any]:
    return {"rollout": {"n": 4, "max_tokens": 8, "top_k": 16, **changes}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (teacher(loss="k1"), "teachers.math.loss: k1 is refused: as a supervised loss its gradient carries no teacher"),
        (teacher(loss="topk_policy_gradient"), "a top-k KL used as a scalar advantage has zero expected gradient"),
        (teacher(loss="topk_reverse_kl"), "drives the student's mass out of the top-k; write reverse_kl"),
        (teacher(loss="forwrd_kl"), f"forwrd_kl is unknown; there are {', '.join(TRAINABLE)}"),
        ({**teacher(loss="reverse_kl"), **rollout(top_k=0)}, "reverse_kl needs the student's top-k: set rollout.top_k"),
        ({**teacher(loss="jsd"), **rollout(top_k=0)}, "jsd needs the teacher's top-k"),
        (teacher(loss="jsd", beta=0.0), "teachers.math.beta: Input should be greater than 0"),
        (teacher(loss="jsd", beta=1.0), "teachers.math.beta: Input should be less than 1"),
        (teacher(loss="jsd", alpha=0.5), "teachers.math.alpha belongs to the loss skew_kl"),
        (teacher(beta=0.5), "teachers.math.beta belongs to the loss jsd"),
        (teacher(coefficient=0), "teachers.math.coefficient"),
        (rollout(temperature=0.7), "no loss here states an objective for that"),
        ({"trainer": {"reward_coefficient": 0.1}, **rollout(n=1)}, "every advantage is 0: write rollout.n of 2"),
    ],
)
def test_what_would_train_towards_nothing_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(RunConfig, make_run_tree(**sections), origin="run.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_is_sound_passes(name: str) -> None:
    config = parse(RunConfig, make_run_tree(**teacher(loss=name), trainer={"reward_coefficient": 0.5}), origin="run")
    assert config.teachers["math"].loss == name


@pytest.mark.parametrize("name", sorted(name for name, spec in LOSSES.items() if spec.top_k_of is None))
def test_the_sampled_token_alone_is_enough_for_some(name: str) -> None:
    if not LOSSES[name].refused:
        parse(RunConfig, make_run_tree(**teacher(loss=name), **rollout(top_k=0)), origin="run")


def test_the_teachers_weight_is_the_losss_default_where_none_is_written() -> None:
    assert ObjectiveSection(loss="jsd").teacher_weight == 0.5
    assert ObjectiveSection(loss="jsd", beta=0.9).teacher_weight == 0.9
    assert ObjectiveSection(loss="skew_kl").teacher_weight == 0.1
    assert ObjectiveSection(loss="forward_kl").teacher_weight == 0.0


def test_no_name_is_both_a_loss_and_none() -> None:
    assert not LOSSES.keys() & NO_LOSS.keys()
