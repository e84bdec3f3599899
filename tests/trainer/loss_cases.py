"""Rows of logits and teacher scores that a loss can get wrong, and the dense float64 answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.trainer.batch import Microbatch, Sample, pack

VOCAB = 22
COLUMNS = 24
"""Two padded columns, full of poison; 2 and 4 ranks hold 12 and 6 columns each."""
ROWS = 6
WEIGHT = 0.3
"""Of the teacher in the mixtures of jsd and skew_kl."""
REWARDED = "rewarded"
CASES = (
    "random",
    "sampled_in_support",
    "id_zero",
    "shard_borders",
    "one_id",
    "whole_vocabulary",
    "mass_near_zero",
    "mass_one",
    "large_logits",
    "repeated_ids",
    "no_support",
    "zero_probability",
    "no_rows",
    REWARDED,
)


def make_case(name: str, loss: str) -> tuple[torch.Tensor, Microbatch]:
    """Logits [N, COLUMNS] float32 and the micro-batch whose rows they are."""
    rng = np.random.default_rng(CASES.index(name))
    rows = 0 if name == "no_rows" else ROWS
    logits = torch.from_numpy(rng.normal(size=(ROWS, COLUMNS)) * 2).float()
    k = {"one_id": 1, "whole_vocabulary": VOCAB, "no_support": 2}.get(name, 5)
    ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(ROWS)])
    p = rng.dirichlet(np.ones(k + 1), size=ROWS)[:, :k]
    targets = rng.integers(0, VOCAB, ROWS)
    if name == "sampled_in_support":
        targets = ids[:, 2].copy()
    if name == "id_zero":
        ids[:, 3], targets[::2] = 0, 0
        ids[:, [0, 1, 2, 4]] = rng.permutation(np.arange(1, VOCAB))[:4]
    if name == "shard_borders":
        ids[:], targets[:] = [5, 6, 11, 12, 17], [5, 6, 11, 12, 17, 21]
    if name == "whole_vocabulary":
        p /= p.sum(1, keepdims=True)
    if name == "mass_near_zero":
        p *= 1e-12
    if name == "mass_one":
        p /= p.sum(1, keepdims=True)
    if name == "large_logits":
        logits = torch.where(torch.from_numpy(rng.random((ROWS, COLUMNS)) < 0.3), 80.0, -80.0)
    if name == "repeated_ids":
        ids[:, 4] = ids[:, 1]
    logits[:, VOCAB:] = 1000.0
    with np.errstate(divide="ignore"):
        logprobs = np.log(p)
    if name == "no_support":
        logprobs[:] = -np.inf
    if name == "zero_probability":
        logprobs[:, 2] = -np.inf
    sampled = rng.normal(size=(2, ROWS)) - 2.0
    # The teacher says one thing of a token, wherever it is asked for it.
    same = (ids == targets[:, None]) & (logprobs > -np.inf)
    sampled[0] = np.where(same.any(1), logprobs[np.arange(ROWS), same.argmax(1)], sampled[0])
    if loss == "k3" and name == "large_logits":  # else its gradient is beyond float32
        own = logits[:, :VOCAB].double().log_softmax(1).numpy()[np.arange(ROWS), targets]
        sampled[0] = own + rng.normal(size=ROWS)
    sample = Sample(
        token_ids=np.concatenate([[1, 2], targets]),
        prompt_len=2,
        loss_mask=np.full(ROWS, rows > 0, np.uint8),
        teacher_logprobs=sampled[0].astype(np.float32),
        rollout_logprobs=sampled[1].astype(np.float32),
        top_ids=ids,
        top_logprobs=logprobs.astype(np.float32),
        loss=loss,
        coefficient=0.5,
        teacher_weight=WEIGHT,
        advantage=-0.7 if name == REWARDED else 0.0,
    )
    return logits[:rows], pack([sample], 64)[0]


Classes = list[tuple[float, torch.Tensor]]
"""(p, log q) of every class of a row's coarsened distributions."""


def coarsened(log_q: torch.Tensor, ids: list[int], logprobs: list[float]) -> Classes:
    """The classes of one row from log q [VOCAB] float64: each id once, then all other tokens together."""
    seen: dict[int, float] = {}
    for token, logprob in zip(ids, logprobs):
        if logprob > -np.inf:
            seen.setdefault(token, logprob)
    classes = [(float(np.exp(logprob)), log_q[token]) for token, logprob in seen.items()]
    outside = [token for token in range(len(log_q)) if token not in seen]
    rest = -np.expm1(np.logaddexp.reduce(list(seen.values()))) if seen else 1.0
    if outside:
        classes.append((max(float(rest), 0.0), log_q[outside].logsumexp(0)))
    return classes


