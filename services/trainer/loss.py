"""The losses, each a function of the student's and the teacher's log-probabilities at a few ids per row.

A new loss is one function and one line in `LOSSES`. N rows, k ids of the teacher's support (see batch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from services.trainer.batch import Microbatch
from services.trainer.vocab_parallel import INF, VocabShard, distinct, support_logprobs
from shared.errors import ConfigError

CLIP = 0.2
"""PPO's clip range of the ratio to the rollout policy."""

MAX_IMPORTANCE_WEIGHT = 2.0
"""Importance weights are truncated here: bounded variance for a bias on the stalest tokens."""

METRICS = (
    "loss",
    "reverse_kl",
    "teacher_mass",
    "student_mass",
    "top1_overlap",
    "clip_fraction",
    "importance_weight",
    "importance_weight_sq",
)


@dataclass(frozen=True)
class Rows:
    """What a loss sees of N rows; the student's side carries gradients, float64.

    Attributes:
        logprobs: [N] log q of the sampled token.
        support_logprobs: [N, k] log q of the teacher's top-k.
        tail_logprobs: [N] log of the student's mass outside the support, -inf when nothing is outside.
        tail_max: [N] largest log q outside the support.
        support: [N, k] bool, entries that count: no padding, no repeated id, no zero probability.
        teacher_logprobs: [N], top_logprobs: [N, k], rollout_logprobs: [N].
    """

    logprobs: torch.Tensor
    support_logprobs: torch.Tensor
    tail_logprobs: torch.Tensor
    tail_max: torch.Tensor
    support: torch.Tensor
    teacher_logprobs: torch.Tensor
    top_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor

    def select(self, index: torch.Tensor) -> Rows:
        """The rows at `index`."""
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class RowLoss:
    """Values [N], and metrics [N] of this loss alone."""

    values: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss and what it needs of the teacher."""

    function: Callable[[Rows], RowLoss]
    needs_top_k: bool


def forward_kl(rows: Rows) -> RowLoss:
    """KL(p || q) of the distributions coarsened to the teacher's top-k and one class for the rest.

    Never negative, and zero only where the two agree on every class.
    """
    log_p = torch.where(rows.support, rows.top_logprobs, 0.0)
    p = torch.where(rows.support, log_p.exp(), 0.0)
    inside = (p * (log_p - rows.support_logprobs)).sum(1)
    log_p_tail = _log1mexp(torch.where(rows.support, rows.top_logprobs, -INF).logsumexp(1))
    has_tail = (log_p_tail > -INF) & (rows.tail_logprobs > -INF)
    log_p_tail = torch.where(has_tail, log_p_tail, 0.0)
    log_q_tail = torch.where(has_tail, rows.tail_logprobs, 0.0)
    tail = torch.where(has_tail, log_p_tail.exp() * (log_p_tail - log_q_tail), 0.0)
    return RowLoss(inside + tail, {})


def policy_gradient(rows: Rows) -> RowLoss:
    """Reverse KL by the policy gradient: advantage -(log q - log p), PPO's clipped ratio to the rollout policy.

    The weight is truncated without cutting its gradient off: w * A * grad(log q) with w = min(ratio, maximum).
    """
    log_ratio = rows.logprobs - rows.rollout_logprobs
    ratio = log_ratio.exp()
    advantage = (rows.teacher_logprobs - rows.logprobs).detach()
    weight = ratio.detach().clamp(max=MAX_IMPORTANCE_WEIGHT)
    free = weight * (rows.logprobs - rows.logprobs.detach()).exp() * advantage
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
    metrics = {
        "clip_fraction": (clipped < free).double(),
        "importance_weight": weight,
        "importance_weight_sq": weight**2,
    }
    return RowLoss(-torch.minimum(free, clipped), metrics)


LOSSES: dict[str, Loss] = {
    "forward_kl": Loss(forward_kl, needs_top_k=True),
    "policy_gradient": Loss(policy_gradient, needs_top_k=False),
}

REFUSED: dict[str, str] = {
    "k1": "as a supervised loss its gradient carries no teacher signal: E[grad log q] = 0; use policy_gradient",
    "reverse_kl": "on the teacher's own support it drives the student's mass out of the top-k; use policy_gradient",
    "topk_policy_gradient": "a top-k KL used as a scalar advantage has zero expected gradient; use forward_kl",
}


def check_loss(name: str, *, teacher: str, top_k: int, temperature: float) -> None:
    """Refuse a combination that would train towards nothing.

    Args:
        top_k: what the rollout worker asks of the teacher.
        temperature: of the rollout.

    Raises:
        ConfigError: saying why and what to write instead.
    """
    where = f"teachers.{teacher}.loss: {name}"
    if name in REFUSED:
        raise ConfigError(f"{where} is refused: {REFUSED[name]}")
    if name not in LOSSES:
        raise ConfigError(f"{where} is unknown; there are {', '.join(sorted(LOSSES))}")
    if LOSSES[name].needs_top_k and top_k < 1:
        raise ConfigError(f"{where} needs the teacher's top-k: set rollout.top_k to 1 or more (it is {top_k})")
    if temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature is {temperature}, but {where} is defined on the policy's own samples: set it to 1.0"
        )


class DistillationLoss:
    """Sum of the losses of a micro-batch's rows, with metrics per teacher."""

    def __init__(self, teachers: Sequence[str]) -> None:
        """Names of the teachers, in the order of the samples' teacher indices."""
        self.teachers = tuple(teachers)

    @property
    def metrics_shape(self) -> tuple[int, int, int]:
        """Teachers, metrics, and sum and count."""
        return len(self.teachers), len(METRICS), 2

    def __call__(self, logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the rows of coefficient times loss, and sums for the metrics.

        Args:
            logits: [N, U] of the rows, this rank's part of the vocabulary. Overwritten by the backward pass.

        Returns:
            A float64 scalar, and [teachers, METRICS, 2] float64: sum and count of each metric.
        """
        rows = student_rows(logits, batch, shard)
        sums = torch.zeros(self.metrics_shape, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for i, name in enumerate(batch.loss_names):
            index = torch.nonzero(batch.loss_index == i)[:, 0]
            part = rows if len(batch.loss_names) == 1 else rows.select(index)
            result = LOSSES[name].function(part)
            total = total + (batch.coefficient[index].to(logits.device) * result.values).sum()
            with torch.no_grad():
                measured = {"loss": result.values, **_common_metrics(part), **result.metrics}
                self._add(sums, batch.teacher[index], measured, part.support.any(1))
        return total, sums

    def _add(
        self, sums: torch.Tensor, teacher: torch.Tensor, measured: dict[str, torch.Tensor], scored: torch.Tensor
    ) -> None:
        for name, values in measured.items():
            values, counted = values.cpu(), torch.ones(len(teacher), dtype=torch.float64)
            if name in ("teacher_mass", "student_mass", "top1_overlap"):
                counted = scored.cpu().double()
            column = sums[:, METRICS.index(name)]
            column[:, 0].index_add_(0, teacher, values.double() * counted)
            column[:, 1].index_add_(0, teacher, counted)

    def summarise(self, sums: torch.Tensor) -> dict[str, float]:
        """Means by "teacher/metric"; a metric that no row had is left out."""
        return {
            f"{teacher}/{metric}": float(sums[t, m, 0] / sums[t, m, 1])
            for t, teacher in enumerate(self.teachers)
            for m, metric in enumerate(METRICS)
            if sums[t, m, 1] > 0
        }


def student_rows(logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> Rows:
    """The student's log-probabilities at the sampled tokens and the teacher's support."""
    device = logits.device
    top_logprobs = batch.top_logprobs.to(device).double()
    top_ids = batch.top_ids.to(device)
    support = distinct(top_ids, top_logprobs > -INF)
    ids = torch.cat([batch.targets.to(device)[:, None], top_ids], dim=1)
    flags = torch.cat([support.new_zeros(len(support), 1), support], dim=1)
    student = support_logprobs(logits, ids, flags, shard)
    return Rows(
        logprobs=student.logprobs[:, 0],
        support_logprobs=student.logprobs[:, 1:],
        tail_logprobs=student.tail,
        tail_max=student.tail_max,
        support=support,
        teacher_logprobs=batch.teacher_logprobs.to(device).double(),
        top_logprobs=top_logprobs,
        rollout_logprobs=batch.rollout_logprobs.to(device).double(),
    )


def _common_metrics(rows: Rows) -> dict[str, torch.Tensor]:
    """[N] each: sampled reverse KL, mass of teacher and student on the support, whether both prefer the same token."""
    teacher = torch.where(rows.support, rows.top_logprobs, -INF)
    student = torch.where(rows.support, rows.support_logprobs, -INF)
    overlap = torch.zeros_like(rows.logprobs)
    if rows.support.shape[1]:
        best = teacher.argmax(1, keepdim=True)
        at_best = student.gather(1, best)[:, 0]
        overlap = ((at_best >= student.amax(1)) & (at_best >= rows.tail_max)).double()
    return {
        "reverse_kl": rows.logprobs - rows.teacher_logprobs,
        "teacher_mass": teacher.exp().sum(1),
        "student_mass": student.exp().sum(1),
        "top1_overlap": overlap,
    }


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x <= 0, exact near both ends; -inf where rounding brought x to 0 or above."""
    x = x.clamp(max=0.0)
    near_zero = x > -0.6931471805599453
    return torch.where(near_zero, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))
