"""Groups of requests with one prompt: where they go, how busy that may make a replica, and that gateways agree."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.gateway import affinity
from services.gateway.pool import Pool
from services.gateway.replica import Attempt, Replica
from shared.prefix import prefix_key

KEYS = [prefix_key(str(number).encode()) for number in range(4000)]


def make_pool(count: int, seed: int = 0) -> Pool:
    replicas = [Replica(f"http://host:{number}", eject_after=2, probe_interval_s=1.0) for number in range(count)]
    pool = Pool("math", replicas, rng=random.Random(seed))
    for replica in replicas:
        pool.admit(replica, {"fingerprint": "f1"})
    return pool


def hold(replica: Replica, num_tokens: int) -> object:
    attempt = replica.attempt(num_tokens)
    attempt.__enter__()
    return attempt


def test_idle_replicas_keep_groups_together_and_share_the_groups():
    pool = make_pool(4)
    homes = {key: {pool.choose(prefix_key=key) for _ in range(4)} for key in KEYS}
    assert all(len(replicas) == 1 for replicas in homes.values())
    shares = Counter(replica for (replica,) in homes.values())
    assert all(850 < share < 1150 for share in shares.values())


def test_gateways_that_list_replicas_in_another_order_agree():
    first, second = make_pool(5), make_pool(5, seed=1)
    second.replicas.reverse()
    assert [first.choose(prefix_key=key).name for key in KEYS] == [second.choose(prefix_key=key).name for key in KEYS]


def test_a_replica_that_joins_moves_only_its_own_share():
    small, large = make_pool(4), make_pool(5)
    moved = [
        after.name for key in KEYS if (after := large.choose(prefix_key=key)).name != small.choose(prefix_key=key).name
    ]
    assert set(moved) == {"host:4"} and 700 < len(moved) < 900


def test_over_the_bound_a_group_goes_to_the_next_of_its_order_and_comes_back():
    pool = make_pool(3)
    first, second, third = affinity.rank("a", pool.replicas)
    held = [hold(replica, 4000) for replica in pool.replicas]
    assert pool.choose(prefix_key="a") is first
    more = hold(first, 2500)  # 6500 of a mean of 4833: 1.34 times
    assert pool.choose(prefix_key="a") is second
    full = hold(second, 4000)
    assert pool.choose(prefix_key="a") is first  # the mean is 6167 now
    more.__exit__(None, None, None)
    full.__exit__(None, None, None)
    assert pool.choose(prefix_key="a") is first and pool.choose({first, second}, "a") is third
    for attempt in held:
        attempt.__exit__(None, None, None)


def test_a_failing_home_is_left_and_without_any_good_one_two_choices_decide():
    pool = make_pool(2)
    first, second = affinity.rank("a", pool.replicas)
    Attempt(first, 1000).overloaded("full")
    assert {pool.choose(prefix_key="a") for _ in range(20)} == {second}
    Attempt(second, 4000).overloaded("full")
    assert {pool.choose(prefix_key="a") for _ in range(20)} == {first}


@pytest.mark.parametrize("skew", [0.0, 1.0], ids=["equal groups", "some prompts are far more frequent"])
def test_under_load_the_bound_holds_groups_stay_together_and_work_is_shared_evenly(skew):
    """Two gateways, four replicas, 64 requests in flight: what each gateway sees stays within the bound."""
    gateways = [make_pool(4), make_pool(4, seed=1)]
    rng = random.Random(2)
    weights = [1 / (rank + 1) ** skew for rank in range(200)]
    done, at_home, total = Counter(), 0, 4000
    running: list[object] = []
    for number in range(total):
        pool = gateways[number % 2]
        key, num_tokens = rng.choices(KEYS[:200], weights)[0], rng.randint(200, 800)
        replica = pool.choose(prefix_key=key)
        mean = sum(other.outstanding_tokens for other in pool.replicas) / 4
        assert replica.outstanding_tokens <= max(affinity.BOUND * mean, affinity.FREE_TOKENS)
        at_home += replica is affinity.rank(key, pool.replicas)[0]
        done[replica.name] += num_tokens
        running.append(hold(replica, num_tokens))
        if len(running) > 64:
            running.pop(rng.randrange(len(running))).__exit__(None, None, None)
    shares = [tokens / (sum(done.values()) / 4) for tokens in done.values()]
    assert at_home > 0.6 * total and max(shares) < affinity.BOUND and min(shares) > 0.75
