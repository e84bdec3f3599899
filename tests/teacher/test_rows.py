"""The row scorer on a model that is one matrix: the rows of any steps and chunks, and the memory that they take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.teacher.scorer import ScoringError, check_scores
from tests.conftest import REPO

pytestmark = pytest.mark.engine


class Runner:
    """What `RowScorer` reads of vLLM's model runner. Hidden states are random, logits are `hidden @ head.T`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        torch.manual_seed(0)
        self.head = torch.randn(vocab_size, hidden_size)
        self.device = self.head.device
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ self.head.T)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: vocab_size)
        self.num_prompt_logprobs: dict[str, int] = {}
        self.requests: dict[str, SimpleNamespace] = {}
        self.hidden: dict[str, torch.Tensor] = {}

    def add(self, name: str, token_ids: list[int], first: int, k: int, candidates: np.ndarray) -> None:
        from services.teacher.vllm_rows import extra_args

        extra = extra_args(first, candidates.astype(np.int32).tobytes(), candidates.shape[1])
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=token_ids, sampling_params=SimpleNamespace(extra_args=extra),
            num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None,
        )  # fmt: skip
        self.num_prompt_logprobs[name] = k
        self.hidden[name] = torch.randn(len(token_ids), self.head.shape[1])

    def step(self, scorer, scheduled: dict[str, int]) -> dict:
        """One engine step over `scheduled` tokens of the requests."""
        pieces = []
        for name, count in scheduled.items():
            start = self.requests[name].num_computed_tokens
            pieces.append(self.hidden[name][start : start + count])
        self.input_batch = SimpleNamespace(req_id_to_index={name: index for index, name in enumerate(scheduled)})
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *(len(piece) for piece in pieces)]))
        answers = scorer.collect(torch.cat(pieces), scheduled)
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        return answers


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("step_tokens", [1, 13, 64, 1000])
def test_rows_are_the_same_for_all_steps_and_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, step_tokens: int
) -> None:
    from services.teacher import vllm_rows

    vocab_size = 97
    monkeypatch.setattr(vllm_rows, "CPU_CHUNK_BYTES", 4 * vocab_size * chunk_rows)
    runner, rng, wanted = Runner(vocab_size, 16), np.random.default_rng(1), {}
    for index, (length, first, k, num_candidates) in enumerate(
        [(40, 1, 5, 0), (64, 13, 0, 3), (65, 64, vocab_size, 2), (30, 14, 1, 0), (2, 1, 0, 0)]
    ):
        name = f"request-{index}"
        ids = rng.integers(0, vocab_size, length).tolist()
        candidates = rng.integers(0, vocab_size, (length - first, num_candidates))
        runner.add(name, ids, first, k, candidates)
        wanted[name] = (ids, first, k, candidates)
    scorer, answers = vllm_rows.RowScorer(runner), {}
    while runner.num_prompt_logprobs:
        budget, scheduled = step_tokens, {}
        for name in runner.num_prompt_logprobs:
            left = len(runner.requests[name].prompt_token_ids) - runner.requests[name].num_computed_tokens
            if count := min(budget, left):
                scheduled[name] = count
                budget -= count
        answers |= runner.step(scorer, scheduled)
    assert answers.keys() == wanted.keys()
    for name, (ids, first, k, candidates) in wanted.items():
        table = (runner.hidden[name] @ runner.head.T).log_softmax(-1)[first - 1 : -1]
        found = vllm_rows.columns(*answers[name][:2], len(ids) - first, k, candidates.shape[1])
        assert found.ids.tolist() == ids[first:]
        own = table.gather(1, torch.tensor(ids[first:])[:, None])[:, 0]
        torch.testing.assert_close(found.logprobs, own, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.top_logprobs, table.sort(descending=True).values[:, :k], atol=1e-5, rtol=0)
        torch.testing.assert_close(table.gather(1, found.top_ids.long()), found.top_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            found.candidate_logprobs, table.gather(1, torch.from_numpy(candidates)), atol=1e-5, rtol=0
        )


def test_a_row_that_was_never_computed_is_an_error() -> None:
    """A prefix-cache hit beyond P - 1, which RowScheduler prevents, would leave such rows."""
    from services.teacher.vllm_rows import RowScorer
    from services.teacher.vllm_scorer import _scores

    runner, ids = Runner(97, 16), list(range(40))
    runner.add("a", ids, 10, 3, np.empty((30, 0)))
    runner.requests["a"].num_computed_tokens = 16
    answer = runner.step(RowScorer(runner), {"a": 24})["a"]
    scores = _scores(answer.logprob_token_ids.numpy(), answer.logprobs.numpy(), 30, 3, None)
    assert np.isnan(scores.logprobs).tolist() == [True] * 7 + [False] * 23
    with pytest.raises(ScoringError, match="NaN"):
        check_scores(ids, 10, scores)


def peak_growth_of_a_long_prompt() -> int:
    """Bytes that the process grows by, at its peak, while 2,500 rows over 151,936 ids are scored in one step."""
    from services.teacher.vllm_rows import RowScorer

    runner = Runner(151_936, 8)
    scorer = RowScorer(runner)

    def score(name: str, length: int) -> int:
        runner.add(name, [0] * length, 1, 64, np.empty((length - 1, 0)))
        runner.step(scorer, {name: length})
        # Not ru_maxrss, which begins with the peak of the process that started this one.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    before = score("short", 3)
    return score("long", 2500) - before


def test_memory_does_not_grow_with_the_prompt() -> None:
    """In a process of its own, whose peak is its own. All rows at once would be 1.5 GB."""
    code = "from tests.teacher.test_rows import peak_growth_of_a_long_prompt as peak; print(peak())"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout.split()[-1]) < 256 * 2**20
