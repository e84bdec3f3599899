"""The loss against what people write first: `python -m benchmarks.loss` prints time and extra memory, side by side.

    ours                 services/trainer/loss.py: chunks of rows, the gradient written over the logits
    log-softmax, gather  the same forward KL from a full log-softmax by autograd
    cross-entropy        torch's, on the same logits: a loss that needs no teacher

Times come from one process in which the three take turns and freed memory is kept, as in the trainer, and are the best
of several rounds, since other processes only ever add to them; memory comes from another process, as the growth of the
resident set's peak over one forward and backward pass. Then: the loss's share of a training step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.batch import Microbatch, Sample, pack
from services.trainer.loss import DistillationLoss
from services.trainer.vocab_parallel import VocabShard
from shared.losses import LOSSES

ROWS, VOCAB, TOP_K = 4096, 49_152, 64
ROUNDS = 5
STEPS = 3
STEP_TOKENS = 1024
MOST_MEMORY = 0.4
"""Of the extra memory of a full log-softmax; the loss must also be no slower."""

Variant = Callable[[torch.Tensor, Microbatch], torch.Tensor]


def ours(logits: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """Metrics and all."""
    return DistillationLoss(["t"])(logits, batch, VocabShard(0, VOCAB, VOCAB))[0]


def log_softmax_gather(logits: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """Forward KL with the tail as one class."""
    log_q = logits.float().log_softmax(1).gather(1, batch.top_ids)
    p = batch.top_logprobs.exp()
    tail_p, tail_q = (1 - p.sum(1)).clamp(min=1e-7), 1 - log_q.exp().sum(1)
    tail = tail_p * (tail_p.log() - tail_q.log())
    return (p * (batch.top_logprobs - log_q)).sum() + tail.sum()


def cross_entropy(logits: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """Of the sampled tokens."""
    return torch.nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")


VARIANTS: dict[str, Variant] = {
    "ours": ours,
    "log-softmax, gather": log_softmax_gather,
    "cross-entropy": cross_entropy,
}


class _Head(torch.autograd.Function):
    """Stands for the model: makes the logits, and lets their gradient go as soon as it has it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient[0, 0].float(), None


def make_batch(loss: str = "forward_kl") -> Microbatch:
    """ROWS rows of one sequence, with the teacher's top-k."""
    rng = np.random.default_rng(0)
    top_logprobs = np.log(rng.dirichlet(np.ones(TOP_K + 1), size=ROWS)[:, :TOP_K]).astype(np.float32)
    sample = Sample(
        token_ids=rng.integers(0, VOCAB, ROWS + 1),
        prompt_len=1,
        loss_mask=np.ones(ROWS, np.uint8),
        teacher_logprobs=np.full(ROWS, -2.0, np.float32),
        rollout_logprobs=np.full(ROWS, -10.0, np.float32),
        top_ids=rng.permuted(np.tile(np.arange(TOP_K * 8), (ROWS, 1)), axis=1)[:, :TOP_K] * 96,
        top_logprobs=top_logprobs,
        loss=loss,
        teacher_weight=LOSSES[loss].default_weight,
    )
    return pack([sample], ROWS + 1)[0]


def one_pass(variant: Variant, source: torch.Tensor, batch: Microbatch) -> tuple[float, float, int]:
    """The loss, the seconds of forward and backward, and the bytes that they needed beside the logits."""
    logits = _Head.apply(torch.ones((), requires_grad=True), source)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, began = _status("VmRSS"), time.perf_counter()
    loss = variant(logits, batch)
    loss.backward()
    seconds = time.perf_counter() - began
    return loss.item(), seconds, max(0, _status("VmHWM") - before)


def measure_times(dtype: torch.dtype) -> dict[str, Any]:
    """Least seconds and the loss by variant, and least seconds of our other losses."""
    from services.trainer.megatron_cpu import keep_freed_memory

    keep_freed_memory()
    source, batch = _logits(dtype), make_batch()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        for name, variant in VARIANTS.items():
            losses[name], spent, _ = one_pass(variant, source, batch)
            if number:  # the first one warms up
                seconds[name].append(spent)
    others = {}
    for loss in (name for name, spec in LOSSES.items() if not spec.refused):
        others[loss] = min(one_pass(ours, source, make_batch(loss))[1] for _ in range(2))
    return {"seconds": {n: min(s) for n, s in seconds.items()}, "losses": losses, "others": others}


def measure_memory(dtype: torch.dtype) -> dict[str, Any]:
    """Bytes by variant that one pass needs beside the logits, which are there before and after."""
    source, batch = _logits(dtype), make_batch()
    for variant in VARIANTS.values():
        one_pass(variant, source[:8], pack_rows(batch, 8))  # what a first call loads is no part of it
    return {"extra_bytes": {name: one_pass(variant, source, batch)[2] for name, variant in VARIANTS.items()}}


def pack_rows(batch: Microbatch, num_rows: int) -> Microbatch:
    """The first rows of a batch."""
    per_row = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in ("tokens", "position_ids")}
    cut = {n: t[:num_rows] for n, t in per_row.items() if isinstance(t, torch.Tensor) and len(t) == len(batch.rows)}
    return replace(batch, **cut)


