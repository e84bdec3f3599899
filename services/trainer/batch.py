"""From trajectories to packed micro-batches.

Shape letters, here and in the loss:
    S  tokens of one sequence          P  tokens of its prompt        R  response rows, S - P
    T  tokens of a micro-batch         B  sequences in it             N  rows that carry loss, all sequences
    k  ids of the support             V  vocabulary of the student

Sequences lie one behind the other in a row of T tokens. Row t of a response is predicted by the hidden state at
position P - 1 + t of its own sequence; only rows whose loss mask is 1 are kept, so everything of length N is loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shared.errors import PayloadError


@dataclass(frozen=True)
class Sample:
    """One completion with its teacher's scores, as the trainer takes it.

    Attributes:
        token_ids: [S] prompt and response.
        prompt_len: P, at least 1.
        loss_mask: [R] 1 where the row is trained on.
        teacher_logprobs: [R] of the sampled tokens; rows that the mask leaves out may hold anything.
        rollout_logprobs: [R] of the sampled tokens, from the policy that sampled them.
        top_ids: [R, k] most likely ids of whom the loss asks, teacher or student (`LossSpec.top_k_of`), or None.
        top_logprobs: [R, k] the teacher's logprobs of them, or None.
        teacher: index of the teacher, for the metrics.
        coefficient: factor of this sample's loss.
        loss: name in the loss registry.
        teacher_weight: of the teacher in the loss's mixture, where it has one.
        advantage: of the whole completion by its task reward, times the reward's coefficient; 0 for none.
        id: trajectory id, for error messages.
    """

    token_ids: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    teacher_logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    teacher: int = 0
    coefficient: float = 1.0
    loss: str = "forward_kl"
    teacher_weight: float = 0.0
    advantage: float = 0.0
    id: str = "?"

    def __post_init__(self) -> None:
        """Check the shapes against each other.

        Raises:
            PayloadError: naming the trajectory and the array that does not fit.
        """
        size = len(self.token_ids)
        if not 1 <= self.prompt_len <= size:
            raise PayloadError(self.id, f"prompt_len {self.prompt_len} is outside 1..{size}")
        num_rows = size - self.prompt_len
        for name in ("loss_mask", "teacher_logprobs", "rollout_logprobs"):
            if getattr(self, name).shape != (num_rows,):
                raise PayloadError(self.id, f"{name} has shape {getattr(self, name).shape}, not ({num_rows},)")
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise PayloadError(self.id, "top_ids and top_logprobs come only together")
        if self.top_ids is not None and self.top_logprobs is not None:
            shapes = self.top_ids.shape, self.top_logprobs.shape
            if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != num_rows:
                raise PayloadError(self.id, f"top_ids {shapes[0]} and top_logprobs {shapes[1]} are not ({num_rows}, k)")
        rows = self.loss_mask.astype(bool)
        if not (np.isfinite(self.teacher_logprobs[rows]).all() and np.isfinite(self.rollout_logprobs[rows]).all()):
            raise PayloadError(self.id, "a logprob of a sampled token that is trained on is not finite")
        if self.top_logprobs is not None and not (self.top_logprobs[rows] <= 1e-2).all():
            raise PayloadError(self.id, "top_logprobs hold NaN or a positive value")


@dataclass(frozen=True)
class Microbatch:
    """Packed sequences and the teacher's scores of their N loss rows.

    Attributes:
        tokens, position_ids: [1, T] int64; positions restart at 0 with every sequence.
        cu_seqlens: [B + 1] int32 borders of the sequences, from 0 to T.
        rows: [N] int64 positions in 0..T-1 whose hidden states predict the loss tokens.
        targets: [N] int64 sampled tokens.
        teacher_logprobs, rollout_logprobs, coefficient, teacher_weight, advantage: [N] float32.
        top_ids: [N, k] int64, top_logprobs: [N, k] float32, -inf where a sample has fewer than k.
        teacher: [N] int64 teacher indices.
        loss_names: the losses that occur; loss_index: [N] int64 into it.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    teacher_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    teacher: torch.Tensor
    coefficient: torch.Tensor
    teacher_weight: torch.Tensor
    advantage: torch.Tensor
    loss_names: tuple[str, ...]
    loss_index: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[1]

    @property
    def num_loss_tokens(self) -> int:
        """N."""
        return len(self.rows)

    def without_rows(self) -> Microbatch:
        """The same tokens without a row of loss: what a rank computes that has no share of a batch."""
        per_row = ("rows", "targets", "teacher_logprobs", "rollout_logprobs", "top_ids", "top_logprobs", "teacher",
                   "coefficient", "teacher_weight", "advantage", "loss_index")  # fmt: skip
        return replace(self, **{name: getattr(self, name)[:0] for name in per_row})

    def attention_mask(self) -> torch.Tensor:
        """[1, 1, T, T] bool, True = masked: block-diagonal and causal.

        The model attends by `cu_seqlens` and never builds this; it states what that must amount to.
        """
        starts = torch.zeros(self.num_tokens, dtype=torch.int64)
        starts[self.cu_seqlens[1:-1].long()] = 1
        sequence = starts.cumsum(0)
        position = torch.arange(self.num_tokens)
        visible = (sequence[:, None] == sequence[None, :]) & (position[:, None] >= position[None, :])
        return ~visible[None, None]


