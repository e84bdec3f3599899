"""Balancing, ejection and identity, on a clock that the test moves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.gateway.pool import Pool
from services.gateway.replica import DEBT_FACTOR, DEBT_HALF_LIFE_S, MAX_EJECT_S, TRIAL_ANSWERS, Replica, State


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_pool(clock: Clock, count: int = 2, *, ready: bool = True, eject_after: int = 2) -> Pool:
    replicas = [
        Replica(f"http://host:{number}", eject_after=eject_after, probe_interval_s=1.0, clock=clock)
        for number in range(count)
    ]
    pool = Pool("math", replicas, rng=random.Random(0))
    if ready:
        for replica in replicas:
            assert pool.admit(replica, info())
    return pool


def info(fingerprint: str = "f1", model: str = "math") -> dict[str, str]:
    return {"fingerprint": fingerprint, "model": model}


def fail(replica: Replica, times: int = 1, num_tokens: int = 2000) -> None:
    for _ in range(times):
        with replica.attempt(num_tokens) as attempt:
            attempt.failed("boom")


def answer(replica: Replica, times: int = 1) -> None:
    for _ in range(times):
        with replica.attempt(10) as attempt:
            attempt.succeeded()


def test_a_replica_never_seen_ready_gets_no_traffic(clock):
    pool = make_pool(clock, ready=False)
    assert pool.choose() is None and not pool.is_ready
    pool.admit(pool.replicas[1], info())
    assert pool.is_ready
    assert {pool.choose() for _ in range(20)} == {pool.replicas[1]}


def test_the_less_loaded_of_two_is_chosen_and_equals_share(clock):
    pool = make_pool(clock)
    first, second = pool.replicas
    chosen = Counter(pool.choose() for _ in range(1000))
    assert min(chosen.values()) > 400
    with first.attempt(100), second.attempt(99):
        assert {pool.choose() for _ in range(20)} == {second}
    assert first.outstanding_tokens == second.outstanding_tokens == first.in_flight == 0


def test_tokens_are_balanced_not_requests(clock):
    pool = make_pool(clock)
    rng, totals, held = random.Random(1), Counter(), []
    for _ in range(2000):
        replica, num_tokens = pool.choose(), rng.choice([10, 4000])
        attempt = replica.attempt(num_tokens)
        attempt.__enter__()
        held.append(attempt)
        totals[replica] += num_tokens
    low, high = sorted(totals.values())
    assert high - low <= 4000
    for attempt in held:
        attempt.__exit__(None, None, None)
    assert all(replica.outstanding_tokens == 0 for replica in pool.replicas)


def test_two_random_choices_of_many(clock):
    pool = make_pool(clock, 8)
    with pool.replicas[0].attempt(10**6):
        chosen = Counter(pool.choose() for _ in range(800))
    assert pool.replicas[0] not in chosen  # never the worse of two
    assert len(chosen) == 7 and max(chosen.values()) < 200  # and not one favourite


def test_excluded_replicas_are_not_chosen(clock):
    pool = make_pool(clock)
    assert pool.choose(exclude=pool.replicas[:1]) is pool.replicas[1]
    assert pool.choose(exclude=pool.replicas) is None


def test_a_failure_weighs_as_load_and_fades(clock):
    pool = make_pool(clock, eject_after=100)
    bad, good = pool.replicas
    fail(bad, num_tokens=2000)
    assert bad.load() == DEBT_FACTOR * 2000
    with good.attempt(15_000):
        assert {pool.choose() for _ in range(20)} == {good}  # busy, but not failing
    clock.now += DEBT_HALF_LIFE_S
    assert bad.load() == pytest.approx(DEBT_FACTOR * 1000)
    clock.now += 100
    assert bad.load() < 1


def test_failing_fast_attracts_no_load(clock):
    """Never ejected at all here, the black hole still gets next to nothing."""
    pool = make_pool(clock, eject_after=10**9)
    hole, good = pool.replicas
    seen, running = Counter(), []
    for _ in range(1000):
        clock.now += 0.01
        replica = pool.choose()
        seen[replica] += 1
        if replica is hole:
            fail(hole, num_tokens=500)
        else:
            running.append(good.attempt(500))
            running[-1].__enter__()
            if len(running) > 4:
                running.pop(0).__exit__(None, None, None)
    assert seen[hole] < 30 and seen[good] > 970


def test_ejection_trial_and_return(clock):
    pool = make_pool(clock)
    bad, good = pool.replicas
    ejected = []
    bad.on_eject = ejected.append
    fail(bad)
    answer(bad)
    fail(bad)
    assert bad.state is State.READY  # not in a row
    fail(bad)
    assert bad.state is State.EJECTED and ejected == [bad] and bad.ban_s() == 1.0
    assert {pool.choose() for _ in range(20)} == {good}
    clock.now += 100
    pool.admit(bad, info())
    assert bad.state is State.HALF_OPEN
    with bad.attempt(1):
        assert {pool.choose() for _ in range(20)} == {good}  # one at a time
        assert pool.choose(exclude=[good]) is bad  # unless there is nobody else
    answer(bad, TRIAL_ANSWERS - 1)
    assert bad.state is State.HALF_OPEN
    answer(bad)
    assert bad.state is State.READY


def test_a_failed_trial_ejects_at_once_and_for_longer(clock):
    pool = make_pool(clock)
    bad = pool.replicas[0]
    fail(bad, 2)
    waits = [bad.ban_s()]
    for _ in range(7):
        clock.now += waits[-1]
        pool.admit(bad, info())
        fail(bad)
        assert bad.state is State.EJECTED
        waits.append(bad.ban_s())
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_EJECT_S, MAX_EJECT_S, MAX_EJECT_S]


def test_a_verdict_from_before_the_ejection_does_not_end_the_trial(clock):
    pool = make_pool(clock)
    bad = pool.replicas[0]
    with bad.attempt(5) as old:
        fail(bad, 2)
        clock.now += 1
        pool.admit(bad, info())
        old.failed("timed out at last")
        assert bad.state is State.HALF_OPEN


def test_a_full_replica_is_not_ejected(clock):
    pool = make_pool(clock)
    full, other = pool.replicas
    for _ in range(10):
        with full.attempt(100) as attempt:
            attempt.overloaded("429")
    assert full.state is State.READY
    assert {pool.choose() for _ in range(20)} == {other}


def test_probes_eject_a_replica_that_is_gone_and_respect_one_that_says_no(clock):
    pool = make_pool(clock)
    first, second = pool.replicas
    first.probe_failed("refused")
    assert first.state is State.READY
    first.probe_failed("refused")
    assert first.state is State.EJECTED
    second.probe_refused("asleep")
    assert second.state is State.UNREADY and not pool.is_ready
    pool.admit(second, info())
    assert second.state is State.READY
    fresh = make_pool(clock, ready=False).replicas[0]
    fresh.probe_refused("loading")
    assert fresh.state is State.STARTING


def test_another_fingerprint_is_refused_also_while_the_right_replica_is_away(clock):
    pool = make_pool(clock, ready=False)
    right, wrong = pool.replicas
    assert pool.admit(right, info("f1"))
    assert not pool.admit(wrong, info("f2"))
    assert wrong.state is State.REFUSED and "f1" in wrong.last_error
    fail(right, 2)
    assert not pool.admit(wrong, info("f2"))
    assert not pool.is_ready and pool.fingerprint == "f1"
    assert pool.admit(wrong, info("f1"))  # restarted with the right model
    assert wrong.state is State.READY


def test_a_teacher_may_be_replaced_once_all_replicas_report_the_new_one(clock):
    pool = make_pool(clock)
    first, second = pool.replicas
    assert not pool.admit(first, info("f2"))
    assert pool.admit(second, info("f2"))
    assert pool.fingerprint == "f2"
    assert pool.admit(first, info("f2"))
    assert first.state is second.state is State.READY


def test_a_replica_of_another_teacher_is_refused(clock):
    pool = make_pool(clock, ready=False)
    assert not pool.admit(pool.replicas[0], info(model="chat"))
    assert "'chat'" in pool.replicas[0].last_error


def test_an_error_is_shown_with_its_age_until_and_after_the_recovery(clock):
    def shown() -> list[object]:
        described = replica.describe()
        return [described[name] for name in ("last_error", "last_error_age_s", "recovered")]

    (replica,) = make_pool(clock, 1).replicas
    assert shown() == [None, None, None] and replica.trouble is None
    fail(replica, 2)
    clock.now += 7.04
    assert replica.state is State.EJECTED and shown() == ["boom", 7.0, False] and replica.trouble == "boom"
    replica.probe_passed(info())
    assert replica.state is State.HALF_OPEN and shown() == ["boom", 7.0, False]
    answer(replica, TRIAL_ANSWERS)
    clock.now += 60
    assert replica.state is State.READY and shown() == ["boom", 67.0, True] and replica.trouble is None
    replica.probe_refused("asleep")
    clock.now += 1
    assert shown() == ["asleep", 1.0, False]
    replica.probe_passed(info())
    assert shown() == ["asleep", 1.0, True]
    with replica.attempt(10) as attempt:
        attempt.overloaded("full")
    assert shown() == ["full", 0.0, False]
    answer(replica)
    assert shown() == ["full", 0.0, True]
