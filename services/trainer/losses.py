"""The losses, each a function of the student's and the teacher's log-probabilities at a few ids per row.

A new loss is one function here, marked `@loss`, and one line in `shared/losses.py`. docs/losses.md has the formulas.

    N rows    k ids of the support: the teacher's or the student's top-k, as the loss asks (see batch.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from services.trainer.vocab_parallel import INF

TEACHER_RESOLUTION = 1e-6
"""Probability that a float32 teacher cannot tell from 0: the sum of a row's probabilities is known no better."""


@dataclass(frozen=True)
class Rows:
    """What a loss sees of N rows; the student's side carries gradients, float64. Column 0 is the sampled token.

    Attributes:
        student_logprobs, teacher_logprobs: [N, 1 + k] log q and log p of the sampled token and of the k ids.
        support: [N, 1 + k] bool, the entries that make up the support: no padding, no repeated id, no id to which the
            teacher gives no probability (that one belongs to the tail).
        tail_logprobs: [N] log of the student's mass outside the support, -inf when nothing is outside.
        tail_max: [N] largest log q outside the support.
        rollout_logprobs: [N] of the sampled token, by the policy that sampled it.
        teacher_weight: [N] the teacher's weight in the mixtures of `jsd` (beta) and `skew_kl` (alpha).
        clip_range, max_importance_weight: of the policy gradient.
    """

    student_logprobs: torch.Tensor
    teacher_logprobs: torch.Tensor
    support: torch.Tensor
    tail_logprobs: torch.Tensor
    tail_max: torch.Tensor
    rollout_logprobs: torch.Tensor
    teacher_weight: torch.Tensor
    clip_range: float
    max_importance_weight: float

    def select(self, index: torch.Tensor) -> Rows:
        """The rows at `index`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: t[index] for name, t in tensors.items() if isinstance(t, torch.Tensor)})

    @property
    def sampled(self) -> torch.Tensor:
        """[N] log q of the sampled token."""
        return self.student_logprobs[:, 0]

    @property
    def gap(self) -> torch.Tensor:
        """[N] d = log q - log p of the sampled token."""
        return self.student_logprobs[:, 0] - self.teacher_logprobs[:, 0]


@dataclass(frozen=True)
class RowLoss:
    """Values [N], and metrics [N] of this loss alone."""

    values: torch.Tensor
    metrics: dict[str, torch.Tensor]


LossFunction = Callable[[Rows], RowLoss]
FUNCTIONS: dict[str, LossFunction] = {}


def loss(function: LossFunction) -> LossFunction:
    """Enter a loss under its name; what it asks of the teacher stands in `shared.losses.LOSSES`."""
    FUNCTIONS[function.__name__] = function
    return function


@loss
def forward_kl(rows: Rows) -> RowLoss:
    """KL(p || q) = sum p (log p - log q) over the teacher's top-k and the tail."""
    log_p, log_q, present = _classes(rows)
    return RowLoss(_expected(log_p, log_p - log_q, present), {})


@loss
def reverse_kl(rows: Rows) -> RowLoss:
    """KL(q || p) = sum q (log q - log p) over the student's top-k, the sampled token and the tail, all of it live.

    Where the teacher's tail is less than a float32 teacher can tell from nothing, it counts as that much: log 0 is no
    number. That touches the teacher's side alone, so no gradient is cut off; the share of such rows is a metric.
    """
    log_p, log_q, present = _classes(rows)
    floor = torch.full_like(log_p, -INF)
    floor[:, -1] = math.log(TEACHER_RESOLUTION)
    lifted = (present & (log_p < floor)).any(1)
    return RowLoss(_expected(log_q, log_q - torch.maximum(log_p, floor), present), {"clip_fraction": lifted.double()})


@loss
def jsd(rows: Rows) -> RowLoss:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, over the teacher's top-k and the tail."""
    log_p, log_q, present = _classes(rows)
    weight = rows.teacher_weight[:, None]
    log_m = torch.logaddexp(weight.log() + log_p, (1 - weight).log() + log_q)
    from_teacher = _expected(log_p, log_p - log_m, present)
    from_student = _expected(log_q, log_q - log_m, present)
    return RowLoss(rows.teacher_weight * from_teacher + (1 - rows.teacher_weight) * from_student, {})


