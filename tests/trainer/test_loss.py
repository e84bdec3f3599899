"""Each loss and its gradient against dense float64, the metrics, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.batch import Microbatch, Sample, pack
from services.trainer.loss import LOSSES, METRICS, REFUSED, DistillationLoss, check_loss
from services.trainer.vocab_parallel import VocabShard
from shared.errors import ConfigError
from tests.trainer.loss_cases import CASES, COLUMNS, VOCAB, dense_answer, make_case

SHARD = VocabShard.of(0, COLUMNS, VOCAB, None)


def evaluate(
    logits: torch.Tensor, batch: Microbatch, teachers: tuple[str, ...] = ("t",)
) -> tuple[float, torch.Tensor, dict[str, float]]:
    own = logits.clone().requires_grad_()
    loss = DistillationLoss(teachers)
    value, sums = loss(own, batch, SHARD)
    value.backward()
    return float(value), own.grad.clone(), loss.summarise(sums)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_dense_float64_reference(case: str, loss: str) -> None:
    expected, gradient = dense_answer(case, loss)
    value, found, _ = evaluate(*make_case(case, loss))
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.allclose(found.double(), gradient, rtol=1e-5, atol=1e-6)
    assert not found[:, VOCAB:].any()


@pytest.mark.parametrize("case", CASES)
def test_forward_kl_is_never_negative(case: str) -> None:
    assert evaluate(*make_case(case, "forward_kl"))[0] >= 0


@pytest.mark.parametrize("k", [1, 5, VOCAB])
@pytest.mark.parametrize("loss", sorted(LOSSES))
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
    assert {key.split("/")[1] for key in metrics} <= set(METRICS)


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


@pytest.mark.parametrize(
    ("name", "top_k", "temperature", "words"),
    [
        *[(name, 8, 1.0, "refused") for name in REFUSED],
        ("forwrd_kl", 8, 1.0, "there are forward_kl, policy_gradient"),
        ("forward_kl", 0, 1.0, "rollout.top_k"),
        ("forward_kl", 8, 0.7, "rollout.temperature"),
        ("policy_gradient", 0, 1.3, "rollout.temperature"),
    ],
)
def test_combinations_that_train_towards_nothing_are_refused(
    name: str, top_k: int, temperature: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_loss(name, teacher="math", top_k=top_k, temperature=temperature)
    assert "math" in str(error.value)


def test_what_is_sound_passes() -> None:
    check_loss("forward_kl", teacher="math", top_k=1, temperature=1.0)
    check_loss("policy_gradient", teacher="math", top_k=0, temperature=1.0)
