"""How a training is split over ranks, and what of a packed micro-batch each rank computes.

Context parallelism gives every rank two pieces of every sequence, one from its first and one from its second half
(piece r and piece 2 cp - 1 - r of 2 cp), so that all ranks have the same work in causal attention; it is the layout
that Transformer Engine expects. What pads a sequence lies behind it, where causal attention never looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional as F

from services.trainer.batch import Microbatch

_OF_THE_TOKENS = ("tokens", "position_ids", "cu_seqlens")


@dataclass(frozen=True)
class Split:
    """Sizes of the parallel dimensions: tensor, pipeline, context, data; experts are spread over tp x cp x dp ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp


def data_share(microbatches: Sequence[Microbatch], split: Split, dp_rank: int) -> list[Microbatch]:
    """The micro-batches of a data-parallel rank, at least one.

    With experts on several ranks every rank must take part in every pass, so that all get equally many; a rank that
    lacks one computes the smallest without its loss.
    """
    share = list(microbatches[dp_rank :: split.dp])
    wanted = -(-len(microbatches) // split.dp) if split.ep > 1 else 1
    smallest = min(microbatches, key=lambda batch: batch.num_tokens)
    return share + [smallest.without_rows()] * (wanted - len(share))


def rank_part(batch: Microbatch, split: Split, cp_rank: int) -> tuple[Microbatch, torch.Tensor]:
    """What a rank computes of a micro-batch.

    Returns:
        The micro-batch with this rank's tokens [1, T / cp], its loss rows, and the borders of the padded sequences
        in the whole row; and [N of this rank] which of the micro-batch's rows those are.
    """
    if split.tp == split.cp == 1:
        return batch, torch.arange(batch.num_loss_tokens)
    borders, source = _padded(batch.cu_seqlens, split)
    mine = context_positions(borders, split.cp)[cp_rank]
    position_ids = torch.arange(len(source)) - borders[:-1].long().repeat_interleave(borders.diff().long())
    local = torch.full((len(source),), -1)
    local[mine] = torch.arange(len(mine))
    padded_at = torch.empty(batch.num_tokens, dtype=torch.int64)
    padded_at[source[source >= 0]] = torch.nonzero(source >= 0)[:, 0]
    rows = local[padded_at[batch.rows]]
    kept = torch.nonzero(rows >= 0)[:, 0]
    tokens = torch.where(source >= 0, batch.tokens[0, source.clamp(min=0)], 0)
    per_row = {
        field.name: getattr(batch, field.name)[kept]
        for field in fields(batch)
        if field.name not in _OF_THE_TOKENS and isinstance(getattr(batch, field.name), torch.Tensor)
    }
    part = replace(
        batch,
        **{**per_row, "rows": rows[kept]},
        tokens=tokens[mine][None],
        position_ids=position_ids[mine][None],
        cu_seqlens=borders,
    )
    return part, kept


def context_positions(borders: torch.Tensor, cp: int) -> torch.Tensor:
    """[cp, T / cp] int64: the positions in a padded row that each context-parallel rank has, in its order."""
    start = borders[:-1].long()
    piece = borders.diff().long() // (2 * cp)
    if cp == 1:
        return torch.arange(int(borders[-1]))[None]
    parts = []
    for rank in range(cp):
        both = torch.stack([start + rank * piece, start + (2 * cp - 1 - rank) * piece], dim=1).flatten()
        sizes = piece.repeat_interleave(2)
        begin = F.pad(sizes.cumsum(0), (1, 0))[:-1]
        parts.append(torch.arange(int(sizes.sum())) + (both - begin).repeat_interleave(sizes))
    return torch.stack(parts)


def _padded(cu_seqlens: torch.Tensor, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Borders [B + 1 or 2] after padding, and for every position of the padded row where its token was, -1 for none.

    Every sequence gets a multiple of 2 cp tokens, and the row one of tp x cp: the rest is a sequence of its own.
    """
    lengths = cu_seqlens.diff().long()
    multiple = 2 * split.cp if split.cp > 1 else 1
    padded = -(-lengths // multiple) * multiple
    rest = -int(padded.sum()) % math.lcm(multiple, split.tp * split.cp)
    if rest:
        lengths, padded = F.pad(lengths, (0, 1)), F.pad(padded, (0, 1), value=rest)
    borders = F.pad(padded.cumsum(0), (1, 0))
    within = torch.arange(int(borders[-1])) - borders[:-1].repeat_interleave(padded)
    begin = F.pad(lengths.cumsum(0), (1, 0))[:-1]
    source = torch.where(within < lengths.repeat_interleave(padded), begin.repeat_interleave(padded) + within, -1)
    return borders.int(), source
