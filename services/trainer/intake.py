"""From stream entries to a batch: drops what is too stale, sets aside what is broken, fills up to the batch size.

Every entry that comes in ends in exactly one of three lists, and the ledger knows which.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.trainer.batch import Sample
from shared import ledger as books
from shared import log
from shared.config import ObjectiveSection
from shared.errors import PayloadError, RunFailed
from shared.ledger import Ledger
from shared.losses import LOSSES
from shared.policy import Policy
from shared.stream import DeadEntry, Entry, TrajectoryStream
from shared.trajectory import Trajectory, check_values, decode

_LOG = log.get(__name__)
_BLOCK_MS = 1000
_REPORT_EVERY_S = 10.0
_MIN_BAD = 8


@dataclass(frozen=True)
class Batch:
    """Trajectories of one optimizer step, with the stream entries that they came in."""

    trajectories: list[Trajectory]
    entries: list[Entry]
    wait_s: float

    @property
    def entry_ids(self) -> list[str]:
        """The entries' ids."""
        return [entry.entry_id for entry in self.entries]


@dataclass
class Unacknowledged:
    """Entries whose fate is in the ledger but in no durable checkpoint yet."""

    entry_ids: list[str] = field(default_factory=list)
    dead: list[DeadEntry] = field(default_factory=list)


