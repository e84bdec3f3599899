from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gateway.bed import Bed
from tests.teacher.conftest import fake_model

__all__ = ["bed", "fake_model"]


@pytest.fixture
def bed(run_service: Callable[..., object]) -> Bed:
    """Starts replicas and one gateway; all end with the test."""
    return Bed(run_service)
