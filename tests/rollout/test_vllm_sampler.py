"""The real engine: its logprobs against transformers, weight loads with tied and untied heads, loads in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from services.rollout.sampler import Completion
from services.rollout.vllm_sampler import VllmSampler
from services.rollout.weights import TOLERANCES
from shared.errors import ConfigError, WeightsError
from tests.conftest import wait_until
from tests.rollout.stale_worker import LAYER
from tests.rollout.tiny_students import EOS, logprobs, make_model, push, save

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [40, 50, 60, 70, 80, 90]
TOLERANCE = 2e-3


@dataclass
class Engine:
    """A running sampler and the models whose weights it may serve, by version."""

    sampler: VllmSampler
    models: list[Any]
    root: Path

    async def load(self, index: int, version: int) -> None:
        await self.sampler.load_weights(push(self.models[index], self.root, version), version)


def make_sampler(folder: Path, dtype: str = "float32") -> VllmSampler:
    return VllmSampler(
        folder, dtype=dtype, max_model_len=256, max_num_seqs=32, kv_cache_bytes=64 * 2**20, threads=1,
        stop_token_ids=[EOS], max_top_k=7,
    )  # fmt: skip


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=[("llama", True), ("qwen3", False)], ids=["llama-tied", "qwen3-untied"]
)
async def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    family, tied = request.param
    models = [make_model(family, tied=tied, seed=seed) for seed in range(3)]
    folder = tmp_path_factory.mktemp(family)
    sampler = make_sampler(save(models[0], folder / "student"))
    await sampler.start()
    processes = sampler._processes()
    assert sampler.alive
    assert len(processes) >= 1
    yield Engine(sampler, models, folder / "weights")
    await sampler.close()
    await sampler.close()  # a second time does nothing
    assert not sampler.alive
    assert not any(process.is_running() for process in processes), "close leaves no process behind"


def rows(completion: Completion, model: Any) -> np.ndarray:
    """What the rollout logprobs should be under `model`, [R]."""
    return logprobs(model, PROMPT + completion.token_ids)[len(PROMPT) - 1 :]


async def test_rollout_logprobs_equal_transformers(engine: Engine) -> None:
    completions = await engine.sampler.sample(PROMPT, n=4, max_tokens=24)
    assert len(completions) == 4
    assert len({tuple(completion.token_ids) for completion in completions}) > 1, "n samples differ"
    for completion in completions:
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, rows(completion, engine.models[0]), atol=TOLERANCE)
        assert completion.version_spans == [(0, len(completion.token_ids))]
        stopped = completion.finish_reason == "stop"
        assert (completion.token_ids[-1] == EOS) == stopped
        assert stopped or len(completion.token_ids) == 24


async def test_the_end_of_sequence_is_part_of_the_response(engine: Engine) -> None:
    async def until_stopped() -> Completion:
        while True:
            for completion in await engine.sampler.sample(PROMPT, n=32, max_tokens=64):
                if completion.finish_reason == "stop":
                    return completion

    completion = await asyncio.wait_for(until_stopped(), 30)
    assert completion.token_ids.index(EOS) == len(completion.token_ids) - 1
    np.testing.assert_allclose(completion.logprobs, rows(completion, engine.models[0]), atol=TOLERANCE)


async def test_greedy_takes_the_likeliest_token(engine: Engine) -> None:
    import torch

    (completion,) = await engine.sampler.sample(PROMPT, n=1, max_tokens=8, temperature=0.0)
    with torch.no_grad():
        best = engine.models[0](torch.tensor([PROMPT + completion.token_ids])).logits[0].argmax(-1)
    assert completion.token_ids == best[len(PROMPT) - 1 : -1].tolist()
    # Logprobs are those at temperature 1 also here, not those of a distribution that has all its mass on one token.
    np.testing.assert_allclose(completion.logprobs, rows(completion, engine.models[0]), atol=TOLERANCE)


async def test_the_top_k_are_the_likeliest_ids_whatever_others_ask_for(engine: Engine) -> None:
    import torch

    narrow, (wide, _), plain = await asyncio.gather(
        engine.sampler.sample(PROMPT, n=1, max_tokens=12, top_k=3),
        engine.sampler.sample(PROMPT, n=2, max_tokens=12, top_k=7),
        engine.sampler.sample(PROMPT, n=1, max_tokens=12),
    )
    assert plain[0].top_ids.shape == (len(plain[0].token_ids), 0)
    for completion, k in ((narrow[0], 3), (wide, 7)):
        with torch.no_grad():
            logits = engine.models[0](torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        assert completion.top_ids.dtype == np.int32
        assert completion.top_ids.tolist() == logits.topk(k).indices.tolist()
        np.testing.assert_allclose(completion.logprobs, rows(completion, engine.models[0]), atol=TOLERANCE)


async def test_loaded_weights_are_served_head_included(engine: Engine) -> None:
    """The trap: with tied embeddings the head's packed copy used to keep the old weights."""
    for version, index in ((5, 1), (6, 2), (7, 1)):
        await engine.load(index, version)
        served = await engine.sampler.score(PROMPT * 6)
        np.testing.assert_allclose(served, logprobs(engine.models[index], PROMPT * 6), atol=TOLERANCE)
        (completion,) = await engine.sampler.sample(PROMPT, n=1, max_tokens=16)
        np.testing.assert_allclose(completion.logprobs, rows(completion, engine.models[index]), atol=TOLERANCE)
        assert completion.version_spans == [(version, len(completion.token_ids))]


