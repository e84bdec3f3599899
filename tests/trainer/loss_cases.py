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
)


def make_case(name: str, loss: str) -> tuple[torch.Tensor, Microbatch]:
    """Logits [N, COLUMNS] float32 and the micro-batch whose rows they are."""
    rng = np.random.default_rng(CASES.index(name))
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
    logprobs = np.log(p)
    if name == "no_support":
        logprobs[:] = -np.inf
    sampled = rng.normal(size=(2, ROWS)) - 2.0
    sample = Sample(
        token_ids=np.concatenate([[1, 2], targets]),
        prompt_len=2,
        loss_mask=np.ones(ROWS, np.uint8),
        teacher_logprobs=sampled[0].astype(np.float32),
        rollout_logprobs=sampled[1].astype(np.float32),
        top_ids=ids,
        top_logprobs=logprobs.astype(np.float32),
        loss=loss,
        coefficient=0.5,
    )
    return logits, pack([sample], 64)[0]


def dense_forward_kl(log_q: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """[N] from log q [N, VOCAB] float64, one row and one class at a time."""
    values = []
    for row in range(len(log_q)):
        seen: dict[int, float] = {}
        for token, logprob in zip(batch.top_ids[row].tolist(), batch.top_logprobs[row].double().tolist()):
            if logprob > -np.inf:
                seen.setdefault(token, logprob)
        value = sum(np.exp(lp) * (lp - log_q[row, token]) for token, lp in seen.items())
        outside = [token for token in range(log_q.shape[1]) if token not in seen]
        rest = -np.expm1(np.logaddexp.reduce(list(seen.values()))) if seen else 1.0
        if outside and rest > 0:
            value = value + rest * (np.log(rest) - log_q[row, outside].logsumexp(0))
        values.append(value)
    return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values])


def dense_policy_gradient(log_q: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """[N], with the truncated weight's gradient written as w * grad(log q)."""
    own = log_q.gather(1, batch.targets[:, None])[:, 0]
    advantage = batch.teacher_logprobs.double() - own.detach()
    ratio = (own - batch.rollout_logprobs.double()).exp()
    truncated = torch.where(ratio > 2.0, 2.0 * (1 + own - own.detach()), ratio)
    return -torch.minimum(truncated * advantage, ratio.clamp(0.8, 1.2) * advantage)


DENSE: dict[str, Callable[[torch.Tensor, Microbatch], torch.Tensor]] = {
    "forward_kl": dense_forward_kl,
    "policy_gradient": dense_policy_gradient,
}


def dense_answer(name: str, loss: str) -> tuple[float, torch.Tensor]:
    """Loss of a case and its gradient [N, COLUMNS] in float64."""
    logits, batch = make_case(name, loss)
    z = logits.double().requires_grad_()
    value = (0.5 * DENSE[loss](z[:, :VOCAB].log_softmax(1), batch)).sum()
    value.backward()
    assert z.grad is not None
    return value.item(), z.grad
