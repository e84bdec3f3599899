"""One worker's loop against a real Valkey and a teacher over real HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from services.rollout import worker as worker_module
from services.rollout.sampler import Completion
from services.rollout.worker import group_advantages, teacher_arrays
from shared.errors import EngineDied, Problem, TeacherError
from shared.leases import Held, Lease
from shared.wire import SequenceScores
from tests.conftest import wait_until
from tests.rollout.conftest import World
from tests.rollout.fakes import EOS


async def test_publishes_what_was_sampled_and_scored(world: World) -> None:
    await world.announce(1)
    world.start()
    trajectories = await world.wait_published(12)
    assert sorted(t.id for t in trajectories) == sorted(f"{seq}-{i}" for seq in range(6) for i in range(2))
    first = next(t for t in trajectories if t.id == "2-1")
    record = world.prompts.record_for(2)
    prompt_ids = world.renderer.render(record)
    assert first.token_ids.tolist() == [*prompt_ids, 78, 79, EOS]  # the end of sequence is part of the response
    assert first.prompt_len == len(prompt_ids)
    assert first.prompt_id == record.prompt_id
    assert (first.data_source, first.teacher, first.fingerprint) == ("spell", "words", "print")
    assert first.version_spans == ((1, 3),)
    assert first.loss_mask.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(first.rollout_logprobs, np.full(3, -0.5, np.float32))
    np.testing.assert_allclose(first.teacher_logprobs, [-0.78, -0.79, -2.56])
    assert first.top_ids.tolist() == [[78, 79, 80], [79, 80, 81], [256, 257, 258]]
    np.testing.assert_allclose(first.top_logprobs[0], [-0.78, -0.79, -0.80])
    assert first.reward == 0.0  # "no" is nobody's name backward
    assert first.created_at <= first.scored_at
    assert world.sampler.samples == 12  # as many as the run needs, and no more
    assert await world.store.llen(world.keys.produced) == 12
    assert await world.store.zcard(world.keys.leases) == 0


async def test_candidates_are_the_students_own_where_the_loss_wants_them(world: World) -> None:
    objective = world.config.objectives["words"].model_copy(update={"loss": "reverse_kl"})
    world.config = world.config.model_copy(update={"objectives": {"words": objective}})
    world.__post_init__()
    await world.announce(1, needed=2)
    world.start()
    first, _ = await world.wait_published(2)
    assert first.candidate_ids.tolist() == [[5, 6, 7]] * 3
    np.testing.assert_allclose(first.candidate_logprobs, [[-0.05, -0.06, -0.07]] * 3)
    assert first.top_ids.shape == (3, 0)  # the teacher's own are not asked for
    np.testing.assert_allclose(first.teacher_logprobs, [-0.78, -0.79, -2.56])


async def test_the_advantage_is_relative_to_the_prompts_own_completions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = iter([1.0, 0.0])
    monkeypatch.setattr(worker_module.tasks, "check", lambda *_: next(rewards))
    await world.announce(1, needed=2)
    world.start()
    published = sorted(await world.wait_published(2), key=lambda t: t.id)
    assert [(t.reward, t.advantage) for t in published] == [(1.0, 0.5), (0.0, -0.5)]


def test_advantages_without_a_checker_and_of_equals() -> None:
    assert group_advantages([None, None]) == [None, None]
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]


async def test_a_right_answer_is_rewarded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.sampler, "answer", lambda ids, greedy: [*ids[-3::-1], EOS])
    await world.announce(1, needed=2)
    world.start()
    assert [t.reward for t in await world.wait_published(2)] == [1.0, 1.0]


async def test_never_samples_before_weights_are_announced(world: World) -> None:
    world.start()
    await asyncio.sleep(0)
    assert await world.leases.take(0) == Held("no_policy")
    await world.announce(1, needed=2)
    await world.wait_published(2)
    assert world.sampler.loads == [1]


async def test_gate_counts_versions_ahead(world: World) -> None:
    """With batches of 4 and max_staleness 4, five batches may wait for the trainer, and no completion more."""
    await world.announce(1, needed=1000)
    world.start()
    await world.wait_published(20)

    async def held() -> bool:
        return await world.store.zcard(world.keys.leases) == 0

    await wait_until(held)
    assert await world.leases.take(1) == Held("staleness")
    assert await world.store.xlen(world.keys.trajectories) == 20


async def test_a_completion_over_a_load_carries_both_versions(world: World) -> None:
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    await world.announce(2, needed=2)
    await wait_until(lambda: world.sampler.loads == [1, 2])
    world.sampler.hold.set()
    trajectories = await world.wait_published(2)
    assert [t.version_spans for t in trajectories] == [((1, 1), (2, 2))] * 2
    assert [t.oldest_version for t in trajectories] == [1, 1]


async def test_teacher_failure_requeues_and_gives_up_in_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_RETRY_DELAY_S", 0.01)
    world.teacher.problem = Problem("opd:invalid", "no such id")
    await world.announce(1, needed=2)
    world.start()

    async def given_up() -> bool:
        return await world.counter("prompts_failed") == 1

    await wait_until(given_up)
    assert await world.counter("requeued") >= 2  # max_attempts
    (_, dead), *_ = await world.store.xrange(world.keys.dead)
    assert dead[b"id"] == b"0"
    assert b"no such id" in dead[b"reason"]
    assert await world.published() == []
    world.teacher.problem = None
    assert len(await world.wait_published(2)) == 2  # the run goes on with the next prompt


async def test_stop_gives_prompts_back_uncharged(world: World) -> None:
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    task = world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    world.stop.set()
    await asyncio.wait_for(task, 5)
    lease = await world.leases.take(1)
    assert isinstance(lease, Lease)
    assert (lease.seq, lease.attempt) == (0, 1)


async def test_stop_lets_work_in_flight_end(world: World) -> None:
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    task = world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    world.stop.set()
    world.sampler.hold.set()
    await asyncio.wait_for(task, 5)
    assert len(await world.published()) == 2


async def test_a_lost_lease_publishes_nothing(world: World) -> None:
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    await world.store.hset(world.keys.holders, "0", "somebody else")
    world.sampler.hold.set()

    async def lost() -> bool:
        return await world.counter("lease_lost") == 1

    await wait_until(lost)
    assert await world.published() == []


async def test_leases_are_renewed_while_work_lasts(world: World) -> None:
    world.config = world.config.model_copy(update={"rollout": world.config.rollout.model_copy(update={"lease_s": 0.3})})
    world.__post_init__()
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    first = await world.store.zscore(world.keys.leases, 0)

    async def renewed_thrice() -> bool:
        return await world.store.zscore(world.keys.leases, 0) > first + 350

    await wait_until(renewed_thrice)
    world.sampler.hold.set()
    assert len(await world.wait_published(2)) == 2
    assert await world.counter("lease_expired") == 0


async def test_renewal_of_a_lost_lease_stops_the_work(world: World) -> None:
    world.config = world.config.model_copy(update={"rollout": world.config.rollout.model_copy(update={"lease_s": 0.3})})
    world.__post_init__()
    world.sampler.hold.clear()  # for ever: only the renewal can end this prompt
    await world.announce(1, needed=2)
    world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    await world.store.hset(world.keys.holders, "0", "somebody else")
    lost = worker_module.metrics.LEASES_LOST._value
    before = lost.get()
    await wait_until(lambda: lost.get() == before + 1)


async def test_a_dead_engine_ends_the_worker(world: World) -> None:
    world.sampler.hold.clear()
    await world.announce(1, needed=2)
    task = world.start()
    await wait_until(lambda: world.sampler.samples == 2)
    world.sampler.alive = False
    with pytest.raises(EngineDied, match="engine has died"):
        await asyncio.wait_for(task, 5)
    assert isinstance(await world.leases.take(1), Lease)  # somebody else can have the prompt at once


def scores(**changes: np.ndarray) -> SequenceScores:
    values = {
        "token_ids": np.array([7, 8], np.int32), "logprobs": np.array([-1, -2], np.float32),
        "top_ids": np.array([[1], [2]], np.int32), "top_logprobs": np.array([[-1], [-np.inf]], np.float32),
    }  # fmt: skip
    return SequenceScores(**{**values, **changes})


COMPLETION = Completion([7, 8], np.array([-1, -1], np.float32), [(1, 2)], "stop", np.empty((2, 0), np.int32))


def test_teacher_arrays_are_kept_as_they_are() -> None:
    arrays = teacher_arrays(COMPLETION, scores(), top_k=1)
    assert arrays["top_logprobs"].tolist() == [[-1], [-np.inf]]  # a probability of zero is data
    none = teacher_arrays(COMPLETION, scores(top_ids=None, top_logprobs=None), top_k=0)
    assert none["top_ids"].shape == none["candidate_ids"].shape == none["candidate_logprobs"].shape == (2, 0)


@pytest.mark.parametrize("logprobs", [None, np.zeros((2, 2), np.float32), np.array([[-1], [np.nan]], np.float32)])
def test_candidates_that_do_not_fit_are_refused(logprobs: np.ndarray | None) -> None:
    completion = replace(COMPLETION, top_ids=np.array([[1], [2]], np.int32))
    with pytest.raises(TeacherError, match="candidates"):
        teacher_arrays(completion, scores(top_ids=None, top_logprobs=None, candidate_logprobs=logprobs), top_k=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": np.array([8, 7], np.int32)}, "other|not those"),
        ({"logprobs": np.array([-1, np.nan], np.float32)}, "not finite"),
        ({"logprobs": np.array([-1, -np.inf], np.float32)}, "not finite"),
        ({"top_logprobs": np.array([[-1], [np.nan]], np.float32)}, "not finite"),
        ({"top_ids": None, "top_logprobs": None}, "top_k=1"),
    ],
)
def test_teacher_arrays_refuse(changes: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(TeacherError, match=reason) as caught:
        teacher_arrays(COMPLETION, scores(**changes), top_k=1)
    assert caught.value.retry_after_s is not None
