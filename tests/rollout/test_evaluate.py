"""Evaluation on held-out prompts: values, and that one worker does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.rollout.weights import WeightFollower
from shared.config import SourceSection
from shared.errors import Problem
from shared.prompts import PromptSet
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
    assert result["teacher_accuracy"] == {"words": {"spell": 1.0}}


def _half_right(prompt: list[int]) -> list[int]:
    """In prose, the number that the prompt asks for where it is even, else another one. "!" is token 0, and so on."""
    number = int("".join(chr(33 + token_id) for token_id in prompt[:-1]))
    text = f"so:{number if number % 2 == 0 else number + 1}."
    return [*(ord(character) - 33 for character in text), EOS]


@pytest.mark.parametrize(
    ("source", "greedy", "right"),
    [
        ({"task": "spell_backward"}, lambda prompt: [78, 79, EOS], lambda record: False),
        ({"task": "reasoning_gym:spell_backward"}, lambda prompt: [78, 79, EOS], lambda record: False),
        ({"answers": True}, _half_right, lambda record: int(record.answer) % 2 == 0),
        ({"answers": False}, _half_right, None),
    ],
)
async def test_a_teacher_s_own_answers_are_checked_wherever_there_is_a_checker(
    world: World, tmp_path: Path, source: dict, greedy: Callable, right: Callable | None
) -> None:
    if "answers" in source:
        lines = [{"prompt": f"{n}="} | ({"answer": str(n)} if source["answers"] else {}) for n in range(300)]
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = {"file": tmp_path / "own.jsonl"}
    world.teacher.greedy = greedy
    world.prompts = PromptSet([SourceSection(data_source="spell", size=200, **source)], 0, shuffle=False)
    records = world.prompts.held_out(world.config.eval.size)["spell"]
    follower = await _served(world)
    result = await world.evaluator(follower).evaluate(follower.current)
    expected = None if right is None else pytest.approx(np.mean([right(record) for record in records]))
    assert result["teacher_accuracy"] == {"words": {"spell": expected}}
    assert world.teacher.generated == (0 if right is None else len(records))


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
    assert (world.teacher.requests, world.teacher.generated) == (5, 5)


async def test_a_failing_teacher_leaves_no_result(world: World) -> None:
    follower = await _served(world)
    world.teacher.problem = Problem("opd:invalid", "no")
    await world.evaluator(follower)._evaluate_and_store(follower.current)
    assert await world.policy.evaluation(1) is None
    world.teacher.problem = None
    await world.evaluator(follower)._evaluate_and_store(follower.current)
    assert (await world.policy.evaluation(1))["data_sources"]["spell"]["accuracy"] == 1.0
