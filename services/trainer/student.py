"""The student on every rank: the operations that the loop calls through `Ranks`, all of them collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.trainer.batch import pack
from services.trainer.config import TrainerConfig
from services.trainer.intake import samples_of
from services.trainer.loss import DistillationLoss
from services.trainer.megatron_checkpoint import load_rank_state, save_rank_state
from services.trainer.megatron_model import OptimizerSettings, PolicyModel
from services.trainer.split import Split
from services.trainer.tensors import bytes_of, spec_of
from shared.model_folder import check_model_folder
from shared.trajectory import decode
from shared.weights import Manifest, TensorBytes, write_push


class Student:
    """The model that is trained, and where its weights go."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        settings = config.trainer
        check_model_folder(config.student.model, setting="student.model")
        torch.set_num_threads(settings.threads)
        self.model = PolicyModel.build(
            config.student.model,
            dtype=config.student.dtype,
            split=Split(
                tp=settings.tensor_parallel,
                pp=settings.pipeline_parallel,
                cp=settings.context_parallel,
                dp=settings.data_parallel,
                ep=settings.expert_parallel,
            ),
            optim=OptimizerSettings(
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                grad_clip=settings.grad_clip,
                warmup_steps=settings.warmup_steps,
            ),
            seed=config.run.seed,
            recompute=settings.recompute,
        )
        self.teachers = sorted(config.teachers)
        self._loss = DistillationLoss(
            self.teachers, clip_range=settings.clip_range, max_importance_weight=settings.max_importance_weight
        )
        self.weights_root = config.run.dir / "weights"

    def step(self, payloads: list[tuple[str, bytes]]) -> dict[str, Any]:
        """One optimizer step on (trajectory id, payload) pairs; every rank gets all of them."""
        trajectories = [decode(payload, trajectory_id=name) for name, payload in payloads]
        reward_coefficient = self.config.trainer.reward_coefficient
        samples = samples_of(trajectories, self.config.teachers, reward_coefficient=reward_coefficient)
        microbatches = pack(samples, self.config.trainer.microbatch_tokens)
        return asdict(self.model.train_step(microbatches, self._loss))

    def score(self, token_ids: list[int]) -> list[float]:
        """[S−1] logprobs of a sequence under the current weights."""
        return [float(value) for value in self.model.score(token_ids)]

    def push(self, version: int) -> Manifest | None:
        """Write the current weights as `version`; the manifest on rank 0, None elsewhere."""
        if self.model.layout["rank"] == 0:
            keep = self.config.trainer.keep_weights
            return write_push(self.weights_root, version, self._tensors(), keep=keep)[1]
        for _ in self.model.export():
            continue  # the export gathers shards: every rank has to take part
        return None

    def save(self, folder: str) -> None:
        """This rank's part of a checkpoint."""
        save_rank_state(self.model, Path(folder))

    def load(self, folder: str) -> None:
        """Continue from this rank's part of a checkpoint."""
        load_rank_state(self.model, Path(folder))

    def export(self, folder: str) -> None:
        """A folder that plain transformers loads."""
        self.model.save_hf(Path(folder))

    def _tensors(self) -> Iterator[TensorBytes]:
        for name, tensor in self.model.export():
            spec = spec_of(name, tensor)
            yield TensorBytes(spec.name, spec.dtype, spec.shape, bytes_of(tensor))
