"""How much of the teacher's top-k is in the student's top-k, with the vocabulary split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.trainer.vocab_parallel import INF, VocabShard


@torch.no_grad()
def top_k_overlap(logits: torch.Tensor, ids: torch.Tensor, support: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[N] float64: the share of a row's ids that are among the student's as many most likely tokens.

    Args:
        logits: [N, U] of this rank; N should be small, since a row's largest elements are searched for.
        ids, support: [N, k] global ids and which of them count.
    """
    num_ids = support.sum(1)
    ranked = _largest(logits[:, : shard.num_valid].float(), ids.shape[1], shard)
    threshold = ranked.gather(1, (num_ids - 1).clamp(min=0)[:, None])
    local = ids - shard.start
    inside = (local >= 0) & (local < shard.num_valid)
    found = torch.where(inside, logits.gather(1, torch.where(inside, local, 0)).float(), 0.0)
    shard.all_reduce(found, dist.ReduceOp.SUM)
    return ((found >= threshold) & support).sum(1) / num_ids.clamp(min=1).double()


def _largest(logits: torch.Tensor, k: int, shard: VocabShard) -> torch.Tensor:
    """[N, k] largest logits over all ranks, descending; -inf beyond the vocabulary."""
    own = logits.new_full((len(logits), k), -INF)
    num = min(k, logits.shape[1])
    own[:, :num] = logits.topk(num, dim=1).values
    if shard.group is None:
        return own
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, own, group=shard.group)
    return torch.cat(parts, dim=1).topk(k, dim=1).values
