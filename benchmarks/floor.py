"""The arithmetic floor: head, log-sum-exp and top-k in plain torch, alone in a process, no server around.

`python -m benchmarks.floor ROWS HIDDEN VOCAB TOP_K THREADS` prints rows a second. It works in chunks of the size that
the teacher's limit of float32 logits gives, the best of three.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_CHUNK_ROWS = 256
_REPEATS = 3


def rows_per_s(num_rows: int, hidden: int, vocab_size: int, top_k: int, threads: int) -> float:
    """Measure in a process of its own, with the threads that the engines have."""
    numbers = [str(number) for number in (num_rows, hidden, vocab_size, top_k, threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "benchmarks.floor", *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def measure_here(num_rows: int, hidden: int, vocab_size: int, top_k: int, threads: int) -> float:
    """The measurement itself, in this process."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    head = torch.randn(vocab_size, hidden)
    states = torch.randn(num_rows, hidden)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            for chunk in states.split(_CHUNK_ROWS):
                logits = torch.nn.functional.linear(chunk, head)
                logits.logsumexp(dim=-1)
                logits.topk(top_k, dim=-1)
            best = min(best, time.perf_counter() - begun)
    return num_rows / best


if __name__ == "__main__":
    sys.stdout.write(f"{measure_here(*map(int, sys.argv[1:]))}\n")
