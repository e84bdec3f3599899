"""The policy that is trained: a Megatron-core GPT from a Hugging Face folder, its optimizer, and the way back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from services.trainer import megatron_parallel as ranks
from services.trainer.batch import Microbatch, scoring_microbatch
from services.trainer.megatron_cpu import keep_freed_memory, megatron_device
from services.trainer.megatron_export import write_hf_folder
from services.trainer.megatron_families import read_hf_config, transformer_config
from services.trainer.megatron_gpt import build_gpt, packed_params
from services.trainer.megatron_weights import Weights
from services.trainer.split import Split, data_share, rank_part
from services.trainer.vocab_parallel import VocabShard, support_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LossFunction(Protocol):
    """Sum of a micro-batch's losses, and what its metrics are made of (see loss.DistillationLoss)."""

    @property
    def metrics_shape(self) -> tuple[int, ...]: ...

    def __call__(
        self, logits: torch.Tensor, batch: Microbatch, shard: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def summarise(self, sums: torch.Tensor) -> dict[str, float]: ...


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up to a constant learning rate.

    Attributes:
        grad_clip: largest norm of the global gradient, 0 for none.
        warmup_steps: steps until the full learning rate, 0 for none.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    warmup_steps: int

    def lr_at(self, step: int) -> float:
        """Learning rate of step 0, 1, 2, ..."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Attributes:
        loss: mean over the loss tokens of the global batch.
        grad_norm: of the global gradient before clipping; not finite when the step was skipped for it.
        skipped: the weights did not change: no loss token, or a gradient that is not finite.
        metrics: means over tokens, by "teacher/metric".
        num_loss_tokens: in the global batch.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    metrics: dict[str, float]
    num_loss_tokens: int


class PolicyModel:
    """One rank's part of the student.

    Attributes:
        num_updates: optimizer steps taken; decides the learning rate.
        layout: sizes and ranks of this process (see megatron_parallel.layout).
    """

    def __init__(
        self,
        model_path: Path,
        hf_config: PretrainedConfig,
        split: Split,
        module: DistributedDataParallel,
        weights: Weights,
        optimizer: MegatronOptimizer,
        settings: OptimizerSettings,
    ) -> None:
        """Use `build`."""
        self.model_path = model_path
        self.split = split
        self.module = module
        self.weights = weights
        self.optimizer = optimizer
        self.settings = settings
        self.num_updates = 0
        self.layout = ranks.layout()
        self.vocab_size: int = hf_config.vocab_size
        self.dtype: torch.dtype = module.config.params_dtype

    @classmethod
    def build(
        cls,
        model_path: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        split: Split,
        optim: OptimizerSettings,
        seed: int,
        recompute: bool = False,
    ) -> PolicyModel:
        """Start the process groups, load the weights and make the optimizer.

        Raises:
            ConfigError: the folder or the split over ranks is not one that can be trained.
        """
        hf_config = read_hf_config(model_path)
        cuda = torch.cuda.is_available()
        keep_freed_memory()
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        with megatron_device(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="megatron")
            config = transformer_config(hf_config, split, dtype=DTYPES[dtype], cuda=cuda, recompute=recompute)
            ranks.initialise(split, seed)
            gpt = build_gpt(config, hf_config, cuda=cuda)
            for parameter in gpt.parameters():
                set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            weights = Weights(gpt, hf_config)
            weights.load(model_path)
            module = _replicate(config, gpt)
            optimizer = _make_optimizer(module, optim, DTYPES[dtype])
        return cls(model_path, hf_config, split, module, weights, optimizer, optim)

    def train_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFunction) -> StepResult:
        """One optimizer step on the micro-batches of the global batch, the same list on every rank.

        Each data-parallel rank works through its share. The gradient is that of the token mean over the global batch,
        however it was cut into micro-batches and ranks.
        """
        share = data_share(microbatches, self.split, self.layout["dp_rank"])
        with megatron_device():
            self.module.zero_grad_buffer()
            self.optimizer.zero_grad()
            outputs = self._run(share, partial(_training_loss, loss_fn), forward_only=False)
            loss, num_tokens, sums = self._global_sums(outputs, loss_fn)
            lr = self.settings.lr_at(self.num_updates)
            grad_norm, skipped = self._update(lr) if num_tokens else (0.0, True)
        return StepResult(
            loss=loss / max(1, num_tokens),
            grad_norm=grad_norm,
            lr=lr,
            skipped=skipped,
            metrics=loss_fn.summarise(sums),
            num_loss_tokens=num_tokens,
        )

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """[S - 1] float32: logprob of every token but the first, given those before it."""
        batch = scoring_microbatch(token_ids)
        with megatron_device(), torch.no_grad():
            outputs = self._run([batch], _target_logprobs, forward_only=True)
            device = next(self.module.parameters()).device
            result = torch.zeros(len(token_ids) - 1, dtype=torch.float64, device=device)
            if outputs:
                result[rank_part(batch, self.split, self.layout["cp_rank"])[1].to(device)] = outputs[0]
            result = ranks.sum_over_context_parallel(ranks.from_last_stage(result))
        return result.float().cpu().numpy()

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and copies of the tensors on the CPU of rank 0; others get none, but must call it."""
        with megatron_device(), torch.no_grad():
            yield from self.weights.export()

    def save_hf(self, path: Path) -> None:
        """A folder that plain transformers loads; rank 0 writes, all ranks must call it.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        tensors = self.export()
        try:
            if self.layout["rank"] == 0:
                write_hf_folder(path, self.model_path, self.weights.specs(), tensors)
        finally:
            for _ in tensors:
                continue  # a write that failed must not leave the others sending for ever

    def close(self) -> None:
        """Leave the process groups."""
        ranks.shutdown()

    @property
    def gpt(self) -> torch.nn.Module:
        """The GPT inside its wrappers."""
        inner = self.module.module
        return inner.module if isinstance(inner, Float16Module) else inner

    def _run(self, microbatches: Sequence[Microbatch], consume: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Through Megatron's schedule; what `consume(batch, shard, logits)` reports, on the last stage alone."""
        half = isinstance(self.module.module, Float16Module)
        device = next(self.module.parameters()).device

        def forward_step(batches: Iterator[Microbatch], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            batch = rank_part(next(batches), self.split, self.layout["cp_rank"])[0]
            logits = module(
                batch.tokens.to(device),
                batch.position_ids.to(device),
                packed_seq_params=packed_params(batch.cu_seqlens, cp=self.split.cp, cuda=device.type == "cuda"),
                rows=batch.rows.to(device),
                **({"fp32_output": False} if half else {}),
            )
            return logits, lambda output: self._consume(consume, batch, output)

        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[self.module],
            num_microbatches=len(microbatches),
            seq_length=max(m.num_tokens for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            force_all_reduce=self.split.world == 1,  # free for one rank, where gloo's reduce-scatter copies
        )

    def _consume(self, consume: Callable[..., Any], batch: Microbatch, output: torch.Tensor) -> Any:
        logits = output.squeeze(0)  # an index would make the backward pass copy it into zeros
        return consume(batch, ranks.vocab_shard(logits.shape[1], self.vocab_size), logits)

    def _global_sums(self, outputs: list[Any], loss_fn: LossFunction) -> tuple[float, int, torch.Tensor]:
        """Sum of the losses, number of loss tokens and metrics over all micro-batches and ranks."""
        device = next(self.module.parameters()).device
        heads = [head for head, _ in outputs] or [torch.zeros(2, dtype=torch.float64)]
        metrics = [sums for _, sums in outputs] or [torch.zeros(loss_fn.metrics_shape, dtype=torch.float64)]
        flat = torch.cat([torch.stack(heads).sum(0), loss_fn.merge(metrics).flatten()]).to(device)
        parts = [part.cpu() for part in ranks.gather_over_data_parallel(ranks.from_last_stage(flat))]
        loss, num_tokens = torch.stack([part[:2] for part in parts]).sum(0).tolist()
        return loss, int(num_tokens), loss_fn.merge([part[2:].view(loss_fn.metrics_shape) for part in parts])

    def _update(self, lr: float) -> tuple[float, bool]:
        """Clip and step, unless the gradient is not finite. Returns its norm and whether the step was left out."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            return grad_norm, True
        if self.settings.grad_clip > 0:
            for part in self.optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.grad_clip, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()
        self.num_updates += 1
        return grad_norm, False


class _Replica(DistributedDataParallel):
    """Megatron's data-parallel wrapper, which gathers updated weights only where there is somebody to gather from."""

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None:
        if dist.get_world_size() > 1:
            super().start_param_sync(*args, **kwargs)


def _replicate(config: TransformerConfig, gpt: torch.nn.Module) -> DistributedDataParallel:
    """The model in its wrappers. With several ranks gradients are reduced while the backward pass still runs."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=dist.get_world_size() > 1
    )
    module = _Replica(config, ddp, Float16Module(config, gpt) if config.bf16 else gpt)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = module.no_sync
    return module


def _make_optimizer(
    module: DistributedDataParallel, settings: OptimizerSettings, dtype: torch.dtype
) -> MegatronOptimizer:
    """Megatron's distributed AdamW with float32 main weights; biases and norms do not decay."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.grad_clip,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [module], get_standard_config_overrides(config))
    if not torch.cuda.is_available():
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def _training_loss(
    loss_fn: LossFunction, batch: Microbatch, shard: VocabShard, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Loss sum, number of loss tokens, and ([loss sum, tokens], metric sums) for the report."""
    loss, sums = loss_fn(logits, batch, shard)
    num_tokens = torch.tensor(batch.num_loss_tokens, dtype=torch.int, device=logits.device)
    head = torch.tensor([float(loss.detach()), batch.num_loss_tokens], dtype=torch.float64)
    return loss, num_tokens, (head, sums.detach())


def _target_logprobs(
    batch: Microbatch, shard: VocabShard, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = batch.targets.to(logits.device)[:, None]
    found = support_logprobs(logits, ids, torch.zeros_like(ids, dtype=torch.bool), shard)
    return logits.new_zeros(()), torch.tensor(0, dtype=torch.int), found.logprobs[:, 0]
