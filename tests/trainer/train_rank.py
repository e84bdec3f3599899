"""One rank of a training: `train_rank.py MODEL TP PP OUT STEPS`, with torchrun's variables in the environment.

The last step is taken twice, straight on and resumed from a checkpoint, and must be the same to the bit.
Rank 0 writes OUT.json (results of the steps, logprobs of a sequence) and the exported model OUT/.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from services.trainer.batch import pack
from services.trainer.loss import DistillationLoss
from services.trainer.megatron_checkpoint import load_rank_state, save_rank_state
from services.trainer.megatron_model import OptimizerSettings, PolicyModel
from tests.trainer.training_samples import make_samples

SETTINGS = OptimizerSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=1.0, warmup_steps=2)
MICROBATCH_TOKENS = 96


def main(model: Path, tp: int, pp: int, out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    policy = PolicyModel.build(model, dtype="float32", tp=tp, pp=pp, optim=SETTINGS, seed=0)
    loss = DistillationLoss(["a", "b"])
    batches = [pack(make_samples(12, s), MICROBATCH_TOKENS) for s in range(steps)]
    results = [policy.train_step(batch, loss) for batch in batches[:-1]]
    save_rank_state(policy, out / "checkpoint")
    last = policy.train_step(batches[-1], loss)

    policy = PolicyModel.build(model, dtype="float32", tp=tp, pp=pp, optim=SETTINGS, seed=1)
    load_rank_state(policy, out / "checkpoint")
    results.append(policy.train_step(batches[-1], loss))
    assert results[-1] == last, "a resumed step differs"
    scores = policy.score(list(range(40)))
    policy.save_hf(out)
    if policy.layout["rank"] == 0:
        out.with_suffix(".json").write_text(
            json.dumps({"steps": [asdict(r) for r in results], "scores": [float(s) for s in scores]})
        )
    policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
