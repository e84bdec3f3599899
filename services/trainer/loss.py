"""The loss of a micro-batch: every row's own loss, the task reward beside it, and metrics per teacher.

N rows, k ids of the support, U the part of the vocabulary that this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.trainer.batch import Microbatch
from services.trainer.losses import FUNCTIONS, Rows, clipped_policy_gradient
from services.trainer.overlap import top_k_overlap
from services.trainer.vocab_parallel import INF, VocabShard, distinct, support_logprobs
from shared.losses import LOSSES

METRICS = (
    "loss",
    "reverse_kl",
    "teacher_mass",
    "student_mass",
    "top1_overlap",
    "top_k_overlap",
    "clip_fraction",
    "truncated_fraction",
    "reward_loss",
    "importance_weight",
    "importance_weight_sq",
)
_OVERLAP_ROWS = 32
"""Rows of a micro-batch on which the top-k overlap is measured: finding a row's k largest costs more than its loss."""


class DistillationLoss:
    """Sum of the losses of a micro-batch's rows, with metrics per teacher."""

    def __init__(self, teachers: Sequence[str], *, clip_range: float = 0.2, max_importance_weight: float = 2.0) -> None:
        """Names of the teachers, in the order of the samples' teacher indices; bounds of the policy gradient."""
        self.teachers = tuple(teachers)
        self.clip_range = clip_range
        self.max_importance_weight = max_importance_weight

    @property
    def metrics_shape(self) -> tuple[int, int, int]:
        """Teachers, metrics, and sum, count, maximum."""
        return len(self.teachers), len(METRICS), 3

    def __call__(self, logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the rows of coefficient times loss, and what the metrics are made of.

        Args:
            logits: [N, U] of the rows, this rank's part of the vocabulary. Overwritten.

        Returns:
            A float64 scalar, and [teachers, METRICS, 3] float64: sum, count and maximum of each metric.
        """
        sums = torch.zeros(self.metrics_shape, dtype=torch.float64)
        sums[..., 2] = -INF
        self._add_overlap(sums, logits, batch, shard)  # first: what comes then overwrites the logits
        rows = self._rows(logits, batch, shard)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for i, name in enumerate(batch.loss_names):
            index = torch.nonzero(batch.loss_index == i)[:, 0]
            part = rows if len(batch.loss_names) == 1 else rows.select(index)
            result = FUNCTIONS[name](part)
            total = total + (batch.coefficient[index].to(logits.device) * result.values).sum()
            with torch.no_grad():
                measured = {"loss": result.values, **_sampled_metrics(part), **result.metrics}
                self._add(sums, batch.teacher[index], measured)
                scored = part.support.any(1)
                self._add(sums, batch.teacher[index][scored.cpu()], _support_metrics(part.select(scored)))
        rewarded = torch.nonzero(batch.advantage)[:, 0]
        if len(rewarded):
            advantage = batch.advantage[rewarded].to(logits.device).double()
            reward = clipped_policy_gradient(rows.select(rewarded), advantage).values
            total = total + reward.sum()
            self._add(sums, batch.teacher[rewarded], {"reward_loss": reward})
        return total, sums

    def _rows(self, logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> Rows:
        """The student's log-probabilities beside the teacher's, at the sampled tokens and the ids of the support."""
        device = logits.device
        ids = torch.cat([batch.targets[:, None], batch.top_ids], dim=1).to(device)
        teacher = torch.cat([batch.teacher_logprobs[:, None], batch.top_logprobs], dim=1).to(device).double()
        # The student's own choice has the sampled token in it; the teacher's top-k stands for itself.
        valid = teacher > -INF
        valid[:, 0] = self._by_student(batch).to(device)
        support = distinct(ids, valid)
        student = support_logprobs(logits, ids, support, shard)
        return Rows(
            student_logprobs=student.logprobs,
            teacher_logprobs=teacher,
            support=support,
            tail_logprobs=student.tail,
            tail_max=student.tail_max,
            rollout_logprobs=batch.rollout_logprobs.to(device).double(),
            teacher_weight=batch.teacher_weight.to(device).double(),
            clip_range=self.clip_range,
            max_importance_weight=self.max_importance_weight,
        )

    def _add_overlap(self, sums: torch.Tensor, logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> None:
        """Of the teacher's top-k, the share that is in the student's; on some rows, spread over the micro-batch."""
        valid = (batch.top_logprobs > -INF) & ~self._by_student(batch)[:, None]
        index = torch.nonzero(valid.any(1))[:, 0]
        index = index[:: max(1, -(-len(index) // _OVERLAP_ROWS))]
        if not len(index):
            return
        ids = batch.top_ids[index]
        on = logits.device
        share = top_k_overlap(logits.detach()[index.to(on)], ids.to(on), distinct(ids, valid[index]).to(on), shard)
        self._add(sums, batch.teacher[index], {"top_k_overlap": share})

    @staticmethod
    def _by_student(batch: Microbatch) -> torch.Tensor:
        """[N] bool: rows whose ids the student chose."""
        chosen = [LOSSES[name].top_k_of == "student" for name in batch.loss_names]
        return torch.tensor(chosen, dtype=torch.bool)[batch.loss_index]

    @staticmethod
    def _add(sums: torch.Tensor, teacher: torch.Tensor, measured: dict[str, torch.Tensor]) -> None:
        """Enter values [N] of rows with the teachers [N]."""
        for name, values in measured.items():
            values = values.detach().double().cpu()
            column = sums[:, METRICS.index(name)]
            column[:, 0].index_add_(0, teacher, values)
            column[:, 1].index_add_(0, teacher, torch.ones_like(values))
            column[:, 2].scatter_reduce_(0, teacher, values, "amax")

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What several micro-batches or ranks measured, as one: sums and counts add up, the largest maximum stays."""
        stacked = torch.stack(list(parts))
        return torch.cat([stacked[..., :2].sum(0), stacked[..., 2:].amax(0)], dim=-1)

    def summarise(self, sums: torch.Tensor) -> dict[str, float]:
        """Means by "teacher/metric"; a metric that no row had is left out.

        Of the importance weights also the maximum, and the effective sample size as a share of the rows.
        """
        summary = {}
        for t, teacher in enumerate(self.teachers):
            row = dict(zip(METRICS, sums[t].tolist()))
            means = {name: total / count for name, (total, count, _) in row.items() if count > 0}
            square = means.pop("importance_weight_sq", None)
            if square is not None:
                means["importance_weight_max"] = row["importance_weight"][2]
                means["effective_sample_size"] = means["importance_weight"] ** 2 / square if square > 0 else 0.0
            summary.update({f"{teacher}/{name}": value for name, value in means.items()})
        return summary


def _sampled_metrics(rows: Rows) -> dict[str, torch.Tensor]:
    """[N] each: reverse KL of the sampled token, and its importance weight before any truncation."""
    ratio = (rows.sampled - rows.rollout_logprobs).exp()
    return {"reverse_kl": rows.gap, "importance_weight": ratio, "importance_weight_sq": ratio**2}


def _support_metrics(rows: Rows) -> dict[str, torch.Tensor]:
    """[N] each, of rows with a support: both masses on it, and whether both prefer the same token."""
    teacher = torch.where(rows.support, rows.teacher_logprobs, -INF)
    student = torch.where(rows.support, rows.student_logprobs, -INF)
    at_best = student.gather(1, teacher.argmax(1, keepdim=True))[:, 0]
    return {
        "teacher_mass": teacher.exp().sum(1),
        "student_mass": student.exp().sum(1),
        "top1_overlap": ((at_best >= student.amax(1)) & (at_best >= rows.tail_max)).double(),
    }
