"""Follows the trainer's announcements: fetch and check a push, load it, compare a canary, and only then let publish.

A worker whose engine answers the canary otherwise than the trainer serves some other model than the one that is being
trained (a stale packed head, a half-loaded push, a wrong dtype). It publishes nothing, loads once more, and if that
does not help it ends with WeightsError.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.rollout import metrics
from services.rollout.sampler import Sampler
from shared import log
from shared.errors import WeightsError
from shared.policy import Announcement, Canary, Policy
from shared.weights import Manifest, read_push

_LOG = log.get(__name__)
_WAIT_S = 1.0
_PASS_OVER_TRIES = 60


@dataclass(frozen=True)
class Tolerance:
    """How far the engine's canary logprobs may be from the trainer's, in nats: mean and largest absolute difference."""

    mean: float
    max: float


TOLERANCES = {
    # Two float32 implementations of one model differ by some 1e-5; wrong weights by far more than 2e-3.
    "float32": Tolerance(mean=5e-4, max=2e-3),
    # On the trainer's canary transformers' own bfloat16 forward is off float32 by 0.07 on average (SmolLM2-135M, also
    # with every fifth layer removed) and by 0.43 at most. Trainer and engine round independently, which makes some 0.1
    # and 0.6 between them. Bounds of more than twice that catch another model, not one missed optimizer step: that the
    # engine finds out itself, exactly, layer by layer (`vllm_probe.py`).
    "bfloat16": Tolerance(mean=0.25, max=2.0),
}


class WeightFollower:
    """Keeps the sampler at the newest announced version.

    Attributes:
        version: the version that is loaded and checked, 0 before the first.
        current: its announcement.
        reason: what is being waited for, for people.
    """

    def __init__(self, policy: Policy, sampler: Sampler, *, model: Path, dtype: str) -> None:
        self._policy = policy
        self._sampler = sampler
        self._tolerance = TOLERANCES[dtype]
        self._shapes = _folder_shapes(model)
        self._checked = asyncio.Event()
        self._lock = asyncio.Lock()
        self.version = 0
        self.current: Announcement | None = None
        self.reason = "waiting for the trainer's first weights"

    @property
    def checked(self) -> bool:
        """Whether the served weights are known to be the announced ones."""
        return self._checked.is_set()

    async def wait_checked(self) -> None:
        """Return once the served weights are checked; nothing may be published before."""
        await self._checked.wait()

    @asynccontextmanager
    async def pinned(self, announcement: Announcement) -> AsyncIterator[bool]:
        """Keeps the weights as they are inside; yields False when they are already others than the announced."""
        async with self._lock:
            yield self.checked and self.version == announcement.version

    async def run(self) -> None:
        """Follow for ever. Raises WeightsError when the announced weights cannot be served."""
        while True:
            announcement = await self._policy.wait_newer(self.version, _WAIT_S)
            if announcement is not None and announcement.version > self.version:
                async with self._lock:
                    await self._take(announcement)

    async def _take(self, announcement: Announcement) -> None:
        version = announcement.version
        started = time.perf_counter()
        path = Path(announcement.path)
        try:
            manifest = await asyncio.to_thread(read_push, path)
        except WeightsError as error:
            return await self._pass_over(version, error)
        self._check_manifest(manifest, version)
        self._checked.clear()
        self.reason = f"loading weights v{version}"
        try:
            await self._sampler.load_weights(path, version)
        except WeightsError as error:
            return await self._pass_over(version, error)
        problem = await self._canary_problem(announcement.canary)
        if problem is not None:
            self.reason = f"weights v{version} do not pass the canary: {problem}"
            _LOG.error("canary_failed", extra=log.fields(version=version, problem=problem, action="load once more"))
            metrics.LOADS.labels("canary_failed").inc()
            await self._sampler.load_weights(Path(announcement.path), version)
            problem = await self._canary_problem(announcement.canary)
        if problem is not None:
            metrics.LOADS.labels("refused").inc()
            self.reason = f"weights v{version} are refused: {problem}"
            raise WeightsError(f"weights v{version} from {announcement.path} were loaded twice and still {problem}")
        self.version, self.current, self.reason = version, announcement, f"serving weights v{version}"
        self._checked.set()
        seconds = time.perf_counter() - started
        metrics.LOADS.labels("loaded").inc()
        metrics.LOAD_SECONDS.observe(seconds)
        metrics.VERSION.set(version)
        _LOG.info("weights_loaded", extra=log.fields(version=version, bytes=manifest.num_bytes, seconds=seconds))

    async def _pass_over(self, version: int, error: WeightsError) -> None:
        """Return once newer weights are announced, raise `error` when there are none within a minute.

        The trainer deletes old pushes while they may still be read, and one that starts again announces anew what its
        predecessor left damaged.
        """
        self.reason = str(error)
        for _ in range(_PASS_OVER_TRIES):
            latest = await self._policy.wait_newer(version, _WAIT_S)
            if latest is not None and latest.version > version:
                metrics.LOADS.labels("superseded").inc()
                return
        metrics.LOADS.labels("damaged").inc()
        raise error

    def _check_manifest(self, manifest: Manifest, version: int) -> None:
        """Find out before the engine is touched that a push is another version's or another model's."""
        if manifest.version != version:
            raise WeightsError(f"weights v{version} were announced, the push is of v{manifest.version}")
        # A tied folder may or may not repeat the head; the engine itself knows whether it needs one.
        pushed = {name: record.shape for name, record in manifest.tensors.items() if name != "lm_head.weight"}
        if pushed != self._shapes:
            differing = sorted(
                name for name in pushed.keys() | self._shapes.keys() if pushed.get(name) != self._shapes.get(name)
            )
            raise WeightsError(
                f"weights v{version} are not those of student.model: {len(differing)} tensors differ in name or shape, "
                f"e.g. {differing[:3]}"
            )

    async def _canary_problem(self, canary: Canary) -> str | None:
        """What is wrong with the engine's answer to the canary, None when it agrees with the trainer's."""
        served = await self._sampler.score(canary.token_ids)
        expected = np.asarray(canary.logprobs, np.float32)
        if served.shape != expected.shape:
            return f"the canary has {len(served)} rows, the trainer sent {len(expected)}"
        error = np.abs(served - expected)
        metrics.CANARY_ERROR.set(float(error.max()))
        if error.mean() <= self._tolerance.mean and error.max() <= self._tolerance.max:  # false for NaN too
            return None
        return (
            f"answer the canary with logprobs that differ from the trainer's by {error.mean():.4f} on average and "
            f"{error.max():.4f} at most (allowed: {self._tolerance.mean} and {self._tolerance.max})"
        )


def _folder_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of all tensors of a model folder but the head, from the headers of its files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    shapes.pop("lm_head.weight", None)
    return shapes