def pack(samples: Sequence[Sample], max_tokens: int) -> list[Microbatch]:
    """Micro-batches of at most `max_tokens` tokens, first fit decreasing, the same for the same input.

    A sample longer than `max_tokens` gets a micro-batch of its own.
    """
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i))
    bins: list[list[Sample]] = []
    free: list[int] = []
    for i in order:
        size = len(samples[i].token_ids)
        slot = next((b for b, room in enumerate(free) if room >= size), None)
        if slot is None:
            bins.append([samples[i]])
            free.append(max_tokens - size)
        else:
            bins[slot].append(samples[i])
            free[slot] -= size
    return [_microbatch(group) for group in bins]


def scoring_microbatch(token_ids: Sequence[int]) -> Microbatch:
    """One sequence of which every token but the first is a row; the teacher's fields are zero."""
    size = len(token_ids)
    zeros = np.zeros(size - 1, np.float32)
    sample = Sample(np.asarray(token_ids), 1, np.ones(size - 1, np.uint8), zeros, zeros)
    return _microbatch([sample])


def _microbatch(samples: Sequence[Sample]) -> Microbatch:
    lengths = [len(s.token_ids) for s in samples]
    borders = np.cumsum([0, *lengths])
    keep = [np.flatnonzero(s.loss_mask) for s in samples]
    counts = [len(r) for r in keep]
    names = tuple(sorted({s.loss for s in samples}))
    width = max((s.top_ids.shape[1] for s in samples if s.top_ids is not None), default=0)

    def per_row(values: Sequence[float | int], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values), counts)).to(dtype)

    def gathered(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name)[r] for s, r in zip(samples, keep)])).float()

    top_ids, top_logprobs = _top_arrays(samples, keep, width)
    rows = [start + s.prompt_len - 1 + r for start, s, r in zip(borders, samples, keep)]
    targets = [s.token_ids[s.prompt_len + r] for s, r in zip(samples, keep)]
    return Microbatch(
        tokens=torch.from_numpy(np.concatenate([s.token_ids for s in samples])).long()[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).long()[None],
        cu_seqlens=torch.from_numpy(borders).int(),
        rows=torch.from_numpy(np.concatenate(rows)).long(),
        targets=torch.from_numpy(np.concatenate(targets)).long(),
        teacher_logprobs=gathered("teacher_logprobs"),
        rollout_logprobs=gathered("rollout_logprobs"),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        teacher=per_row([s.teacher for s in samples], torch.int64),
        coefficient=per_row([s.coefficient for s in samples], torch.float32),
        teacher_weight=per_row([s.teacher_weight for s in samples], torch.float32),
        advantage=per_row([s.advantage for s in samples], torch.float32),
        loss_names=names,
        loss_index=per_row([names.index(s.loss) for s in samples], torch.int64),
    )


def _top_arrays(samples: Sequence[Sample], keep: Sequence[np.ndarray], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logprobs [N, width]; columns that a sample does not have stay id 0 with logprob -inf."""
    num_rows = sum(len(r) for r in keep)
    ids = np.zeros((num_rows, width), np.int64)
    logprobs = np.full((num_rows, width), -np.inf, np.float32)
    start = 0
    for sample, rows in zip(samples, keep):
        if sample.top_ids is not None and sample.top_logprobs is not None:
            k = sample.top_ids.shape[1]
            ids[start : start + len(rows), :k] = sample.top_ids[rows]
            logprobs[start : start + len(rows), :k] = sample.top_logprobs[rows]
        start += len(rows)
    return torch.from_numpy(ids), torch.from_numpy(logprobs)
