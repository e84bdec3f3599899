"""Process groups of the trainer, and copies of small values between its ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from services.trainer.split import Split
from services.trainer.vocab_parallel import VocabShard
from shared.errors import ConfigError


def initialise(split: Split, seed: int) -> None:
    """Join the ranks that torchrun names in the environment (one rank without it) and form the groups of `split`.

    Must run inside `megatron_device()`.

    Raises:
        ConfigError: another number of ranks was started than the split has.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != split.world:
        raise ConfigError(
            f"trainer: tensor_parallel {split.tp} x pipeline_parallel {split.pp} x context_parallel {split.cp} x "
            f"data_parallel {split.dp} are {split.world} ranks, but {world} "
            f"{'was' if world == 1 else 'were'} started; give torchrun --nproc-per-node={split.world}"
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if world == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        split.tp,
        split.pp,
        context_parallel_size=split.cp,
        expert_model_parallel_size=split.ep,
        expert_tensor_parallel_size=1,  # an expert is never split; expert parallelism takes the tensor ranks too
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda, force_reset_rng=True)


def shutdown() -> None:
    """Leave the process groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def layout() -> dict[str, int]:
    """Sizes and ranks of this process: world, rank, and tp, pp, cp, dp, ep with tp_rank, pp_rank, ..."""
    return {
        "world": dist.get_world_size(),
        "rank": dist.get_rank(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
    }


def vocab_shard(num_columns: int, vocab_size: int) -> VocabShard:
    """The part of the vocabulary in this rank's logits."""
    parts = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group() if parts > 1 else None
    return VocabShard.of(parallel_state.get_tensor_model_parallel_rank(), num_columns, vocab_size, group)


def from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """The last pipeline stage's values, on every stage (in place; shapes must agree)."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(tensor, source, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor


def gather_over_data_parallel(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all data- and context-parallel ranks, each of which has loss rows of its own, in their order."""
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return parts


def sum_over_context_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that share a micro-batch's tokens (in place)."""
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    return tensor