async def test_completions_in_flight_go_on_under_new_weights(engine: Engine) -> None:
    """Each token's logprob is that of the version which its span names; the context is computed anew."""
    await engine.load(0, 10)
    task = asyncio.create_task(engine.sampler.sample(PROMPT, n=24, max_tokens=200))
    await wait_until(lambda: engine.sampler._engine.output_processor.get_num_unfinished_requests() > 0)
    await asyncio.sleep(0.1)  # some tokens of version 10
    await engine.load(1, 11)
    await engine.load(2, 12)
    completions = await task
    crossing = [completion for completion in completions if len(completion.version_spans) > 1]
    assert crossing, "the loads came too late to be in flight"
    for completion in completions:
        versions = [version for version, _ in completion.version_spans]
        assert versions == sorted(set(versions))
        assert set(versions) <= {10, 11, 12}
        start = 0
        for version, num_tokens in completion.version_spans:
            expected = rows(completion, engine.models[version - 10])
            span = slice(start, start + num_tokens)
            np.testing.assert_allclose(completion.logprobs[span], expected[span], atol=TOLERANCE)
            start += num_tokens
        assert start == len(completion.token_ids)


async def test_prefix_cache_of_old_weights_is_not_used(engine: Engine) -> None:
    prompt = (PROMPT * 30)[:160]  # longer than a cache block
    await engine.load(0, 20)
    await engine.sampler.sample(prompt, n=1, max_tokens=1)
    await engine.load(1, 21)
    (completion,) = await engine.sampler.sample(prompt, n=1, max_tokens=16)
    expected = logprobs(engine.models[1], prompt + completion.token_ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


async def test_cancelling_frees_the_engine(engine: Engine) -> None:
    task = asyncio.create_task(engine.sampler.sample(PROMPT, n=8, max_tokens=240))
    unfinished = engine.sampler._engine.output_processor.get_num_unfinished_requests
    await wait_until(lambda: unfinished() > 0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await wait_until(lambda: unfinished() == 0)


async def test_missing_tensor_is_an_error_not_an_old_weight(engine: Engine) -> None:
    """Last, since the engine's weights are undefined after it."""
    model = make_model(engine.models[0].config.model_type, tied=engine.models[0].config.tie_word_embeddings, seed=0)
    state = model.state_dict()
    del state["model.norm.weight"]
    model.state_dict = lambda: state
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        await engine.sampler.load_weights(push(model, engine.root, 30), 30)


@pytest.mark.parametrize("tied", [True, False])
async def test_one_layer_that_missed_one_small_update_is_seen_in_bfloat16(tmp_path: Path, tied: bool) -> None:
    """Where the canary is blind: its bounds are a thousand times what such an update changes."""
    import torch

    model = make_model("qwen3" if tied else "llama", tied=tied, seed=0)
    sampler = make_sampler(save(model, tmp_path / "student"), "bfloat16")
    sampler._engine_args["worker_extension_cls"] = "tests.rollout.stale_worker.StaleWorker"
    await sampler.start()
    try:
        await sampler.load_weights(push(model, tmp_path / "weights", 1, dtype="bfloat16"), 1)
        before = await sampler.score(PROMPT * 6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-4 * torch.sign(torch.randn_like(parameter)))
        with pytest.raises(WeightsError, match=rf"{LAYER} does not compute with the weight that was pushed"):
            await sampler.load_weights(push(model, tmp_path / "weights", 2, dtype="bfloat16"), 2)
        bounds = TOLERANCES["bfloat16"]
        drift = np.abs(before - logprobs(model, PROMPT * 6))
        assert drift.mean() < bounds.mean and drift.max() < bounds.max, "the canary would have let it pass"
    finally:
        await sampler.close()


async def test_a_folder_that_cannot_be_served_is_a_config_error(tmp_path: Path) -> None:
    folder = save(make_model("llama", tied=True, seed=0), tmp_path / "student")
    (folder / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["NoSuchModel"]}')
    sampler = make_sampler(folder)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match="cannot serve it"):
        await sampler.start()
    await sampler.close()
    assert {p for p in psutil.Process().children(recursive=True) if p.is_running()} <= before
