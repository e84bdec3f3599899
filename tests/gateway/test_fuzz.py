"""A gateway in front of a teacher process with a fake scorer, under requests made from its OpenAPI document."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.fuzzing import fuzz_openapi
from tests.gateway.bed import Bed
from tests.teacher.conftest import fake_model  # noqa: F401  (a fixture)


async def test_a_thousand_requests_made_from_the_openapi_document(bed: Bed, fake_model: Path) -> None:  # noqa: F811
    port = free_port()
    options = ["--name", "math", "--model", fake_model, "--port", port, "--dtype", "float32"]
    teacher = bed.run("tests.teacher.fake_teacher", *options)
    await teacher.wait_ready(f"http://127.0.0.1:{port}/readyz")
    gateway = await bed.gateway(port)
    answers = await asyncio.to_thread(fuzz_openapi, bed.url, cases=1000, headers={"x-teacher": "math"})
    assert sum(answers.values()) > 900
    assert {("/logprobs", 200), ("/generate", 200), ("/info", 200)} <= set(answers)
    assert httpx.get(f"{bed.url}/readyz").status_code == 200
    assert '"bug"' not in teacher.output()
    assert "Traceback" not in gateway.output()
