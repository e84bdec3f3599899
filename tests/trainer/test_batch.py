"""Packing: where rows and borders lie, and what a sample may not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.batch import Sample, pack, scoring_microbatch
from shared.errors import PayloadError


def sample(prompt: int, rows: int, *, first: int = 0, k: int | None = 2, **changes: Any) -> Sample:
    """A sample of distinct values: token `first + i` at position i, logprobs that name their row."""
    fields: dict[str, Any] = {
        "token_ids": np.arange(first, first + prompt + rows),
        "prompt_len": prompt,
        "loss_mask": np.ones(rows, np.uint8),
        "teacher_logprobs": -np.arange(rows, dtype=np.float32),
        "rollout_logprobs": -10 - np.arange(rows, dtype=np.float32),
        "top_ids": None if k is None else np.arange(rows * k).reshape(rows, k),
        "top_logprobs": None if k is None else np.full((rows, k), -1.0, np.float16),
    }
    return Sample(**{**fields, **changes})


def test_row_t_is_predicted_from_position_p_minus_one_plus_t() -> None:
    batch = pack([sample(3, 4, first=10), sample(1, 2, first=50, teacher=1, coefficient=0.5)], 64)[0]
    assert batch.tokens.tolist() == [[*range(10, 17), 50, 51, 52]]
    assert batch.position_ids.tolist() == [[*range(7), 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 7, 10]
    assert batch.rows.tolist() == [2, 3, 4, 5, 7, 8]
    assert batch.targets.tolist() == [13, 14, 15, 16, 51, 52]
    assert torch.equal(batch.tokens[0, batch.rows + 1], batch.targets)
    assert batch.teacher_logprobs.tolist() == [0, -1, -2, -3, 0, -1]
    assert batch.rollout_logprobs.tolist() == [-10, -11, -12, -13, -10, -11]
    assert batch.teacher.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.coefficient.tolist() == [1, 1, 1, 1, 0.5, 0.5]


def test_masked_rows_are_left_out() -> None:
    batch = pack([sample(2, 4, loss_mask=np.array([0, 1, 0, 1], np.uint8))], 64)[0]
    assert batch.rows.tolist() == [2, 4]
    assert batch.top_ids.tolist() == [[2, 3], [6, 7]]
    assert batch.num_loss_tokens == 2


def test_fewer_top_ids_are_filled_with_zero_probability() -> None:
    batch = pack([sample(2, 2, k=3), sample(2, 1, k=1), sample(1, 1, k=None, loss="policy_gradient")], 64)[0]
    assert batch.top_logprobs.isneginf().tolist() == [[False] * 3, [False] * 3, [False, True, True], [True] * 3]
    assert batch.loss_names == ("forward_kl", "policy_gradient")
    assert batch.loss_index.tolist() == [0, 0, 0, 1]


def test_first_fit_decreasing_is_deterministic_and_within_the_limit() -> None:
    rng = np.random.default_rng(0)
    samples = [sample(int(rng.integers(1, 9)), int(rng.integers(1, 20)), first=i) for i in range(50)]
    batches = pack(samples, 40)
    assert all(batch.num_tokens <= 40 for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == sum(len(s.token_ids) for s in samples)
    assert sum(batch.num_loss_tokens for batch in batches) == sum(len(s.loss_mask) for s in samples)
    assert len(batches) <= 1.25 * sum(batch.num_tokens for batch in batches) / 40
    again = pack(samples, 40)
    assert [b.tokens.tolist() for b in batches] == [b.tokens.tolist() for b in again]


def test_a_sample_longer_than_the_limit_has_a_microbatch_to_itself() -> None:
    batches = pack([sample(2, 3), sample(4, 30)], 16)
    assert [batch.num_tokens for batch in batches] == [34, 5]


def test_the_mask_is_causal_within_a_sequence_and_closed_between_them() -> None:
    batch = pack([sample(2, 1), sample(1, 1)], 64)[0]
    o, x = False, True
    assert batch.attention_mask()[0, 0].tolist() == [
        [o, x, x, x, x],
        [o, o, x, x, x],
        [o, o, o, x, x],
        [x, x, x, o, x],
        [x, x, x, o, o],
    ]


def test_single_rows_and_empty_responses() -> None:
    batch = pack([sample(3, 0), sample(2, 1, first=7)], 64)[0]
    assert batch.num_tokens == 6
    assert batch.num_loss_tokens == 1
    assert batch.targets.tolist() == [9]
    assert pack([], 64) == []


def test_scoring_covers_every_token_but_the_first() -> None:
    batch = scoring_microbatch([5, 6, 7])
    assert batch.rows.tolist() == [0, 1] and batch.targets.tolist() == [6, 7]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sample(0, 3), "prompt_len 0"),
        (lambda: sample(2, 3, loss_mask=np.ones(4, np.uint8)), "loss_mask"),
        (lambda: sample(2, 3, teacher_logprobs=np.zeros(2, np.float32)), "teacher_logprobs"),
        (lambda: sample(2, 3, rollout_logprobs=np.full(3, np.nan, np.float32)), "not finite"),
        (lambda: sample(2, 3, teacher_logprobs=np.full(3, -np.inf, np.float32)), "not finite"),
        (lambda: sample(2, 3, top_ids=np.zeros((3, 3), int)), "top_ids"),
        (lambda: sample(2, 3, top_ids=None), "only together"),
        (lambda: sample(2, 3, top_logprobs=np.full((3, 2), np.nan, np.float32)), "NaN"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(make: Callable[[], Sample], words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        make()
