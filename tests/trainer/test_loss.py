"""Each loss and its gradient against dense float64, the metrics, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from services.trainer.batch import Microbatch, Sample, pack
from services.trainer.loss import METRICS, DistillationLoss
from services.trainer.losses import FUNCTIONS
from services.trainer.vocab_parallel import VocabShard
from shared.losses import LOSSES
from tests.trainer.loss_cases import CASES, COLUMNS, REWARDED, VOCAB, dense_answer, make_case
from tests.trainer.tiny_models import VOCAB as PLAIN_VOCAB
from tests.trainer.training_samples import make_samples

SHARD = VocabShard.of(0, COLUMNS, VOCAB, None)


def evaluate(
    logits: torch.Tensor, batch: Microbatch, teachers: tuple[str, ...] = ("t",)
) -> tuple[float, torch.Tensor, dict[str, float]]:
    own = logits.clone().requires_grad_()
    loss = DistillationLoss(teachers)
    value, sums = loss(own, batch, SHARD)
    value.backward()
    return value.item(), own.grad.clone(), loss.summarise(sums)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_dense_float64_reference(case: str, loss: str) -> None:
    expected, gradient = dense_answer(case, loss)
    value, found, _ = evaluate(*make_case(case, loss))
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.allclose(found.double(), gradient, rtol=1e-5, atol=1e-6)
    assert not found[:, VOCAB:].any()


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd", "skew_kl", "k2", "k3"])
@pytest.mark.parametrize("case", [case for case in CASES if case != REWARDED])
def test_a_divergence_is_never_negative(case: str, loss: str) -> None:
    assert evaluate(*make_case(case, loss))[0] >= 0


def test_every_loss_has_its_function() -> None:
    assert FUNCTIONS.keys() == LOSSES.keys()


@pytest.mark.parametrize("k", [1, 5, VOCAB])
@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"k1"}))
def test_teacher_equal_to_student_is_zero_and_stands_still(loss: str, k: int) -> None:
    logits, batch = make_case("random", loss)
    log_q = logits[:, :VOCAB].double().log_softmax(1)
    top = log_q.topk(k, dim=1)
    own = log_q.gather(1, batch.targets[:, None])[:, 0].float()
    same = replace(batch, top_ids=top.indices, top_logprobs=top.values.float(), teacher_logprobs=own,
                   rollout_logprobs=own)  # fmt: skip
    value, gradient, metrics = evaluate(logits, same)
    assert abs(value) < 1e-6
    assert gradient.abs().max() < 1e-6
    assert metrics["t/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["t/top1_overlap"] == 1.0
    assert metrics["t/teacher_mass"] == pytest.approx(metrics["t/student_mass"], abs=1e-6)


def test_a_batch_without_loss_rows_is_zero_with_a_gradient() -> None:
    logits, batch = make_case("random", "forward_kl")
    value, gradient, metrics = evaluate(logits[:0], batch.without_rows())
    assert value == 0.0 and gradient.shape == (0, COLUMNS) and metrics == {}


def test_losses_and_teachers_mix_in_one_microbatch() -> None:
    rng = np.random.default_rng(0)

    def sample(teacher: int, loss: str, coefficient: float, rows: int, with_top: bool = True) -> Sample:
        ids = np.stack([rng.permutation(VOCAB)[:3] for _ in range(rows)])
        lp = np.log(rng.dirichlet(np.ones(4), size=rows)[:, :3]).astype(np.float32)
        scores = (rng.normal(size=(2, rows)) - 2).astype(np.float32)
        tokens = rng.integers(0, VOCAB, rows + 1)
        top = (ids, lp) if with_top else (None, None)
        mask = np.ones(rows, np.uint8)
        return Sample(tokens, 1, mask, scores[0], scores[1], *top, teacher, coefficient, loss)

    samples = [
        sample(0, "forward_kl", 1.0, 4),
        sample(1, "policy_gradient", 0.5, 3, with_top=False),
        sample(1, "forward_kl", 2.0, 2),
    ]
    logits = torch.from_numpy(rng.normal(size=(9, COLUMNS))).float()
    mixed = pack(samples, 64)
    assert len(mixed) == 1 and mixed[0].num_loss_tokens == 9
    value, gradient, metrics = evaluate(logits, mixed[0], ("a", "b"))
    apart = [
        evaluate(logits[rows], pack([s], 64)[0], ("a", "b"))
        for s, rows in zip(samples, (slice(0, 4), slice(4, 7), slice(7, 9)))
    ]
    assert value == pytest.approx(sum(a[0] for a in apart), rel=1e-6)
    assert torch.allclose(gradient, torch.cat([a[1] for a in apart]), atol=1e-7)
    assert metrics["a/loss"] == pytest.approx(apart[0][2]["a/loss"])
    assert metrics["b/reverse_kl"] == pytest.approx(
        (3 * apart[1][2]["b/reverse_kl"] + 2 * apart[2][2]["b/reverse_kl"]) / 5
    )
    assert metrics["b/teacher_mass"] == pytest.approx(apart[2][2]["b/teacher_mass"])  # rows with a support only
    assert "a/clip_fraction" not in metrics and "b/clip_fraction" in metrics
    assert {key.split("/")[1] for key in metrics} <= {
        *METRICS, "importance_weight_max", "effective_sample_size"
    }  # fmt: skip


def test_the_gradient_of_k1_does_not_know_the_teacher() -> None:
    """Why it is refused as a loss to train with."""
    logits, batch = make_case("random", "k1")
    other = replace(batch, teacher_logprobs=batch.teacher_logprobs - 3.0)
    assert torch.equal(evaluate(logits, batch)[1], evaluate(logits, other)[1])


def test_a_plain_truncated_sum_goes_negative_where_the_tail_bucket_does_not() -> None:
    """The student has all its mass on the teacher's top-k, the teacher half of it elsewhere."""
    logits = torch.full((1, COLUMNS), -20.0)
    logits[0, :2] = 0.0
    ids, p = np.array([[0, 1]]), np.array([[0.25, 0.25]])
    scores = np.full(1, -1.0, np.float32)
    batch = pack([Sample(np.array([5, 0]), 1, np.ones(1, np.uint8), scores, scores, ids, np.log(p))], 8)[0]
    log_q = logits[:, :VOCAB].double().log_softmax(1)[0, :2].numpy()
    assert (p[0] * (np.log(p[0]) - log_q)).sum() < -0.3
    value, gradient, _ = evaluate(logits, batch)
    assert value > 5 and gradient[0, :2].min() > 0.1  # mass goes out of the top-k