def measure_step(model: Path) -> dict[str, Any]:
    """Median seconds of a whole training step of `model` in bfloat16, and of the loss in it, both ways."""
    from services.trainer.megatron_model import OptimizerSettings, PolicyModel
    from services.trainer.split import Split

    optim = OptimizerSettings(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip=1.0, warmup_steps=0)
    policy = PolicyModel.build(model, dtype="bfloat16", split=Split(), optim=optim, seed=0)
    rng = np.random.default_rng(0)
    rows = STEP_TOKENS // 16 - 1
    samples = [
        Sample(
            token_ids=rng.integers(0, policy.vocab_size, rows + 1),
            prompt_len=1,
            loss_mask=np.ones(rows, np.uint8),
            teacher_logprobs=np.full(rows, -2.0, np.float32),
            rollout_logprobs=np.full(rows, -10.0, np.float32),
            top_ids=np.stack([rng.choice(policy.vocab_size, TOP_K, replace=False) for _ in range(rows)]),
            top_logprobs=np.log(rng.dirichlet(np.ones(TOP_K + 1), size=rows)[:, :TOP_K]).astype(np.float32),
        )
        for _ in range(16)
    ]
    microbatches = pack(samples, STEP_TOKENS)
    loss = _TimedLoss()
    steps, shares = [], []
    for number in range(STEPS + 1):
        loss.seconds = 0.0
        began = time.perf_counter()
        policy.train_step(microbatches, loss)
        if number:
            steps.append(time.perf_counter() - began)
            shares.append(loss.seconds)
    policy.close()
    return {"step_s": statistics.median(steps), "loss_s": statistics.median(shares), "tokens": 16 * (rows + 1)}


class _TimedLoss(DistillationLoss):
    """Adds up its own time: the call, and in the backward pass from its value's gradient to that of the logits."""

    def __init__(self) -> None:
        super().__init__(["t"])
        self.seconds = 0.0

    def __call__(self, logits: torch.Tensor, batch: Microbatch, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
        logits.register_hook(self._end)
        began = time.perf_counter()
        total, sums = super().__call__(logits, batch, shard)
        self.seconds += time.perf_counter() - began
        total.register_hook(self._start)
        return total, sums

    def _start(self, _: torch.Tensor) -> None:
        self.seconds -= time.perf_counter()

    def _end(self, _: torch.Tensor) -> None:
        self.seconds += time.perf_counter()


def _logits(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(ROWS, VOCAB).normal_(std=2.0, generator=torch.Generator().manual_seed(0)).to(dtype)


def _status(field: str) -> int:
    """Bytes that the kernel shows of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _in_a_process(*arguments: str) -> dict[str, Any]:
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.loss", *arguments]
    # As in the trainer: threads that wait must not spin on cores that other processes need.
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    if done.returncode:
        raise SystemExit(f"the measurement {' '.join(arguments)} failed; its own message is above")
    return json.loads(done.stdout.splitlines()[-1])


def _report(dtype: str) -> bool:
    """Print the comparison for one dtype of the logits; whether it holds what is asked."""
    times = _in_a_process("--measure", "times", "--dtype", dtype)
    extra = _in_a_process("--measure", "memory", "--dtype", dtype)["extra_bytes"]
    seconds, baseline = times["seconds"], "log-softmax, gather"
    size = ROWS * VOCAB * torch.empty(0, dtype=getattr(torch, dtype)).element_size() / 1e6
    print(f"\nlogits {ROWS} x {VOCAB} in {dtype}, {size:,.0f} MB; forward and backward, best of {ROUNDS}")
    print(f"{'':22}{'time':>10}{'extra memory':>16}{'of log-softmax, gather':>26}")
    for name in VARIANTS:
        ratio = f"{seconds[name] / seconds[baseline]:.2f} x time, {extra[name] / extra[baseline]:.3f} x memory"
        print(f"{name:22}{seconds[name]:>8.2f} s{extra[name] / 1e6:>13,.0f} MB{ratio:>34}")
    difference = times["losses"]["ours"] / times["losses"][baseline] - 1
    print(f"the two forward KLs differ by {abs(difference):.1e} of their value")
    print("ours by loss: " + ", ".join(f"{name} {spent:.2f} s" for name, spent in times["others"].items()))
    return extra["ours"] <= MOST_MEMORY * extra[baseline] and seconds["ours"] <= seconds[baseline]


def main() -> None:
    """Print everything; exit status 1 when the loss takes more memory or time than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="folder of `opd fetch`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", choices=("times", "memory", "step"), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure == "step":
        print(json.dumps(measure_step(arguments.model)))
    elif arguments.measure:
        measure = measure_times if arguments.measure == "times" else measure_memory
        print(json.dumps(measure(getattr(torch, arguments.dtype))))
    else:
        kept = [_report("float32"), _report("bfloat16")]
        step = _in_a_process("--measure", "step", "--model", str(arguments.model))
        share = step["loss_s"] / step["step_s"]
        print(f"\na step of {arguments.model.name} over {step['tokens']} tokens in bfloat16: {step['step_s']:.2f} s")
        print(f"of which the loss {step['loss_s']:.2f} s ({share:.1%})")
        met = all(kept)
        print(f"\nat most {MOST_MEMORY} x the memory and no slower: {'yes' if met else 'NO'}")
        sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
