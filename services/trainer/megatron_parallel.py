"""Process groups of the trainer, and copies of small values between its ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from services.trainer.vocab_parallel import VocabShard
from shared.errors import ConfigError


def initialise(tp: int, pp: int, seed: int) -> None:
    """Join the ranks that torchrun names in the environment (one rank without it) and split them into TP x PP x DP.

    Must run inside `megatron_device()`.

    Raises:
        ConfigError: the number of ranks is no multiple of tp * pp.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % (tp * pp):
        raise ConfigError(
            f"trainer.tensor_parallel {tp} x trainer.pipeline_parallel {pp} does not divide the {world} ranks started "
            "(torchrun --nproc-per-node)"
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
    parallel_state.initialize_model_parallel(tp, pp)
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
    """Sizes and ranks of this process: world, rank, tp, pp, dp, and tp_rank, pp_rank, dp_rank."""
    return {
        "world": dist.get_world_size(),
        "rank": dist.get_rank(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
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
    """The tensors of all data-parallel ranks, in the order of the ranks (shapes must agree)."""
    size = parallel_state.get_data_parallel_world_size()
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor, group=parallel_state.get_data_parallel_group())
    return parts
