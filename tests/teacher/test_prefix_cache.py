"""The prefix cache of the real teacher: what it spares, and that no answer differs for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from shared import wire
from tests.teacher.test_engine import VOCAB_SIZE, Teacher, picked, sequence

pytestmark = pytest.mark.engine

BLOCK = 32  # tokens whose keys and values are kept or evicted together
CHUNK = 64  # max_num_batched_tokens: prompts are prefilled in chunks
MAX_LEN = 500
ATOL = 1e-3
SETTINGS = [
    f"max_num_batched_tokens={CHUNK}", f"max_model_len={MAX_LEN}", "max_num_seqs=32", "max_top_k=320",
    # 64 blocks: less than the sequences below need together, so that blocks are evicted and found again
    f"kv_cache_bytes={1 << 20}",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    teacher = Teacher(model, tmp_path_factory.mktemp("log") / "teacher.log", settings=SETTINGS)
    asyncio.run(teacher.wait_ready(f"{teacher.url}/readyz"))
    yield teacher
    teacher.stop()


def cached_tokens_metric(teacher: Teacher) -> float:
    return float(
        re.search(r"^opd_teacher_cached_tokens_total (\S+)$", httpx.get(f"{teacher.url}/metrics").text, re.M)[1]
    )


@pytest.mark.parametrize(
    ("length", "prompt_len", "cached"),
    [
        (200, 1, 0),
        (200, BLOCK, 0),  # position P - 1 is the last of block 0
        (200, BLOCK + 1, BLOCK),  # the first of block 1: block 0 is not needed
        (200, 5 * BLOCK, 4 * BLOCK),
        (200, 5 * BLOCK + 1, 5 * BLOCK),
        (200, 5 * BLOCK + 2, 5 * BLOCK),
        (200, 2 * CHUNK + 1, 2 * CHUNK),
        (6 * BLOCK, 6 * BLOCK - 1, 5 * BLOCK),
        (6 * BLOCK + 2, 6 * BLOCK + 1, 6 * BLOCK),
    ],
)
def test_the_same_sequence_again_has_the_same_rows(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray], length: int, prompt_len: int, cached: int
) -> None:
    ids = sequence(length, seed=1000 * length + prompt_len)
    candidates = np.random.default_rng(0).integers(0, VOCAB_SIZE, (length - prompt_len, 3)).astype(np.int32)
    request = wire.LogprobsRequest(token_ids=[ids], prompt_len=[prompt_len], top_k=7, candidate_ids=[candidates])
    before = cached_tokens_metric(teacher)
    cold, warm = teacher.ask(request), teacher.ask(request)
    assert (cold.usage["cached_tokens"], warm.usage["cached_tokens"]) == (0, cached)
    assert cached_tokens_metric(teacher) - before == cached
    table = reference(ids)[prompt_len - 1 :]
    for scores in (cold.results[0], warm.results[0]):
        np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, prompt_len), atol=ATOL)
        np.testing.assert_allclose(scores.candidate_logprobs, np.take_along_axis(table, candidates, 1), atol=ATOL)
    np.testing.assert_allclose(warm.results[0].logprobs, cold.results[0].logprobs, atol=ATOL)
    np.testing.assert_allclose(warm.results[0].top_logprobs, cold.results[0].top_logprobs, atol=ATOL)


def test_a_hit_ends_before_the_rows_of_this_request(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray]
) -> None:
    """What others have left in the cache reaches further than the shorter prompts here."""
    ids = sequence(300, seed=1)
    teacher.score(wire.LogprobsRequest(token_ids=[ids], prompt_len=[299]))
    for prompt_len, cached in ((200, 192), (100, 96), (33, 32), (32, 0), (1, 0)):
        response = teacher.ask(wire.LogprobsRequest(token_ids=[ids], prompt_len=[prompt_len]))
        assert response.usage["cached_tokens"] == cached
        [scores] = response.results
        np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, prompt_len), atol=ATOL)


def test_completions_of_a_prompt_share_its_prefill(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray]
) -> None:
    prompt = sequence(384, seed=2)
    batch = [prompt + sequence(64, seed=seed) for seed in range(3, 10)]
    batch.append(batch[0])  # two completions may be the same
    response = teacher.ask(wire.LogprobsRequest(token_ids=batch, prompt_len=[384] * 8, top_k=5))
    for ids, scores in zip(batch, response.results, strict=True):
        np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, 384), atol=ATOL)
    tokens = response.usage["tokens"]
    assert tokens == 8 * 448
    assert tokens >= 3 * (tokens - response.usage["cached_tokens"])


def test_rows_are_right_while_blocks_are_evicted(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray]
) -> None:
    rng = np.random.default_rng(11)
    prompts = [sequence(length, seed=length) for length in (33, 130, 200, 384)]
    batch = [prompts[index % 4] + sequence(int(rng.integers(1, 90)), seed=20 + index) for index in range(40)]
    lengths = [len(prompts[index % 4]) for index in range(40)]
    response = teacher.ask(wire.LogprobsRequest(token_ids=batch, prompt_len=lengths, top_k=5))
    assert response.usage["cached_tokens"] > 0
    for ids, prompt_len, scores in zip(batch, lengths, response.results, strict=True):
        np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, prompt_len), atol=ATOL)


async def test_switched_off_every_token_is_computed(model: Path, tmp_path: Path) -> None:
    teacher = Teacher(model, tmp_path / "teacher.log", settings=[*SETTINGS, "prefix_caching=false"])
    try:
        await teacher.wait_ready(f"{teacher.url}/readyz")
        request = wire.LogprobsRequest(token_ids=[sequence(200, seed=1)] * 3, prompt_len=[150] * 3)
        assert [teacher.ask(request).usage["cached_tokens"] for _ in range(2)] == [0, 0]
        assert cached_tokens_metric(teacher) == 0
    finally:
        teacher.stop()
