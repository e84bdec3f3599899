"""The training loop. One trajectory's way through the trainer:

    Intake.next_batch     stream ──▶ batch; what is too stale is booked, what is broken becomes a dead letter
    Student.step          loss, gradient, optimizer step on all ranks
    Student.push          weights of version v+1 on disk
    Policy.announce       v+1 is current, and the batch leaves the queue, in one script
    Checkpoints.write     model, optimizer and the ledger's length, every few steps
    Intake.acknowledge    entries leave the stream

Nothing is acknowledged before a durable checkpoint holds its effect. A crash anywhere brings back the entries after the
last checkpoint, and the ledger, cut to the length that the checkpoint remembers, knows which ones those are.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import redis.asyncio
import redis.exceptions
import tokenizers

from services.trainer.checkpoint import Checkpoints, RunState
from services.trainer.config import TrainerConfig
from services.trainer.intake import Batch, Intake
from services.trainer.metrics import TRAJECTORIES, StepLog, describe_batch
from services.trainer.ranks import Ranks
from services.trainer.student import Student
from shared import ledger as books
from shared import log
from shared.aio import Stopped, unless_stopped
from shared.config import parse
from shared.errors import ConfigError, RunFailed, WeightsError
from shared.keys import Keys
from shared.leases import Gate
from shared.ledger import Ledger
from shared.policy import Announcement, Canary, Policy
from shared.resume import check_same_run
from shared.service import STOP_WITHIN_S
from shared.stream import TrajectoryStream
from shared.weights import push_folder

_LOG = log.get(__name__)
_CANARY_TEXT = "The quick brown fox jumps over 13 lazy dogs; 2+2=4, and 17*3=51. Was it a car or a cat I saw?"
_MAX_CANARY_TOKENS = 48
_EVALUATION_TIMEOUT_S = 600.0


class Trainer:
    """Rank 0 of the trainer: leads the ranks, owns the run's state."""

    def __init__(self, config: TrainerConfig, student: Student, ranks: Ranks, client: redis.asyncio.Redis) -> None:
        keys = Keys(config.run.name)
        self._config = config
        self._ranks = ranks
        self._policy = Policy(client, keys)
        self._stream = TrajectoryStream(client, keys)
        self._vocab_size = student.model.vocab_size
        self._weights_root = student.weights_root
        self._checkpoints = Checkpoints(config.run.dir / "checkpoints", keep=config.trainer.keep_checkpoints)
        self._canary_ids = _canary_ids(config)
        self._step = 0
        self._version = 0
        self._skipped_in_a_row = 0
        self._saved_step = 0
        self._checkpoint_s = 0.0
        self._slowest_checkpoint_s = 0.0
        self._evaluations: list[tuple[int, int]] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step is done and evaluated, or until `stop`, with a checkpoint of what is done by then.

        Raises:
            RunFailed: the run cannot go on; the reason is in the run's state too, where workers see it.
            ConfigError: what is on disk or in Redis does not belong together.
        """
        try:
            await self._run(stop)
        except (RunFailed, ConfigError) as error:
            await self._policy.fail(str(error))
            raise
        except (WeightsError, OSError) as error:
            await self._policy.fail(str(error))
            where = self._config.run.dir
            raise RunFailed(
                f"{error} (run.dir {where}); mend it and start again to resume from the last checkpoint"
            ) from error
        except redis.exceptions.RedisError as error:
            raise RunFailed(f"redis.url does not answer any more: {error}") from error

    async def _run(self, stop: asyncio.Event) -> None:
        state = await self._resume()
        self._ledger = Ledger(self._config.run.dir / "ledger.jsonl", state.ledger_length)
        self._steps = StepLog(self._config.run.dir / "metrics.jsonl", last_step=state.step)
        self._ledger.check_produced(await self._stream.produced_ids())
        await self._stream.attach()
        rollout, flow = self._config.rollout, self._config.flow
        gate = Gate(rollout.n, self._config.trainer.batch_size, flow.max_staleness, flow.max_queue_bytes)
        await self._policy.open(gate)
        self._intake = self._make_intake()
        await self._publish([], evaluate=self._step in (0, self._config.run.steps))
        try:
            while self._step < self._config.run.steps:
                await self._train_one_step(stop)
            await self._finish(stop)
        except Stopped:
            await self._stop()

    async def _resume(self) -> RunState:
        found = self._checkpoints.latest()
        state = found[1] if found else RunState()
        if found:
            self._check_resumed(state)
            self._ranks.call("load", str(found[0]))
            _LOG.info("resumed", extra=log.fields(step=state.step, checkpoint=str(found[0])))
        latest = await self._policy.latest()
        # Versions announced after the checkpoint are of another lineage: never use their numbers again.
        self._version = max(state.version, latest.version if latest else 0)
        self._step = self._saved_step = state.step
        self._evaluations = list(state.evaluations)
        return state

    def _check_resumed(self, state: RunState) -> None:
        where = f"the run in {self._config.run.dir}"
        if state.step > self._config.run.steps:
            raise ConfigError(f"{where} has taken {state.step} steps, run.steps={self._config.run.steps} is less")
        check_same_run(parse(TrainerConfig, state.config, origin=where), self._config, where=where)

    def _make_intake(self) -> Intake:
        settings = self._config.trainer
        return Intake(
            self._stream,
            self._policy,
            self._ledger,
            teachers=self._config.teachers,
            vocab_size=self._vocab_size,
            max_staleness=self._config.flow.max_staleness,
            max_bad_share=settings.max_bad_trajectories,
            data_timeout_s=settings.data_timeout_s,
        )

    async def _train_one_step(self, stop: asyncio.Event) -> None:
        """Wait for a batch and train on it; once there is one, the step is completed whatever comes."""
        began = time.monotonic()
        dropped_before = self._ledger.counts[books.DROPPED_STALE]
        size = self._config.trainer.batch_size
        reading = self._intake.next_batch(size, version=self._version, step=self._step)
        batch = await unless_stopped(stop, reading)
        description = describe_batch(batch, self._version)
        computed = time.monotonic()
        result = self._ranks.call("step", [(e.trajectory_id, e.payload) for e in batch.entries])
        self._check_finite(result)
        pushed = time.monotonic()
        self._step += 1
        self._intake.trained(batch, step=self._step)
        last = self._step == self._config.run.steps
        num_bytes = await self._publish(batch.entry_ids, evaluate=last or self._evaluation_due())
        ended = time.monotonic()
        times = {
            "wait": batch.wait_s,
            "compute": pushed - computed,
            "push": ended - pushed,
            "checkpoint": self._checkpoint_s,  # of the step before: this step's line is written before its checkpoint
            "step": ended - began + self._checkpoint_s,
        }
        dropped = self._ledger.counts[books.DROPPED_STALE] - dropped_before
        await self._report(batch, description, result, times, num_bytes, dropped)
        self._checkpoint_s = 0.0
        if last or self._step % self._config.trainer.checkpoint_every == 0:
            await self._checkpoint()

    def _check_finite(self, result: dict[str, Any]) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result["skipped"] else 0
        if self._skipped_in_a_row > self._config.trainer.max_skipped_steps:
            raise RunFailed(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row "
                "(trainer.max_skipped_steps); lower trainer.lr or look at the last batch's teacher values"
            )

    def _evaluation_due(self) -> bool:
        every = self._config.eval.every_steps
        return every > 0 and self._step % every == 0

    async def _publish(self, settled: list[str], *, evaluate: bool) -> int:
        """Push the current weights as the next version and make it current; returns the bytes pushed."""
        self._version += 1
        manifest = self._ranks.call("push", self._version)
        canary = Canary(token_ids=self._canary_ids, logprobs=self._ranks.call("score", self._canary_ids))
        if self._evaluations and await self._policy.evaluation_skipped(self._evaluations[-1][0]):
            self._evaluations.pop()  # workers passed that version over: ask for this one instead
            evaluate = True
        if evaluate:
            self._evaluations.append((self._version, self._step))
        announcement = Announcement(
            version=self._version,
            step=self._step,
            path=str(push_folder(self._weights_root, self._version).resolve()),
            canary=canary,
            evaluate=evaluate,
        )
        needed = (self._config.run.steps - self._step) * self._config.trainer.batch_size
        await self._policy.announce(announcement, settled, needed=needed, num_bytes=manifest.num_bytes)
        return manifest.num_bytes

    async def _stop(self) -> None:
        """Keep what was trained since the last checkpoint, unless writing it would outlast the time for a stop."""
        unsaved = self._step - self._saved_step
        may_take_s = STOP_WITHIN_S / 2
        write = unsaved > 0 and self._slowest_checkpoint_s < may_take_s
        _LOG.info("stopping", extra=log.fields(step=self._step, unsaved_steps=unsaved, checkpoint=write))
        if write:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        began = time.monotonic()
        state = RunState(
            step=self._step,
            version=self._version,
            ledger_length=self._ledger.sync(),
            evaluations=self._evaluations,
            config=self._config.model_dump(mode="json", exclude={"redis": {"url"}}),  # it may hold a password
        )
        self._checkpoints.write(state, lambda folder: self._ranks.call("save", str(folder)))
        await self._intake.acknowledge()
        self._saved_step = self._step
        self._checkpoint_s = time.monotonic() - began
        self._slowest_checkpoint_s = max(self._slowest_checkpoint_s, self._checkpoint_s)

    async def _report(
        self,
        batch: Batch,
        description: dict[str, Any],
        result: dict[str, Any],
        times: dict[str, float],
        num_bytes: int,
        dropped: int,
    ) -> None:
        count, size = await self._stream.queue()
        teachers: dict[str, dict[str, float]] = {}
        for name, value in result["metrics"].items():
            teacher, _, metric = name.partition("/")
            teachers.setdefault(teacher, {})[metric] = value
        record = {
            "step": self._step,
            "version": self._version,
            "time": time.time(),
            "loss": result["loss"],
            "grad_norm": result["grad_norm"],
            "lr": result["lr"],
            "skipped": result["skipped"],
            "num_loss_tokens": result["num_loss_tokens"],
            "teachers": teachers,
            **description,
            "dropped_stale": dropped,
            "queue": {"trajectories": count, "bytes": size},
            "pushed_bytes": num_bytes,
            "tokens_per_s": description["num_tokens"] / times["step"],
            "time_s": times,
        }
        self._steps.write(record)
        TRAJECTORIES.labels(books.TRAINED).inc(len(batch.trajectories))
        TRAJECTORIES.labels(books.DROPPED_STALE).inc(dropped)
        _LOG.info("step", extra=log.fields(step=self._step, loss=result["loss"], step_s=times["step"]))

    async def _finish(self, stop: asyncio.Event) -> None:
        """Leave the student as a plain model folder, wait for the last evaluation, and close the run."""
        self._ranks.call("export", str(self._config.run.dir / "student"))
        await unless_stopped(stop, self._last_evaluation(self._evaluations[-1][0]))
        results = [
            {"version": version, "step": step, "result": await self._policy.evaluation(version)}
            for version, step in self._evaluations
        ]
        aside = self._config.run.dir / "evaluations.json.tmp"
        aside.write_text(json.dumps(results, indent=1))
        aside.rename(self._config.run.dir / "evaluations.json")
        await self._policy.finish()
        self._steps.close()
        self._ledger.close()

    async def _last_evaluation(self, last_version: int) -> None:
        """Return once a worker has evaluated the last version. RunFailed when none takes it up."""
        deadline = time.monotonic() + _EVALUATION_TIMEOUT_S
        while await self._policy.evaluation(last_version) is None:
            if not await self._policy.evaluation_skipped(last_version):
                deadline = time.monotonic() + _EVALUATION_TIMEOUT_S  # a worker is at it
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"no worker evaluated version {last_version} within {_EVALUATION_TIMEOUT_S:.0f} s; "
                    "look at the rollout worker's log"
                )
            await asyncio.sleep(0.2)


def _canary_ids(config: TrainerConfig) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(config.student.model / "tokenizer.json"))
    ids = tokenizer.encode(_CANARY_TEXT).ids
    return ids[: min(_MAX_CANARY_TOKENS, config.student.max_model_len - 1)]
