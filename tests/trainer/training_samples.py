"""Samples with two teachers and both losses, the same for the same seed."""

from __future__ import annotations

import numpy as np

from services.trainer.batch import Sample
from tests.trainer.tiny_models import VOCAB


def make_samples(count: int, seed: int = 0, k: int = 6) -> list[Sample]:
    """`count` sequences of 4 to 40 tokens; the second teacher's samples take the policy gradient."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt, rows = int(rng.integers(1, 12)), int(rng.integers(3, 28))
        top = np.log(np.sort(rng.dirichlet(np.ones(k + 1), size=rows)[:, :k])[:, ::-1]).astype(np.float32)
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB, prompt + rows),
                prompt_len=prompt,
                loss_mask=(rng.random(rows) < 0.8).astype(np.uint8),
                teacher_logprobs=(rng.normal(size=rows) - 4).astype(np.float32),
                rollout_logprobs=(rng.normal(size=rows) - 5).astype(np.float32),
                top_ids=np.stack([rng.permutation(VOCAB)[:k] for _ in range(rows)]),
                top_logprobs=top,
                teacher=i % 2,
                loss=("forward_kl", "policy_gradient")[i % 2],
            )
        )
    return samples