@loss
def skew_kl(rows: Rows) -> RowLoss:
    """KL(p || alpha p + (1 - alpha) q) over the teacher's top-k and the tail."""
    log_p, log_q, present = _classes(rows)
    weight = rows.teacher_weight[:, None]
    log_m = torch.logaddexp(weight.log() + log_p, (1 - weight).log() + log_q)
    return RowLoss(_expected(log_p, log_p - log_m, present), {})


@loss
def k1(rows: Rows) -> RowLoss:
    """d: the unbiased estimate of KL(q || p) that the metric `reverse_kl` shows. Refused as a loss to train with."""
    return RowLoss(rows.gap, {})


@loss
def k2(rows: Rows) -> RowLoss:
    """d^2 / 2: biased as an estimate, but its gradient d * grad(log q) is that of KL(q || p) in expectation."""
    return RowLoss(rows.gap**2 / 2, {})


@loss
def k3(rows: Rows) -> RowLoss:
    """e^-d - 1 + d: never negative, unbiased as an estimate; its expected gradient is that of KL(p || q)."""
    return RowLoss(torch.expm1(-rows.gap) + rows.gap, {})


@loss
def policy_gradient(rows: Rows) -> RowLoss:
    """Reverse KL by the policy gradient: every sampled token has the advantage -(log q - log p), detached."""
    return clipped_policy_gradient(rows, -rows.gap.detach())


def clipped_policy_gradient(rows: Rows, advantage: torch.Tensor) -> RowLoss:
    """-min(w A, clip(w) A) with the importance weight w = q / q_rollout of the sampled token, as PPO has it.

    Where the advantage is negative PPO bounds nothing above; there w is truncated at `max_importance_weight`, without
    cutting its gradient off: w * A * grad(log q) with w = min(ratio, maximum).
    """
    ratio = (rows.sampled - rows.rollout_logprobs).exp()
    weight = ratio.detach().clamp(max=rows.max_importance_weight)
    free = weight * (rows.sampled - rows.sampled.detach()).exp() * advantage
    clipped = ratio.clamp(1 - rows.clip_range, 1 + rows.clip_range) * advantage
    metrics = {
        "clip_fraction": (clipped < free).double(),
        "truncated_fraction": (ratio > rows.max_importance_weight).double(),
    }
    return RowLoss(-torch.minimum(free, clipped), metrics)


def teacher_tail(rows: Rows) -> torch.Tensor:
    """[N] log of the teacher's mass outside the support, -inf where rounding leaves none."""
    return log1mexp(torch.where(rows.support, rows.teacher_logprobs, -INF).logsumexp(1))


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x <= 0, exact near both ends; -inf where rounding brought x to 0 or above."""
    x = x.clamp(max=0.0)
    near_zero = x > -0.6931471805599453
    return torch.where(near_zero, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


def _classes(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log p and log q of the coarsened distributions, and which classes there are: [N, 1 + k + 1], the tail last.

    A class that is not there has 0 for both, so that no gradient meets an infinity; log p of the tail may be -inf.
    """
    support = torch.cat([rows.support, (rows.tail_logprobs > -INF)[:, None]], dim=1)
    log_p = torch.cat([rows.teacher_logprobs, teacher_tail(rows)[:, None]], dim=1)
    log_q = torch.cat([rows.student_logprobs, rows.tail_logprobs[:, None]], dim=1)
    return torch.where(support, log_p, 0.0), torch.where(support, log_q, 0.0), support


def _expected(log_weight: torch.Tensor, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[N] sum of e^log_weight * values over the classes that are there and have any weight."""
    counted = present & (log_weight > -INF)
    return torch.where(counted, log_weight, -INF).exp().mul(torch.where(counted, values, 0.0)).sum(1)
