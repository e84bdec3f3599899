"""A teacher app on a fake scorer, reached in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.teacher.app import create_app
from services.teacher.config import TeacherConfig
from services.teacher.service import TeacherService
from shared.config import TeacherSection
from tests.teacher.fake_scorer import VOCAB_SIZE, FakeScorer
from tests.teacher.tiny_model import make_tiny_llama, make_tokenizer


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a config and a weight file that holds nothing."""
    folder = tmp_path_factory.mktemp("fake-model")
    make_tokenizer(folder, VOCAB_SIZE)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    header = b"{}      "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    return folder


@pytest.fixture
def scorer() -> FakeScorer:
    return FakeScorer()


@pytest.fixture
def config(fake_model: Path) -> TeacherConfig:
    section = TeacherSection(model=fake_model, dtype="float32", max_body_bytes=20_000, max_queued_tokens=100)
    return TeacherConfig(name="math", port=8101, teacher=section)


@pytest.fixture
async def service(config: TeacherConfig, scorer: FakeScorer) -> TeacherService:
    service = TeacherService(config, scorer)
    await service.start()
    return service


@pytest.fixture
async def client(service: TeacherService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, key=None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        yield client


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with 320 ids and 512 positions."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Callable[[list[int]], np.ndarray]:
    """log-softmax [S - 1, V] of a float32 transformers forward; row i is about token i + 1."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def forward(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return network(torch.tensor([token_ids])).logits[0].log_softmax(-1)[:-1].numpy()

    return forward
