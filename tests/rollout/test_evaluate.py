"""Evaluation on held-out prompts: values, and that one worker does it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.rollout.weights import WeightFollower
from shared.errors import Problem
from tests.conftest import wait_until
from tests.rollout.conftest import World
from tests.rollout.fakes import EOS


async def _served(world: World) -> WeightFollower:
    """A follower that serves version 1, which asks to be evaluated."""
    await world.announce(1, evaluate=True)
    follower = world.follower()
    world.run_behind(follower.run())
    await asyncio.wait_for(follower.wait_checked(), 5)
    return follower


async def test_values(world: World) -> None:
    follower = await _served(world)
    result = await world.evaluator(follower).evaluate(follower.current)
    spell = result["data_sources"]["spell"]
    assert (result["version"], result["step"]) == (1, 0)
    assert spell["teacher"] == "words"
    assert spell["prompts"] == 5
    assert spell["accuracy"] == 1.0  # the fake student's greedy answer is right
    # sampled: ids 78, 79, EOS at -0.5 each; the teacher says -id / 100
    assert spell["tokens"] == 15
    assert spell["reverse_kl"] == pytest.approx(np.mean([-0.5 + i / 100 for i in (78, 79, EOS)]), abs=1e-6)
    # the fake teacher's likeliest id is always the one that it is asked about
    assert result["teacher_accuracy"] == {"words": {"spell": 1.0}}


async def test_teacher_accuracy_needs_every_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = await _served(world)
    evaluator = world.evaluator(follower)
    score = world.client.score

    async def end_is_not_likeliest(request, teacher):
        response = await score(request, teacher=teacher)
        if request.top_k:
            top_ids = response.results[0].top_ids.copy()
            top_ids[-1, 0] += 1
            response.results[0].top_ids = top_ids
        return response

    monkeypatch.setattr(world.client, "score", end_is_not_likeliest)
    result = await evaluator.evaluate(follower.current)
    assert result["teacher_accuracy"] == {"words": {"spell": 0.0}}


async def test_one_of_two_workers_evaluates(world: World) -> None:
    follower = await _served(world)
    evaluators = [world.evaluator(follower, name) for name in ("w0", "w1")]
    for evaluator in evaluators:
        world.run_behind(evaluator.run())

    async def stored() -> bool:
        return await world.policy.evaluation(1) is not None

    await wait_until(stored)
    result = await world.policy.evaluation(1)
    assert result["data_sources"]["spell"]["accuracy"] == 1.0
    assert world.teacher.requests == 5 + 5  # one scoring of each sample, one of each teacher answer


async def test_a_failing_teacher_leaves_no_result(world: World) -> None:
    follower = await _served(world)
    world.teacher.problem = Problem("opd:invalid", "no")
    await world.evaluator(follower)._evaluate_and_store(follower.current)
    assert await world.policy.evaluation(1) is None
    world.teacher.problem = None
    await world.evaluator(follower)._evaluate_and_store(follower.current)
    assert (await world.policy.evaluation(1))["data_sources"]["spell"]["accuracy"] == 1.0
