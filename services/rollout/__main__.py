"""`python -m services.rollout --config FILE [--set KEY=VALUE]… [--worker-id ID] [--port PORT]`"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from contextlib import AsyncExitStack
from typing import Any

import redis.exceptions

from services.rollout.config import Arguments, RolloutConfig, load
from services.rollout.evaluate import Evaluator
from services.rollout.handshake import check_teachers
from services.rollout.prompts import Renderer
from services.rollout.vllm_sampler import VllmSampler
from services.rollout.weights import WeightFollower
from services.rollout.worker import RolloutWorker
from shared import log
from shared.aio import Stopped, run_loops, unless_stopped
from shared.client import LogprobsClient
from shared.errors import ConfigError, RunFailed, WeightsError, run_main
from shared.keys import Keys
from shared.leases import Gate, Leases
from shared.model_folder import check_model_folder
from shared.policy import Policy
from shared.prompts import PromptSet
from shared.redis_client import connect
from shared.service import HealthServer, api_key, check_port_free, leave, stop_event
from shared.stream import TrajectoryStream

_LOG = log.get(__name__)


class RolloutService:
    """One worker process: checks, engine, and the three loops (prompts, weights, evaluation)."""

    def __init__(self, arguments: Arguments) -> None:
        self._config: RolloutConfig = arguments.config
        self._worker = arguments.worker
        self._port = arguments.port
        self._phase = "checking the configuration"
        self._follower: WeightFollower | None = None

    async def run(self) -> None:
        """Serve until SIGTERM. Raises ConfigError at start, RunFailed later."""
        stop = stop_event()
        try:
            await self._run(stop)
        except Stopped:
            _LOG.info("stopped", extra=log.fields(while_=self._phase))
        except WeightsError as error:
            raise RunFailed(f"worker {self._worker}: {error}") from error
        except redis.exceptions.RedisError as error:
            raise RunFailed(f"worker {self._worker}: redis.url does not answer any more: {error}") from error

    def readiness(self) -> tuple[bool, str]:
        """Ready once announced weights are served and checked."""
        if self._follower is None or self._phase != "running":
            return False, self._phase
        return self._follower.checked, self._follower.reason

    async def _run(self, stop: asyncio.Event) -> None:
        config = self._config
        prompts = PromptSet(config.prompts.sources, config.run.seed, config.prompts.shuffle)
        _check_routes(prompts, config)
        key = api_key()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(HealthServer(config.rollout.host, self._port, self.readiness))
            client = await stack.enter_async_context(
                LogprobsClient(
                    config.gateway.addresses,
                    key,
                    connections=config.rollout.concurrency,
                    timeout_s=config.gateway.request_timeout_s,
                )
            )
            store = await connect(config.redis.url)
            stack.push_async_callback(store.aclose)
            held_out = prompts.held_out(config.eval.size)
            records = [prompts.record_for(seq) for seq in range(config.num_prompts)]
            records += itertools.chain(*held_out.values())
            Renderer(config.student.model, max_len=config.student.max_model_len).check(records, config.routes)
            self._phase = "waiting for the teachers"
            max_len = await unless_stopped(stop, check_teachers(config, key))
            renderer = Renderer(config.student.model, max_len=max_len)
            if max_len < config.student.max_model_len:
                renderer.check(records, config.routes)  # a teacher takes less than the student
            del records
            self._phase = "starting the engine"
            sampler = self._make_sampler(renderer)
            stack.push_async_callback(sampler.close)
            await unless_stopped(stop, sampler.start())
            self._phase = "running"
            policy = Policy(store, Keys(config.run.name))
            follower = WeightFollower(policy, sampler, model=config.student.model, dtype=config.student.dtype)
            self._follower = follower
            shared: dict[str, Any] = {
                "sampler": sampler, "follower": follower, "client": client, "renderer": renderer
            }  # fmt: skip
            evaluator = Evaluator(config, worker=self._worker, policy=policy, held_out=held_out, **shared)
            worker = RolloutWorker(
                config,
                leases=make_leases(config, store),
                stream=TrajectoryStream(store, Keys(config.run.name)),
                prompts=prompts,
                **shared,
            )
            _LOG.info("started", extra=log.fields(worker=self._worker, prompts=len(prompts), max_len=max_len))
            try:
                await run_loops(stop, worker.run(stop), [follower.run(), evaluator.run()])
            finally:
                self._phase = "stopping"
        _LOG.info("stopped", extra=log.fields(worker=self._worker))

    def _make_sampler(self, renderer: Renderer) -> VllmSampler:
        student, rollout = self._config.student, self._config.rollout
        return VllmSampler(
            student.model,
            dtype=student.dtype,
            max_model_len=student.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_bytes=rollout.kv_cache_bytes,
            threads=rollout.threads,
            stop_token_ids=renderer.stop_token_ids,
            max_top_k=rollout.top_k,
            # Workers of one run must not draw the same random numbers.
            seed=zlib.crc32(f"{self._config.run.seed}/{self._worker}".encode()),
        )


def make_leases(config: RolloutConfig, store: redis.asyncio.Redis) -> Leases:
    """The run's prompt leases with this configuration's gate."""
    return Leases(
        store,
        Keys(config.run.name),
        Gate(config.rollout.n, config.trainer.batch_size, config.flow.max_staleness, config.flow.max_queue_bytes),
        lease_s=config.rollout.lease_s,
        max_attempts=config.rollout.max_attempts,
    )


def _check_routes(prompts: PromptSet, config: RolloutConfig) -> None:
    if unknown := sorted(prompts.data_sources - config.routes.keys()):
        raise ConfigError(
            f"data_source {unknown[0]!r} has no teacher: add `{unknown[0]}: TEACHER` under routes "
            f"(known: {', '.join(sorted(config.routes))})"
        )


def main() -> None:
    """Start a worker."""
    arguments = load()
    config = arguments.config
    log.configure(f"rollout/{arguments.worker}")
    check_model_folder(config.student.model, setting="student.model")
    check_port_free(config.rollout.host, arguments.port, setting="rollout.port (or --port)")
    asyncio.run(RolloutService(arguments).run())
    leave(0)


if __name__ == "__main__":
    run_main(main)
