"""Before the engine starts: every teacher that a route names must be there and share the student's token ids."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.rollout.config import RolloutConfig
from shared.client import LogprobsClient
from shared.errors import ConfigError, TeacherError
from shared.losses import LOSSES
from shared.tokenizer import tokenizer_hash

START_TIMEOUT_S = 600.0
"""How long teachers may take to load their models. One that has died meanwhile is noticed by who started it."""

_UNREACHABLE_S = 10.0
_TRY_S = 5.0


async def check_teachers(config: RolloutConfig, key: str | None) -> int:
    """Compare tokenizers and limits with every teacher.

    Args:
        key: API key for the gateway.

    Returns:
        The most tokens of a sequence that the student and all teachers take.

    Raises:
        ConfigError: gateway or teacher not reachable, another tokenizer, or too small a top_k.
    """
    own = tokenizer_hash(config.student.model)
    lengths = [config.student.max_model_len]
    async with LogprobsClient(config.gateway.addresses, key, connections=1, timeout_s=_TRY_S) as client:
        infos = {name: await _wait_info(config, client, name) for name in sorted(set(config.routes.values()))}
    for teacher, info in infos.items():
        if info["tokenizer_hash"] != own:
            raise ConfigError(
                f"teacher {teacher!r} ({info.get('model')}) has another tokenizer than student.model "
                f"{config.student.model} ({info['tokenizer_hash']} and {own}): their token ids do not mean the same, "
                "choose two models of one family"
            )
        limits = info["limits"]
        if config.rollout.top_k > limits["max_top_k"]:
            raise ConfigError(
                f"rollout.top_k={config.rollout.top_k} is over what teacher {teacher!r} serves "
                f"({limits['max_top_k']}): lower it, or raise teachers.{teacher}.max_top_k"
            )
        loss = config.objectives[teacher].loss
        if LOSSES[loss].top_k_of == "student":
            _check_candidates(teacher, loss, config.rollout.top_k, limits)
        lengths.append(limits["max_model_len"])
    return min(lengths)


def _check_candidates(teacher: str, loss: str, top_k: int, limits: dict[str, Any]) -> None:
    """Raises ConfigError unless a teacher scores as many ids of the student's choice as the run asks for."""
    if top_k > limits["max_candidates"]:
        raise ConfigError(
            f"rollout.top_k={top_k} is over the {limits['max_candidates']} ids a row that teacher {teacher!r} scores "
            f"for teachers.{teacher}.loss {loss}: lower it"
        )


async def _wait_info(config: RolloutConfig, client: LogprobsClient, teacher: str) -> dict[str, Any]:
    """What a teacher says of itself, waiting for one that is still loading."""
    started = time.monotonic()
    while True:
        try:
            return await client.info(teacher)
        except TeacherError as error:
            waited_s = time.monotonic() - started
            if error.status == 503 and waited_s > START_TIMEOUT_S:
                raise ConfigError(
                    f"teacher {teacher!r} was not ready within {START_TIMEOUT_S:.0f} s: {error.reason}; "
                    "look at the teacher's log and its /readyz, then start again"
                ) from error
            if error.retry_after_s is None or (error.status != 503 and waited_s > _UNREACHABLE_S):
                raise ConfigError(
                    f"teacher {teacher!r} is not to be had at the gateway {' or '.join(config.gateway.addresses)} "
                    f"(gateway.host and .port, or gateway.urls): {error.reason}; start both before the workers"
                ) from error
        await asyncio.sleep(0.5)
