"""One step of TRL's GKD trainer on the work of configs/smollm2.yaml: `python -m benchmarks.trl_step`.

The same student, teacher, prompts, batch (16 completions of up to 64 tokens, all sampled from the student) and reverse
KL, with TRL's defaults but for gradient checkpointing, which would only slow it down here. TRL is no dependency of
ours; it goes to a folder of its own, see docs/benchmarks.md. Compare with `step_s` of `make smollm2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer

from shared.config import load_run
from shared.prompts import PromptSet

CONFIG = Path("configs/smollm2.yaml")
STEPS = 9
"""The first one warms up and is left out of the median."""


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, its sampling and scoring included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """A step begins with the sampling of its batch."""
        self._began = time.monotonic()

    def on_step_end(self, *_: object, **__: object) -> None:
        """It ends with the optimizer."""
        self.seconds.append(time.monotonic() - self._began)


def main() -> None:
    """Print the seconds of each step, and their median, as JSON."""
    steps = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps.add_argument("--steps", type=int, default=STEPS)
    count = steps.parse_args().steps
    config = load_run(CONFIG)
    torch.set_num_threads(2)
    prompts = PromptSet(config.prompts.sources, config.run.seed)
    records = [prompts.record_for(seq) for seq in range(count * config.trainer.batch_size)]
    rows = [
        {"messages": [*(r.messages or _asked(r.prompt)), {"role": "assistant", "content": r.answer}]} for r in records
    ]
    tokenizer = AutoTokenizer.from_pretrained(config.student.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    teacher = next(iter(config.teachers.values()))
    student, taught_by = (
        AutoModelForCausalLM.from_pretrained(m, dtype=torch.bfloat16) for m in (config.student.model, teacher.model)
    )
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GKDTrainer(
            model=student,
            teacher_model=taught_by,
            args=GKDConfig(
                output_dir=folder,
                per_device_train_batch_size=config.trainer.batch_size,
                max_steps=count,
                max_new_tokens=config.rollout.max_tokens,
                lmbda=1.0,
                beta=1.0,
                temperature=1.0,
                learning_rate=config.trainer.lr,
                max_length=config.student.max_model_len,
                gradient_checkpointing=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint="prompts"),
            processing_class=tokenizer,
            callbacks=[times],
        )
        trainer.train()
    print(json.dumps({"step_s": times.seconds, "median": statistics.median(times.seconds[1:])}))


def _asked(prompt: str | None) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt or ""}]


if __name__ == "__main__":
    main()
