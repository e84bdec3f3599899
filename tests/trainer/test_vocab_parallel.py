"""Log-probabilities at chosen ids, and the losses on a vocabulary that real gloo ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer import vocab_parallel
from services.trainer.loss import DistillationLoss
from services.trainer.vocab_parallel import VocabShard, distinct, support_logprobs
from shared.losses import LOSSES
from tests.conftest import REPO, free_port
from tests.trainer.loss_cases import CASES, COLUMNS, VOCAB, dense_answer, make_case


def test_logprobs_tail_and_gradient_equal_a_dense_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", 64)  # several chunks of rows
    torch.manual_seed(0)
    logits = torch.randn(7, 30) * 3
    ids = torch.stack([torch.randperm(30)[:4] for _ in range(7)])
    ids[:, 3] = ids[:, 1]  # asked for twice, once as part of the support
    support = torch.tensor([[True, True, False, False]]).expand(7, -1).clone()
    weights, tail_weights = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    z = logits.double().requires_grad_()
    log_q = z.log_softmax(1)
    outside = torch.ones(7, 30, dtype=torch.bool).scatter(1, ids[:, :2], False)
    tail = torch.where(outside, log_q, -torch.inf).logsumexp(1)
    ((log_q.gather(1, ids) * weights).sum() + (tail * tail_weights).sum()).backward()

    own = logits.clone().requires_grad_()
    found = support_logprobs(own, ids, support, VocabShard(0, 30, 30))
    assert torch.allclose(found.logprobs, log_q.gather(1, ids), atol=1e-6)
    assert torch.allclose(found.tail, tail, atol=1e-6)
    assert torch.equal(
        found.tail_max.float(), torch.where(outside, log_q, -torch.inf).amax(1).float()
    ) or torch.allclose(found.tail_max, torch.where(outside, log_q, -torch.inf).amax(1), atol=1e-6)
    ((found.logprobs * weights).sum() + (found.tail * tail_weights).sum()).backward()
    assert torch.allclose(own.grad.double(), z.grad, atol=2e-6)


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    base = torch.randn(3, 8, requires_grad=True)
    logits = base * 1.0
    address = logits.data_ptr()
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    found = support_logprobs(logits, torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.bool),
                             VocabShard(0, 8, 8))  # fmt: skip
    found.logprobs.sum().backward()
    assert seen == [address]
    assert base.grad is not None and torch.isfinite(base.grad).all()


class _Linear(torch.autograd.Function):
    """As Megatron's output layer: a function of its own, which keeps its inputs and not its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient[:, 0].t() @ x[:, 0]


def test_the_gradient_goes_through_views_of_a_models_output() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    ids, support = torch.tensor([[1, 2]] * 5), torch.tensor([[True, False]] * 5)
    found = support_logprobs(
        _Linear.apply(x, weight).transpose(0, 1).contiguous().squeeze(0), ids, support, VocabShard(0, 8, 8)
    )
    (found.logprobs.sum() + 2 * found.tail.sum()).backward()
    own = x.grad, weight.grad
    x.grad = weight.grad = None
    log_q = (x[:, 0] @ weight.t()).log_softmax(1)
    (log_q[:, 1:3].sum() + 2 * torch.cat([log_q[:, :1], log_q[:, 2:]], dim=1).logsumexp(1).sum()).backward()
    assert torch.allclose(own[0], x.grad, atol=1e-6) and torch.allclose(own[1], weight.grad, atol=1e-6)


def test_no_rows() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    found = support_logprobs(logits, ids, ids.bool(), VocabShard(0, 8, 8))
    found.logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 8)


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_id_outside_the_vocabulary_is_an_error(bad: int) -> None:
    ids = torch.tensor([[0, bad]])
    with pytest.raises(ValueError, match=r"vocabulary of 8"):
        support_logprobs(torch.zeros(1, 9), ids, ids.bool(), VocabShard(0, 8, 8))


def test_distinct_keeps_the_first_valid_entry_of_an_id() -> None:
    ids = torch.tensor([[4, 7, 4, 4], [1, 2, 3, 1], [0, 0, 0, 0]])
    valid = torch.tensor([[False, True, True, True], [True, True, True, True], [True, False, True, True]])
    expected = [[False, True, True, False], [True, True, True, False], [True, False, False, False]]
    assert distinct(ids, valid).tolist() == expected


def test_a_shard_may_be_all_padding() -> None:
    assert VocabShard.of(3, 8, 22, None).num_valid == 0
    assert VocabShard.of(2, 8, 22, None).num_valid == 6


@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_gradients_on_real_ranks(world: int, tmp_path: Path) -> None:
    port = str(free_port())
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(REPO / "tests" / "trainer" / "loss_rank.py")
    files = [tmp_path / f"{rank}.safetensors" for rank in range(world)]
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", script, str(r), str(world), port, str(f)], env=env, cwd=REPO)
        for r, f in enumerate(files)
    ]
    assert [p.wait(120) for p in processes] == [0] * world
    parts = [load_file(f) for f in files]
    for loss in LOSSES:
        for case in CASES:
            value, gradient = dense_answer(case, loss)
            for part in parts:
                assert float(part[f"{loss}/{case}/loss"]) == pytest.approx(value, rel=1e-5, abs=1e-6), (loss, case)
            _, sums = DistillationLoss(["t"])(*make_case(case, loss), VocabShard.of(0, COLUMNS, VOCAB, None))
            for part in parts:
                assert torch.allclose(part[f"{loss}/{case}/metrics"], sums, rtol=1e-5, atol=1e-6), (loss, case)
            joined = torch.cat([part[f"{loss}/{case}/gradient"] for part in parts], dim=1).double()
            assert torch.allclose(joined, gradient, rtol=1e-5, atol=1e-6), (loss, case)
