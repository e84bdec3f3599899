"""One tensor-parallel rank of the loss tests: `loss_rank.py RANK WORLD PORT FILE` writes {case: loss, gradient}."""

from __future__ import annotations

import sys

import torch.distributed as dist
from safetensors.torch import save_file

from services.trainer.loss import DistillationLoss
from services.trainer.vocab_parallel import VocabShard
from shared.losses import LOSSES
from tests.trainer.loss_cases import CASES, COLUMNS, VOCAB, make_case


def main(rank: int, world: int, port: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    width = COLUMNS // world
    shard = VocabShard.of(rank, width, VOCAB, dist.group.WORLD)
    results = {}
    for loss in LOSSES:
        for case in CASES:
            logits, batch = make_case(case, loss)
            part = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
            value, sums = DistillationLoss(["t"])(part, batch, shard)
            value.backward()
            results[f"{loss}/{case}/loss"] = value.detach()
            results[f"{loss}/{case}/gradient"] = part.grad.clone()
            results[f"{loss}/{case}/metrics"] = sums
    save_file(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