class Intake:
    """Reads the stream for the trainer."""

    def __init__(
        self,
        stream: TrajectoryStream,
        policy: Policy,
        ledger: Ledger,
        *,
        teachers: Mapping[str, ObjectiveSection],
        vocab_size: int,
        max_staleness: int,
        max_bad_share: float,
        data_timeout_s: float,
    ) -> None:
        self._stream = stream
        self._policy = policy
        self._ledger = ledger
        self._teachers = teachers
        self._vocab_size = vocab_size
        self._max_staleness = max_staleness
        self._max_bad_share = max_bad_share
        self._data_timeout_s = data_timeout_s
        self._fingerprints: dict[str, str] = {}
        self.unacknowledged = Unacknowledged()

    async def next_batch(self, size: int, *, version: int, step: int) -> Batch:
        """Wait for `size` trajectories that policy `version` may be trained on.

        Raises:
            RunFailed: too large a share of the data is broken, or none came for the time that the config allows.
        """
        began = reported = progressed = time.monotonic()
        trajectories: list[Trajectory] = []
        taken: list[Entry] = []
        while len(trajectories) < size:
            entries = await self._stream.read(size - len(trajectories), _BLOCK_MS)
            for entry in entries:
                trajectory = await self._accept(entry, version=version, step=step)
                if trajectory is not None:
                    trajectories.append(trajectory)
                    taken.append(entry)
            now = time.monotonic()
            if entries:
                progressed = now
            waiting_for = f"{size - len(trajectories)} of {size} trajectories for step {step + 1}"
            if now - progressed > self._data_timeout_s:
                raise RunFailed(
                    f"no trajectory arrived for {self._data_timeout_s:.0f} s, still waiting for {waiting_for}: "
                    "look at the rollout worker's log and the gateway's /readyz"
                )
            if now - max(progressed, reported) > _REPORT_EVERY_S:
                reported = now
                _LOG.warning("waiting_for_data", extra=log.fields(missing=waiting_for, seconds=round(now - began)))
        return Batch(trajectories, taken, time.monotonic() - began)

    def trained(self, batch: Batch, *, step: int) -> None:
        """Book a batch whose step was taken."""
        self._ledger.record(books.TRAINED, [item.id for item in batch.trajectories], step=step)
        self.unacknowledged.entry_ids += batch.entry_ids

    async def acknowledge(self) -> None:
        """Forget everything booked so far; call it once a durable checkpoint holds the ledger's length."""
        done, self.unacknowledged = self.unacknowledged, Unacknowledged()
        await self._stream.acknowledge(done.entry_ids, done.dead)

    async def _accept(self, entry: Entry, *, version: int, step: int) -> Trajectory | None:
        """The entry's trajectory, or None when it is booked as something that is not trained on."""
        known = self._ledger.kind(entry.trajectory_id)
        if known is not None:
            # Its effect is in the checkpoint that this process resumed from; only the acknowledgement was lost.
            if known == books.DEAD_LETTER:
                self.unacknowledged.dead.append(DeadEntry(entry, "given up before the trainer was started again"))
            else:
                self.unacknowledged.entry_ids.append(entry.entry_id)
            await self._policy.settle([entry.entry_id])
            return None
        try:
            trajectory = decode(entry.payload, trajectory_id=entry.trajectory_id)
            check_values(trajectory, self._vocab_size)
            self._check_teacher(trajectory)
        except PayloadError as error:
            await self._give_up(entry, error.reason, step)
            return None
        if version - trajectory.oldest_version > self._max_staleness:
            self._ledger.record(books.DROPPED_STALE, [trajectory.id], step=step)
            self.unacknowledged.entry_ids.append(entry.entry_id)
            await self._policy.settle([entry.entry_id])
            return None
        return trajectory

    async def _give_up(self, entry: Entry, reason: str, step: int) -> None:
        _LOG.error("dead_letter", extra=log.fields(trajectory=entry.trajectory_id, reason=reason))
        self._ledger.record(books.DEAD_LETTER, [entry.trajectory_id], step=step)
        self.unacknowledged.dead.append(DeadEntry(entry, reason))
        await self._policy.settle([entry.entry_id])
        bad, seen = self._ledger.counts[books.DEAD_LETTER], sum(self._ledger.counts.values())
        if bad >= _MIN_BAD and bad > self._max_bad_share * seen:
            raise RunFailed(
                f"{bad} of {seen} trajectories are broken, more than trainer.max_bad_trajectories allows; "
                f"the last one: {entry.trajectory_id}: {reason}"
            )

    def _check_teacher(self, trajectory: Trajectory) -> None:
        """PayloadError unless the teacher is this run's, still the same, and said what its loss needs."""
        name = trajectory.teacher
        if name not in self._teachers:
            raise PayloadError(trajectory.id, f"teacher {name} is not one of {', '.join(sorted(self._teachers))}")
        known = self._fingerprints.setdefault(name, trajectory.fingerprint)
        if known != trajectory.fingerprint:
            raise PayloadError(
                trajectory.id, f"teacher {name} changed: fingerprint {trajectory.fingerprint}, before {known}"
            )
        loss = self._teachers[name].loss
        chooser = LOSSES[loss].top_k_of
        ids = {"teacher": trajectory.top_ids, "student": trajectory.candidate_ids}.get(chooser or "")
        if ids is not None and not ids.shape[1]:
            raise PayloadError(trajectory.id, f"it has no {chooser}'s top-k, which teachers.{name}.loss {loss} needs")


def samples_of(
    trajectories: Sequence[Trajectory], teachers: Mapping[str, ObjectiveSection], *, reward_coefficient: float
) -> list[Sample]:
    """Trajectories in the form that the loss takes; a teacher's index is its place among the sorted names."""
    order = sorted(teachers)
    samples = []
    for item in trajectories:
        teacher = teachers[item.teacher]
        by_student = LOSSES[teacher.loss].top_k_of == "student"
        ids, logprobs = (
            (item.candidate_ids, item.candidate_logprobs) if by_student else (item.top_ids, item.top_logprobs)
        )
        samples.append(
            Sample(
                token_ids=item.token_ids,
                prompt_len=item.prompt_len,
                loss_mask=item.loss_mask,
                teacher_logprobs=item.teacher_logprobs,
                rollout_logprobs=item.rollout_logprobs,
                top_ids=ids if ids.shape[1] else None,
                top_logprobs=logprobs if ids.shape[1] else None,
                teacher=order.index(item.teacher),
                coefficient=teacher.coefficient,
                loss=teacher.loss,
                teacher_weight=teacher.teacher_weight,
                advantage=reward_coefficient * (item.advantage or 0.0),
                id=item.id,
            )
        )
    return samples
