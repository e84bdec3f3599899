"""A teacher app on a fake scorer, reached in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.teacher.app import create_app
from services.teacher.config import TeacherConfig
from services.teacher.service import TeacherService
from shared.config import TeacherSection
from tests.teacher.fake_scorer import VOCAB_SIZE, FakeScorer
from tests.teacher.tiny_model import make_tokenizer


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
