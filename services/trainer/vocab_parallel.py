"""Log-probabilities of chosen ids, and of all the rest together, from logits whose vocabulary is split over ranks.

Every loss of this project is a small function of two things per row: log q_i at a few ids (the teacher's top-k, the
sampled token) and log q_T, the logprob of "any other token". So there is one autograd function for both, and a loss is
ordinary arithmetic on arrays of [N, k]. With K the support, G_i and G_T the gradients of log q_i and log q_T, and
G = sum_i G_i + G_T:

    dL/dz_j = [j in K] * -q_j G  +  [j not in K] * w_j (G_T - q_T G)  +  sum_{i: id_i = j} G_i,    w = softmax outside K

Rows are worked through in chunks. The forward pass leaves a softmax in the logits' place, the backward pass
scales it and adds what belongs to single ids: beside the logits no buffer of [rows, vocabulary] is ever alive, and
every exponential is taken once. N rows, C ids per row, U the part of the vocabulary that this rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 21
"""Elements of the float32 work buffer (8 MiB): small enough for a cache, large enough that calls do not count."""

INF = float("inf")


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary in this rank's logits.

    Attributes:
        start: first id.
        num_valid: columns that are real tokens; padding behind them never takes part.
        vocab_size: V of the whole model, without padding.
        group: ranks that hold the other parts, None for a single rank.
    """

    start: int
    num_valid: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, rank: int, num_columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> VocabShard:
        """Shard of `rank` when every rank holds `num_columns` columns."""
        start = rank * num_columns
        return cls(start, max(0, min(num_columns, vocab_size - start)), vocab_size, group)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """In place over the group; nothing for a single rank."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


@dataclass(frozen=True)
class SupportLogprobs:
    """Float64, so that a loss may subtract them.

    Attributes:
        logprobs: [N, C] log q of the ids asked for.
        tail: [N] log of the mass outside the support; -inf when the support is the whole vocabulary.
        tail_max: [N] the largest logprob outside the support (no gradient).
    """

    logprobs: torch.Tensor
    tail: torch.Tensor
    tail_max: torch.Tensor


def support_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, support: torch.Tensor, shard: VocabShard
) -> SupportLogprobs:
    """Student log-probabilities over the whole vocabulary at `ids`.

    Overwrites `logits`: after the call they are no logits any more, after the backward pass they are the gradient. What
    else is to be done with them, a hook included, must be done before; an operation that keeps its output for its own
    backward pass must not have made them (autograd then says so).

    Args:
        logits: [N, U] of this rank, float32 or bfloat16.
        ids: [N, C] int64 global ids; they may repeat.
        support: [N, C] bool; the ids that make up K. No id may be flagged twice in a row (see `distinct`).

    Raises:
        ValueError: an id is not in the student's vocabulary.
    """
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= shard.vocab_size):
        raise ValueError(f"ids {int(ids.min())}..{int(ids.max())} are not all in a vocabulary of {shard.vocab_size}")
    return SupportLogprobs(*_SupportLogprobs.apply(logits, ids, support, shard))


def distinct(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[N, C] bool: `valid` without the entries whose id is valid in an earlier column already."""
    key = torch.where(valid, ids, -1)
    order = key.argsort(dim=1, stable=True)
    ordered = key.gather(1, order)
    repeated = torch.zeros_like(valid)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return valid & ~torch.zeros_like(valid).scatter(1, order, repeated)


class _SupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, support: torch.Tensor, shard: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        local, inside = _local_ids(ids, shard)
        removed = torch.where(support & inside, -INF, 0.0)
        num_rows, device = len(logits), logits.device
        gathered = torch.zeros(ids.shape, dtype=torch.float32, device=device)
        top = torch.full((num_rows,), -INF, dtype=torch.float32, device=device)
        peak = torch.ones(num_rows, dtype=torch.float32, device=device)
        for part in _chunks(num_rows, shard.num_valid):
            stored = logits[part, : shard.num_valid]
            z = stored.float()  # the logits themselves where they are float32
            torch.gather(z, 1, local[part], out=gathered[part])
            z.scatter_add_(1, local[part], removed[part])
            torch.amax(z, 1, out=top[part])
            torch.softmax(z, 1, out=z)
            torch.amax(z, 1, out=peak[part])  # e^0 / sum
            if z.dtype is not stored.dtype:
                stored.copy_(z)
        empty = top == -INF
        if bool(empty.any()):  # this rank has nothing outside the support, and a softmax over nothing is NaN
            logits[empty] = 0.0
        at_ids = torch.where(inside, gathered, 0.0).double()
        largest, total = top.double(), torch.where(empty, 0.0, 1 / peak.double())
        own, own_total = largest.clone(), total.clone()
        shard.all_reduce(at_ids, dist.ReduceOp.SUM)
        shard.all_reduce(largest, dist.ReduceOp.MAX)
        shift = torch.where(largest == -INF, 0.0, largest)
        total = shard.all_reduce(total * (own - shift).exp(), dist.ReduceOp.SUM) if shard.group is not None else total
        tail_lse = shift + total.log()
        support_lse = torch.where(support, at_ids, -INF).logsumexp(1) if ids.shape[1] else torch.full_like(shift, -INF)
        log_z = torch.logaddexp(tail_lse, support_lse)
        logprobs, tail, tail_max = at_ids - log_z[:, None], tail_lse - log_z, largest - log_z
        # What lies in the logits now is the softmax of this shard, 0 at the support; this makes it that of all shards.
        scale = torch.where(own == -INF, 0.0, (own + own_total.log() - tail_lse).exp())
        ctx.save_for_backward(logits, local, inside, support, scale, logprobs, tail)
        ctx.shard = shard
        ctx.mark_non_differentiable(tail_max)
        return logprobs, tail, tail_max

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: torch.Tensor, grad_tail: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, local, inside, support, scale, logprobs, tail = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grad_tail = torch.where(tail == -INF, 0.0, grad_tail)
        total = grad_logprobs.sum(1) + grad_tail
        tail_factor = (scale * (grad_tail - tail.exp() * total)).float()[:, None]
        at_ids = grad_logprobs - torch.where(support, logprobs.exp() * total[:, None], 0.0)
        at_ids = torch.where(inside, at_ids, 0.0).float()
        for part in _chunks(len(logits), shard.num_valid):
            stored = logits[part, : shard.num_valid]
            z = stored.float()
            z.mul_(tail_factor[part]).scatter_add_(1, local[part], at_ids[part])
            if z.dtype is not stored.dtype:
                stored.copy_(z)
        logits[:, shard.num_valid :] = 0
        return logits, None, None, None


def _local_ids(ids: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of this rank's logits [N, C], and which of them are real; the others point at column 0 and add 0."""
    local = ids - shard.start
    inside = (local >= 0) & (local < shard.num_valid)
    return torch.where(inside, local, 0), inside


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    if num_columns == 0:
        return []
    step = max(1, CHUNK_ELEMENTS // num_columns)
    return [slice(i, i + step) for i in range(0, num_rows, step)]
