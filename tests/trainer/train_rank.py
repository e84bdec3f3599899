"""One rank of several trainings: `train_rank.py CASES.json`, with torchrun's variables in the environment.

A case is {"model", "split", "out"}. Three steps; the last is taken twice, straight on and resumed from a checkpoint
with recomputation, and must be the same to the bit. Rank 0 writes OUT.json (results of the steps, logprobs of a
sequence) and the exported model OUT/.
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
from services.trainer.split import Split
from tests.trainer.training_samples import make_samples

SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, grad_clip=1.0, warmup_steps=2)
"""`eps` is as large as a gradient, so that the update depends on its scale and does not jump where it is near zero."""
STEPS = 3
MICROBATCH_TOKENS = 96
SCORED = list(range(41))


def train(model: Path, split: Split, out: Path) -> PolicyModel:
    loss = DistillationLoss(["a", "b"])
    batches = [pack(make_samples(12, seed), MICROBATCH_TOKENS) for seed in range(STEPS)]
    policy = PolicyModel.build(model, dtype="float32", split=split, optim=SETTINGS, seed=0)
    results = [policy.train_step(batch, loss) for batch in batches[:-1]]
    save_rank_state(policy, out / "checkpoint")
    last = policy.train_step(batches[-1], loss)

    policy = PolicyModel.build(model, dtype="float32", split=split, optim=SETTINGS, seed=1, recompute=True)
    load_rank_state(policy, out / "checkpoint")
    results.append(policy.train_step(batches[-1], loss))
    assert results[-1] == last, f"a resumed step differs: {results[-1]} is not {last}"
    scores = [float(score) for score in policy.score(SCORED)]
    try:
        policy.save_hf(model / "config.json" / "below-a-file")
    except OSError as error:
        assert policy.layout["rank"] == 0, error  # the others have taken part and go on
    policy.save_hf(out)
    if policy.layout["rank"] == 0:
        out.with_suffix(".json").write_text(json.dumps({"steps": [asdict(r) for r in results], "scores": scores}))
    return policy


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        policy = train(Path(case["model"]), Split(**case["split"]), Path(case["out"]))
    policy.close()  # only once: a rank that is early would find the rendezvous that rank 0 has yet to close


if __name__ == "__main__":
    main(Path(sys.argv[1]))
