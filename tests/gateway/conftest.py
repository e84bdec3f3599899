from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.gateway.bed import Bed
from tests.teacher.conftest import fake_model

__all__ = ["bed", "fake_model"]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The gateway runs on uvloop: its connections are tested there too."""
    own = {"asyncio": asyncio.new_event_loop}
    return own | {"uvloop": uvloop.new_event_loop} if item.path.stem == "test_transport" else own


@pytest.fixture
def bed(run_service: Callable[..., object]) -> Bed:
    """Starts replicas and one gateway; all end with the test."""
    return Bed(run_service)
