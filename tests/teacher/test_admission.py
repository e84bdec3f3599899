"""Admission: what it frees, and whether Retry-After is true, against engines simulated on a clock of their own."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import AbstractContextManager

import pytest

from services.teacher.admission import Admission
from shared.errors import Problem


def test_admission_frees_its_tokens_whatever_happens() -> None:
    admission = Admission(10)
    with pytest.raises(KeyError), admission.admit(10):
        raise KeyError
    assert admission.tokens == 0
    with admission.admit(6):
        with admission.admit(4):
            assert admission.tokens == 10
        with pytest.raises(Problem) as caught, admission.admit(5):
            pass
    assert caught.value.status == 429
    assert 0 < caught.value.retry_after_s <= 60


async def test_empty_is_when_nobody_is_in() -> None:
    admission = Admission(10)
    await admission.wait_empty()
    with admission.admit(3):
        waiting = asyncio.create_task(admission.wait_empty())
        with admission.admit(2):
            pass
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


class Engine:
    """Answers in the order asked, `lanes` requests at a time that end together, `rate` tokens a second in all."""

    def __init__(self, max_tokens: int, rate: float, lanes: int) -> None:
        self.now = 0.0
        self.admission = Admission(max_tokens, lambda: self.now)
        self.rate = rate
        self.lanes = lanes
        self._queue: deque[tuple[int, AbstractContextManager[None]]] = deque()

    def submit(self, num_tokens: int) -> None:
        request = self.admission.admit(num_tokens)
        request.__enter__()
        self._queue.append((num_tokens, request))

    def step(self) -> None:
        """The next requests are answered."""
        batch = [self._queue.popleft() for _ in range(min(self.lanes, len(self._queue)))]
        self.now += sum(num_tokens for num_tokens, _ in batch) / self.rate
        for _, request in batch:
            request.__exit__(None, None, None)

    def idle(self, seconds: float) -> None:
        while self._queue:
            self.step()
        self.now += seconds

    def fits(self, num_tokens: int) -> bool:
        return self.admission.tokens + num_tokens <= self.admission.max_tokens


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("rate", [200.0, 5000.0])
def test_retry_after_is_true_to_a_factor_of_two(lanes: int, rate: float) -> None:
    rng = random.Random(1)
    engine = Engine(max_tokens=20_000, rate=rate, lanes=lanes)
    ratios = []
    for _ in range(2000):
        num_tokens = rng.choice([50, 300, 1000, 4000])
        try:
            engine.submit(num_tokens)
            continue
        except Problem as problem:
            promised_s, asked_at = problem.retry_after_s, engine.now
        while not engine.fits(num_tokens):
            engine.step()
        actual_s = engine.now - asked_at
        if len(ratios) == 20:
            engine.idle(1000.0)  # time in which nothing is asked says nothing about speed
        if actual_s < 60:  # more is never promised
            ratios.append(promised_s / actual_s)
    assert len(ratios) > 100
    known = ratios[5:]  # nothing has been measured before the first
    assert sum(0.5 <= ratio <= 2 for ratio in known) >= (1.0 if lanes == 1 else 0.9) * len(known)


def test_an_engine_that_slows_down_is_believed_soon() -> None:
    engine = Engine(max_tokens=1000, rate=1000.0, lanes=1)
    for _ in range(60):
        engine.submit(500)
        engine.step()
    engine.rate = 100.0
    for _ in range(8):
        engine.submit(500)
        engine.step()
    engine.submit(500)
    engine.submit(500)
    with pytest.raises(Problem) as caught:
        engine.submit(500)
    assert 2.5 <= caught.value.retry_after_s <= 10  # 5 s is true


def test_what_clients_gave_up_does_not_count_as_speed() -> None:
    engine = Engine(max_tokens=1000, rate=100.0, lanes=1)
    engine.submit(100)
    engine.step()
    for _ in range(50):
        with pytest.raises(TimeoutError), engine.admission.admit(900):
            raise TimeoutError
    engine.submit(500)
    engine.submit(500)
    with pytest.raises(Problem) as caught:
        engine.submit(500)
    assert caught.value.retry_after_s == pytest.approx(5.0)