def test_the_total_depends_on_neither_packing_nor_ranks() -> None:
    samples = make_samples(21)
    rng = np.random.default_rng(0)
    logits = {s.id: torch.from_numpy(rng.normal(size=(int(s.loss_mask.sum()), PLAIN_VOCAB))).float() for s in samples}
    loss = DistillationLoss(["a", "b"])
    shard = VocabShard.of(0, PLAIN_VOCAB, PLAIN_VOCAB, None)

    def total(groups: list[list[Sample]], limit: int) -> tuple[float, dict[str, float]]:
        values, sums = [], []
        for batch in (batch for group in groups for batch in pack(group, limit)):
            rows = [logits[s.id] for s in order(batch, samples)]
            value, part = loss(torch.cat(rows), batch, shard)
            values.append(value.item())
            sums.append(part)
        return sum(values), loss.summarise(loss.merge(sums))

    whole, metrics = total([samples], 4096)
    for groups, limit in (([samples], 64), ([samples], 1), ([samples[::2], samples[1::2]], 90)):
        value, other = total(groups, limit)
        assert value == pytest.approx(whole, rel=1e-9)
        sampled = {name for name in metrics if name.endswith("top_k_overlap")}  # measured on a part of the rows
        assert {k: other[k] for k in other.keys() - sampled} == pytest.approx(
            {k: metrics[k] for k in metrics.keys() - sampled}, rel=1e-9
        )


def order(batch: Microbatch, samples: list[Sample]) -> list[Sample]:
    """The samples of a micro-batch, in its order: told by their tokens."""
    borders = batch.cu_seqlens.tolist()
    tokens = [tuple(batch.tokens[0, a:b].tolist()) for a, b in pairwise(borders)]
    by_tokens = {tuple(s.token_ids.tolist()): s for s in samples}
    return [by_tokens[key] for key in tokens]


