"""Samples with two teachers, every loss and task rewards, the same for the same seed."""

from __future__ import annotations

import numpy as np

from services.trainer.batch import Sample
from shared.losses import LOSSES
from tests.trainer.tiny_models import VOCAB

_TRAINABLE = [name for name, spec in LOSSES.items() if not spec.refused]


def make_samples(count: int, seed: int = 0, k: int = 6) -> list[Sample]:
    """`count` sequences of 4 to 40 tokens, each loss in turn, of two teachers by turns."""
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
                loss=_TRAINABLE[i % len(_TRAINABLE)],
                teacher_weight=0.3,
                advantage=(0.2, 0.0, -0.1)[i % 3],
                id=str(i),
            )
        )
    return samples
