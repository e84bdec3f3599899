"""The k largest of every row: the same as a stable sort, whichever way they are found."""

from __future__ import annotations

import pytest
import torch

from services.teacher.topk import top_k

PRUNED = 4096  # a vocabulary in which blocks are looked through for the smaller k


@pytest.mark.parametrize("vocab_size", [5, 333, PRUNED, PRUNED + 1])
@pytest.mark.parametrize("kind", ["distinct", "many ties", "all equal", "mostly -inf"])
def test_it_is_the_beginning_of_a_stable_sort(vocab_size: int, kind: str) -> None:
    torch.manual_seed(vocab_size)
    table = torch.randn(30, vocab_size)
    if kind == "many ties":
        table = (4 * table).round() / 4
    elif kind == "all equal":
        table[:] = -5.77
    elif kind == "mostly -inf":
        table[:, 3:] = -torch.inf
    expected = table.sort(dim=-1, descending=True, stable=True)
    for k in {1, 2, 15, 16, vocab_size // 2, vocab_size - 1, vocab_size} & set(range(1, vocab_size + 1)):
        values, ids = top_k(table, k)
        assert torch.equal(values, expected.values[:, :k])
        assert torch.equal(ids, expected.indices[:, :k])


def test_at_the_border_of_k_the_smaller_id_wins() -> None:
    table = torch.full((1, PRUNED), -9.0)
    table[0, 4000] = -1.0
    table[0, [70, 2000, 90, 4095]] = -2.0
    assert top_k(table, 3)[1].tolist() == [[4000, 70, 90]]


def test_nan_is_passed_on() -> None:
    table = torch.randn(3, PRUNED)
    table[0], table[1, 100] = torch.nan, torch.nan
    values, _ = top_k(table, 4)
    assert values.isnan().tolist() == [[True] * 4, [True, False, False, False], [False] * 4]