def test_importance_weights_and_clipping_are_counted() -> None:
    logits, batch = make_case("random", "policy_gradient")
    own = logits[:, :VOCAB].double().log_softmax(1).gather(1, batch.targets[:, None])[:, 0]
    ratio = torch.tensor([1.0, 1.0, 3.0, 0.5, 1.5, 2.5], dtype=torch.float64)
    # Advantages: up, down, up (clipped), down (clipped), up (clipped), down (truncated).
    teacher = own + torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    batch = replace(batch, teacher_logprobs=teacher.float(), rollout_logprobs=(own - ratio.log()).float())
    value, gradient, metrics = evaluate(logits, batch)
    assert value == pytest.approx(0.5 * (-1 + 1 - 1.2 + 0.8 - 1.2 + 2.0), rel=1e-5)
    assert gradient.abs().amax(1).gt(1e-6).tolist() == [True, True, False, False, False, True]
    assert metrics["t/clip_fraction"] == pytest.approx(3 / 6)
    assert metrics["t/truncated_fraction"] == pytest.approx(2 / 6)
    assert metrics["t/importance_weight"] == pytest.approx(9.5 / 6, rel=1e-5)
    assert metrics["t/importance_weight_max"] == pytest.approx(3.0, rel=1e-5)
    assert metrics["t/effective_sample_size"] == pytest.approx(9.5**2 / (6 * 19.75), rel=1e-5)


def test_the_clip_range_and_the_truncation_are_settings() -> None:
    logits, batch = make_case("random", "policy_gradient")
    own = logits[:, :VOCAB].double().log_softmax(1).gather(1, batch.targets[:, None])[:, 0]
    up = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    batch = replace(batch, teacher_logprobs=(own + up).float(), rollout_logprobs=(own - np.log(5.0)).float())
    value, _ = DistillationLoss(["t"], clip_range=0.5, max_importance_weight=4.0)(logits, batch, SHARD)
    assert value.item() == pytest.approx(0.5 * (-3 * 1.5 + 3 * 4.0), rel=1e-5)


def test_top_k_overlap_is_the_share_of_the_teachers_ids_among_the_students() -> None:
    logits, batch = make_case("random", "forward_kl")
    ranked = logits[:, :VOCAB].argsort(1, descending=True)
    ids = torch.stack([ranked[:, 0], ranked[:, 4], ranked[:, 5], ranked[:, 9], ranked[:, 1]], dim=1)
    assert evaluate(logits, replace(batch, top_ids=ids))[2]["t/top_k_overlap"] == pytest.approx(3 / 5)


def test_the_students_candidates_hold_the_sampled_token() -> None:
    logits, batch = make_case("random", "reverse_kl")
    log_q = logits[:, :VOCAB].double().log_softmax(1)
    ids = torch.cat([batch.targets[:, None], batch.top_ids], dim=1)
    expected = np.mean([log_q[row, ids[row].unique()].exp().sum() for row in range(len(ids))])
    assert evaluate(logits, batch)[2]["t/student_mass"] == pytest.approx(expected, rel=1e-5)


def test_rows_whose_teacher_tail_is_lifted_are_counted() -> None:
    assert evaluate(*make_case("sampled_in_support", "reverse_kl"))[2]["t/clip_fraction"] == 0.0
    assert evaluate(*make_case("mass_one", "reverse_kl"))[2]["t/clip_fraction"] == 1.0


def test_masked_rows_never_matter() -> None:
    logits, _ = make_case("random", "forward_kl")
    ids = np.tile(np.arange(3), (8, 1))
    lp = np.log(np.full((8, 3), 0.2, np.float32))
    scores = np.full(8, -1.0, np.float32)
    mask = np.array([1, 1, 0, 1, 0, 1, 1, 1], np.uint8)
    tokens = np.arange(9)
    clean = pack([Sample(tokens, 1, mask, scores, scores, ids, lp)], 64)[0]
    for array in (lp := lp.copy(), poisoned := scores.copy()):
        array[mask == 0] = np.nan
    dirty = pack([Sample(tokens, 1, mask, poisoned, poisoned, ids, lp)], 64)[0]
    assert evaluate(logits, clean)[0] == evaluate(logits, dirty)[0]
    assert torch.equal(evaluate(logits, clean)[1], evaluate(logits, dirty)[1])
