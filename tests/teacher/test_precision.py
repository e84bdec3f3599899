"""A real model in bfloat16: the teacher is as close to the float32 truth as transformers in bfloat16 is, or closer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opd.fetch import fetch
from shared import wire
from tests.conftest import REPO
from tests.teacher.test_engine import Teacher

pytestmark = pytest.mark.engine

TEXTS = [
    "What is the capital of France?",
    "Write a short poem about the sea and the wind that crosses it.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain.",
    "Add 17 and 25. 17 + 25 = 42.",
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch("smollm2-135m", REPO / "models" / "smollm2-135m")


def reference(model: Path, sequences: list[list[int]]) -> dict[str, np.ndarray]:
    """Logprobs of every token from position 1 on, of all sequences in a row, by transformers in both dtypes."""
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for name in ("float32", "bfloat16"):
        network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, name))
        rows = []
        for ids in sequences:
            tokens = torch.tensor([ids])
            with torch.no_grad():
                table = network(tokens).logits[0, :-1].float().log_softmax(-1)
            rows.append(table.gather(1, tokens[0, 1:, None])[:, 0].numpy())
        found[name] = np.concatenate(rows)
    return found


async def test_bfloat16_is_as_close_as_transformers(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = [tokenizer.encode(text) for text in TEXTS]
    expected = reference(model, sequences)
    settings = ["max_num_batched_tokens=32", "max_model_len=256", "threads=2"]
    teacher = Teacher(model, tmp_path / "teacher.log", "bfloat16", settings)
    try:
        await teacher.wait_ready(f"{teacher.url}/readyz")
        results = teacher.score(wire.LogprobsRequest(token_ids=sequences, top_k=64))
    finally:
        teacher.stop()
    served = np.concatenate([scores.logprobs for scores in results])
    own_error = np.abs(served - expected["float32"]).mean()
    transformers_error = np.abs(expected["bfloat16"] - expected["float32"]).mean()
    assert own_error < 1.1 * transformers_error
    assert own_error < 0.05
    # the sampled token, where it is among the top k, has the same logprob there
    for scores in results:
        hits = scores.top_ids == scores.token_ids[:, None]
        np.testing.assert_allclose(scores.top_logprobs[hits], scores.logprobs[hits.any(axis=1)], atol=1e-6)
