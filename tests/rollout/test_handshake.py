"""Teachers that are late, or never come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.rollout import handshake
from services.rollout.handshake import check_teachers
from shared.errors import ConfigError, Problem
from tests.rollout.fakes import FakeTeacher, make_config, make_student

LOADING = Problem("opd:unavailable", "loading the model", retry_after_s=1)


async def test_a_teacher_that_still_loads_is_waited_for(tmp_path: Path) -> None:
    teacher = FakeTeacher("words", make_student(tmp_path / "student"))
    teacher.problem = LOADING
    async with teacher.serve() as port:
        asking = asyncio.create_task(check_teachers(make_config(tmp_path, gateway={"port": port}), None))
        done, _ = await asyncio.wait({asking}, timeout=0.6)  # a first try has failed by then
        assert not done
        teacher.problem = None
        assert await asyncio.wait_for(asking, 10) == 64


async def test_teachers_that_never_get_ready_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "START_TIMEOUT_S", 0.0)
    teacher = FakeTeacher("words", make_student(tmp_path / "student"))
    teacher.problem = LOADING
    async with teacher.serve() as port:
        with pytest.raises(ConfigError, match=r"teacher 'words' was not ready within 0 s: .*loading the model.*log"):
            await check_teachers(make_config(tmp_path, gateway={"port": port}), None)


async def test_a_gateway_that_is_not_there_is_named_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_UNREACHABLE_S", 0.0)
    make_student(tmp_path / "student")
    with pytest.raises(ConfigError, match="teacher 'words' is not to be had at the gateway"):
        await check_teachers(make_config(tmp_path, gateway={"port": 1}), None)


async def test_a_teacher_that_cannot_score_the_students_candidates_is_named(tmp_path: Path) -> None:
    teacher = FakeTeacher("words", make_student(tmp_path / "student"))
    teacher.info["limits"]["max_candidates"] = 2
    async with teacher.serve() as port:
        config = make_config(tmp_path, gateway={"port": port})
        assert await check_teachers(config, None) == 64  # forward_kl asks for no candidates
        objective = config.objectives["words"].model_copy(update={"loss": "reverse_kl"})
        config = config.model_copy(update={"objectives": {"words": objective}})
        with pytest.raises(ConfigError, match=r"is over the 2 ids a row that teacher .words. scores for .*reverse_kl"):
            await check_teachers(config, None)
