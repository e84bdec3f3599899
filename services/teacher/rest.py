"""Sleep and wake, for teachers that share a GPU.

    AWAKE ──sleep──▶ FALLING_ASLEEP ──requests in flight are through──▶ ASLEEP
      ▲                                                                   │
      └────────────── the canary has its logprobs ◀── WAKING ◀────wake────┘

Only an awake teacher takes requests. Asked for the state that it is in, or on the way to, it does nothing more.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from services.teacher.admission import Admission
from services.teacher.canary import Canary
from services.teacher.scorer import Scorer
from shared import log

_log = log.get(__name__)


class State(StrEnum):
    """The value is what /readyz and refusals say."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Rest:
    """The state, and the two ways between its ends. Transitions wait for each other."""

    def __init__(self, scorer: Scorer, admission: Admission, canary: Canary) -> None:
        self.state = State.AWAKE
        self._scorer = scorer
        self._admission = admission
        self._canary = canary
        self._moving = asyncio.Lock()

    @property
    def is_awake(self) -> bool:
        return self.state is State.AWAKE

    async def sleep(self) -> None:
        """Refuse requests from now on, let those in flight finish, then give the engine's memory back.

        Raises:
            ScoringError: the engine cannot; the teacher stays awake.
        """
        async with self._moving:
            if self.state is State.ASLEEP:
                return
            self.state = State.FALLING_ASLEEP
            try:
                await self._admission.wait_empty()
                async with self._canary.in_use:
                    await self._scorer.sleep()
                self.state = State.ASLEEP
            finally:
                if self.state is not State.ASLEEP:
                    self.state = State.AWAKE
            _log.info("asleep")

    async def wake(self) -> bool:
        """Get the memory back and score the canary; True when the teacher is able.

        Raises:
            ScoringError: the engine cannot; the teacher stays asleep.
        """
        async with self._moving:
            if self.state is State.AWAKE:
                return self._canary.ok
            self.state = State.WAKING
            woken = False
            try:
                await self._scorer.wake()
                woken = True
                able = await self._canary.check()
            finally:
                self.state = State.AWAKE if woken else State.ASLEEP
            _log.info("awake", extra=log.fields(able=able))
            return able
