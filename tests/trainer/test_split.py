"""What each rank computes of a global batch: nothing is lost, nothing twice, and little of it is padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.batch import Microbatch, Sample, pack
from services.trainer.megatron_gpt import packed_params
from services.trainer.split import Split, context_positions, data_share, rank_part
from tests.trainer.training_samples import make_samples


def mixed_samples(count: int, shortest: int, longest: int) -> list[Sample]:
    """Sequences of lengths that spread evenly between two sizes on a logarithmic scale."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(shortest), np.log(longest), count)).astype(int)
    return [
        Sample(rng.integers(1, 99, n), n // 3, np.ones(n - n // 3, np.uint8), *np.zeros((2, n - n // 3), np.float32))
        for n in lengths
    ]


def tokens_computed(batch: Microbatch, split: Split) -> int:
    """Of all ranks that share a micro-batch; with sequence parallelism each has a part of these."""
    return sum(rank_part(batch, split, rank)[0].num_tokens for rank in range(split.cp))


@pytest.mark.parametrize("split", [Split(), Split(tp=4), Split(cp=2), Split(tp=2, cp=2)], ids=str)
def test_at_most_a_tenth_is_padding_on_mixed_lengths(split: Split) -> None:
    batches = pack(mixed_samples(200, 20, 2000), 4096)
    useful = sum(batch.num_tokens for batch in batches)
    computed = sum(tokens_computed(batch, split) for batch in batches)
    assert useful <= computed <= 1.1 * useful


def test_at_most_a_tenth_of_the_positions_that_the_cpu_attends_from_is_padding() -> None:
    batches = pack(mixed_samples(200, 20, 2000), 4096)
    useful = sum(batch.num_tokens for batch in batches)
    layouts = [packed_params(batch.cu_seqlens, cp=1, cuda=False) for batch in batches]
    assert useful <= sum(index.numel() for layout in layouts for index in layout.groups) <= 1.1 * useful


@pytest.mark.parametrize("split", [Split(cp=2), Split(cp=4, tp=2), Split(tp=3), Split(cp=3)], ids=str)
def test_every_row_is_on_one_rank_beside_its_own_token(split: Split) -> None:
    batch = pack(make_samples(7), 4096)[0]
    seen = []
    for rank in range(split.cp):
        part, kept = rank_part(batch, split, rank)
        assert part.num_tokens % split.tp == 0 and part.num_tokens * split.cp == int(part.cu_seqlens[-1])
        assert torch.equal(part.tokens[0, part.rows], batch.tokens[0, batch.rows[kept]])
        assert torch.equal(part.position_ids[0, part.rows], batch.position_ids[0, batch.rows[kept]])
        for name in ("targets", "teacher_logprobs", "top_ids", "coefficient", "loss_index"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[kept])
        seen.append(kept)
    assert torch.cat(seen).sort().values.tolist() == list(range(batch.num_loss_tokens))


def test_context_ranks_take_a_piece_of_both_halves_of_every_sequence() -> None:
    borders = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert context_positions(borders, 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert context_positions(borders, 1).tolist() == [list(range(12))]


def test_padding_lies_behind_its_sequence_and_is_no_row() -> None:
    batch = pack([replace(make_samples(1)[0])], 4096)[0]
    part, kept = rank_part(batch, Split(tp=64), 0)
    assert part.num_tokens == 64
    assert torch.equal(part.tokens[0, : batch.num_tokens], batch.tokens[0])
    assert part.cu_seqlens.tolist() == [0, batch.num_tokens, 64]
    assert torch.equal(part.rows, batch.rows) and len(kept) == batch.num_loss_tokens


def test_data_ranks_share_all_and_experts_make_the_shares_equally_long() -> None:
    batches = pack(make_samples(12), 96)
    assert len(batches) % 2 == 1
    for split in (Split(dp=2), Split(dp=2, ep=2), Split(dp=8)):
        shares = [data_share(batches, split, rank) for rank in range(split.dp)]
        assert sum(batch.num_loss_tokens for share in shares for batch in share) == sum(
            batch.num_loss_tokens for batch in batches
        )
        assert all(shares)
    assert len({len(data_share(batches, Split(dp=2, ep=2), rank)) for rank in (0, 1)}) == 1
