"""What a run may change when it is resumed, and what makes another run of it."""

from __future__ import annotations

import pytest

from shared.config import RunConfig, parse
from shared.errors import ConfigError
from shared.resume import check_same_run
from tests.builders import make_run_tree


def run(**sections: object) -> RunConfig:
    return parse(RunConfig, make_run_tree(**sections), origin="test")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"run": {"name": "test", "dir": "moved/here", "steps": 9}},
        {"teachers": {"math": {"model": "models/math", "host": "far", "ports": [1, 2, 3], "threads": 9}}},
        {"redis": {"url": "redis://:other@host/0"}, "gateway": {"port": 1, "request_timeout_s": 9}},
        {"rollout": {"n": 4, "max_tokens": 8, "top_k": 16, "port": 9, "concurrency": 1, "lease_s": 7}},
        {"trainer": {"lr": 1e-7, "betas": [0.5, 0.5], "checkpoint_every": 1, "microbatch_tokens": 64, "threads": 1}},
        {"flow": {"max_staleness": 0}, "eval": {"size": 1, "every_steps": 1}},
    ],
)
def test_how_it_runs_may_change(sections: dict[str, object]) -> None:
    check_same_run(run(), run(**sections), where="the run in x")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"name": "test", "dir": "runs/test", "steps": 4, "seed": 3}}, "run.seed was 0 and is 3"),
        (
            {"student": {"model": "models/other", "max_model_len": 64}},
            "student.model was 'models/student' and is 'models/other'",
        ),
        (
            {"teachers": {"math": {"model": "models/better"}}},
            "teachers.math.model was 'models/math' and is 'models/better'",
        ),
        (
            {"teachers": {"math": {"model": "models/math", "loss": "policy_gradient"}}},
            "teachers.math.loss was 'forward_kl' and is 'policy_gradient'",
        ),
        (
            {"prompts": {"sources": [{"data_source": "add", "task": "add", "size": 9}]}},
            "prompts.sources.0.size was 1000 and is 9",
        ),
        ({"rollout": {"n": 8, "max_tokens": 8, "top_k": 16}}, "rollout.n was 4 and is 8"),
        ({"trainer": {"batch_size": 32}}, "trainer.batch_size was 64 and is 32"),
    ],
)
def test_what_it_is_may_not(sections: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_same_run(run(), run(**sections), where="the run in x")
    assert said in str(caught.value) and "start anew with --fresh, or take another --set run.dir" in str(caught.value)


def test_a_teacher_more_is_another_run_and_long_lists_are_cut() -> None:
    teachers = {"math": {"model": "models/math"}, "extra": {"model": "m"}}
    now = run(teachers=teachers, routes={"add": "math", "more": "extra"})
    with pytest.raises(ConfigError, match=r"routes.more was not there and is 'extra'; .*teachers\.extra"):
        check_same_run(run(), now, where="the run in x")