def kl_from_teacher(p: float, log_q: torch.Tensor, weight: float = 0.0) -> torch.Tensor | float:
    """p (log p - log m) of a class, m = weight * p + (1 - weight) * q."""
    return p * (np.log(p) - _mixed(p, log_q, weight)) if p > 0 else 0.0


def kl_from_student(p: float, log_q: torch.Tensor, weight: float) -> torch.Tensor:
    """q (log q - log m) of a class."""
    return log_q.exp() * (log_q - _mixed(p, log_q, weight))


def _mixed(p: float, log_q: torch.Tensor, weight: float) -> torch.Tensor:
    if p == 0 or weight == 0:
        return np.log1p(-weight) + log_q
    return torch.logaddexp(torch.tensor(np.log(weight * p), dtype=torch.float64), np.log1p(-weight) + log_q)


def _reverse(classes: Classes, has_tail: bool) -> torch.Tensor:
    """sum q (log q - log p), where a teacher's tail counts as 1e-6 at least."""
    floored = [*classes[:-1], (max(classes[-1][0], 1e-6), classes[-1][1])] if has_tail else classes
    return sum(log_q.exp() * (log_q - np.log(p)) for p, log_q in floored)


def _over_classes(value: Callable[[Classes], torch.Tensor]) -> Callable[[torch.Tensor, Microbatch], torch.Tensor]:
    def dense(log_q: torch.Tensor, batch: Microbatch) -> torch.Tensor:
        tables = batch.top_ids.tolist(), batch.top_logprobs.double().tolist()
        return _stack([value(coarsened(log_q[row], ids, lp)) for row, (ids, lp) in enumerate(zip(*tables))])

    return dense


def dense_reverse_kl(log_q: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """[N]; the sampled token is one of the student's candidates."""
    values = []
    for row in range(len(log_q)):
        ids = [int(batch.targets[row]), *batch.top_ids[row].tolist()]
        logprobs = [float(batch.teacher_logprobs[row]), *batch.top_logprobs[row].double().tolist()]
        known = {token for token, lp in zip(ids, logprobs) if lp > -np.inf}
        values.append(_reverse(coarsened(log_q[row], ids, logprobs), has_tail=len(known) < VOCAB))
    return _stack(values)


def _stack(values: list[torch.Tensor | float]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in [*values, 0.0]])[:-1]


def _gap(log_q: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    return log_q.gather(1, batch.targets[:, None])[:, 0] - batch.teacher_logprobs.double()


def dense_clipped(log_q: torch.Tensor, batch: Microbatch, advantage: torch.Tensor) -> torch.Tensor:
    """[N], with the truncated weight's gradient written as w * grad(log q)."""
    own = log_q.gather(1, batch.targets[:, None])[:, 0]
    ratio = (own - batch.rollout_logprobs.double()).exp()
    truncated = torch.where(ratio > 2.0, 2.0 * (1 + own - own.detach()), ratio)
    return -torch.minimum(truncated * advantage, ratio.clamp(0.8, 1.2) * advantage)


DENSE: dict[str, Callable[[torch.Tensor, Microbatch], torch.Tensor]] = {
    "forward_kl": _over_classes(lambda classes: sum(kl_from_teacher(p, q) for p, q in classes)),
    "reverse_kl": dense_reverse_kl,
    "jsd": _over_classes(
        lambda classes: (
            WEIGHT * sum(kl_from_teacher(p, q, WEIGHT) for p, q in classes)
            + (1 - WEIGHT) * sum(kl_from_student(p, q, WEIGHT) for p, q in classes)
        )
    ),
    "skew_kl": _over_classes(lambda classes: sum(kl_from_teacher(p, q, WEIGHT) for p, q in classes)),
    "k1": _gap,
    "k2": lambda log_q, batch: _gap(log_q, batch) ** 2 / 2,
    "k3": lambda log_q, batch: (-_gap(log_q, batch)).exp() - 1 + _gap(log_q, batch),
    "policy_gradient": lambda log_q, batch: dense_clipped(log_q, batch, -_gap(log_q, batch).detach()),
}


def dense_answer(name: str, loss: str) -> tuple[float, torch.Tensor]:
    """Loss of a case and its gradient [N, COLUMNS] in float64."""
    logits, batch = make_case(name, loss)
    z = logits.double().requires_grad_()
    log_q = z[:, :VOCAB].log_softmax(1)
    value = (0.5 * DENSE[loss](log_q, batch)).sum() + 0.0 * z.sum()  # without a row there is a gradient all the same
    if name == REWARDED:
        value = value + dense_clipped(log_q, batch, torch.full((len(z),), -0.7, dtype=torch.float64)).sum()
    value.backward()
    assert z.grad is not None
    return value.item(), z.grad
