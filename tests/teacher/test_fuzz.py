"""A teacher process with a fake scorer under requests that nobody sane sends: no 500, no growth, refused cheaply."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import httpx
import msgpack
import numpy as np
import pytest

from shared import arrays, wire
from tests.conftest import Service, free_port
from tests.fuzzing import cpu_s, fuzz_openapi, memory_mib, nested_json

MIB = 2**20


class Teacher(Service):
    """A fake teacher's process and its address."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--name", "math", "--model", str(model), "--port", str(self.port), "--dtype", "float32"]
        super().__init__([sys.executable, "-m", "tests.teacher.fake_teacher", *options], log)
        self.pid = self.process.pid


@pytest.fixture(scope="module")
def teacher(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    teacher = Teacher(fake_model, tmp_path_factory.mktemp("log") / "teacher.log")
    asyncio.run(teacher.wait_ready(f"{teacher.url}/readyz"))
    yield teacher
    teacher.stop()


async def test_a_thousand_requests_made_from_the_openapi_document(teacher: Teacher) -> None:
    answers = await asyncio.to_thread(fuzz_openapi, teacher.url, cases=1000, leave_out={"/gate"})
    assert sum(answers.values()) > 900
    assert {("/logprobs", 200), ("/generate", 200), ("/sleep", 200), ("/wake", 200), ("/info", 200)} <= set(answers)
    assert "Traceback" not in teacher.output()
    assert httpx.get(f"{teacher.url}/readyz").status_code == 200


def _packed(array: np.ndarray) -> bytes:
    return msgpack.packb({"token_ids": [arrays.pack(array)]})


@pytest.mark.parametrize(
    ("body", "codec", "status"),
    [
        (nested_json(10_000, MIB), wire.JSON, 400),
        (b"\x81" + msgpack.packb("token_ids") + b"\x91" * 10_000 + b"\x01", wire.MSGPACK, 400),
        (b"[" + b"[]," * (5 * MIB) + b"[]]", wire.JSON, 413),
        (b'{"token_ids":[[' + b"7," * 7_000_000 + b"7]]}", wire.JSON, 413),
        (b"\x81\xa9token_ids\x91\xdd" + (10_000_000).to_bytes(4, "big") + b"\x07" * 10_000_000, wire.MSGPACK, 413),
        (b"\xdd" + (15 * MIB).to_bytes(4, "big") + b"\x90" * (15 * MIB), wire.MSGPACK, 413),
        (_packed(np.zeros(4_000_000, np.int32)), wire.MSGPACK, 413),
        (_packed(np.zeros(10_000_000, np.int32)), wire.MSGPACK, 413),
        (b"\x00" * (200 * MIB), wire.MSGPACK, 413),
    ],
    ids=["deep", "deep-msgpack", "lists", "7M-ids", "10M-ids", "15M-lists", "4M-array", "10M-array", "200MiB"],
)
async def test_absurd_bodies_are_refused_cheaply(teacher: Teacher, body: bytes, codec: str, status: int) -> None:
    memory, cpu = memory_mib(teacher.pid), cpu_s(teacher.pid)
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(3):
            response = await client.post(f"{teacher.url}/logprobs", content=body, headers={"content-type": codec})
            assert response.status_code == status, response.text
    assert memory_mib(teacher.pid) - memory < 100
    assert (cpu_s(teacher.pid) - cpu) / 3 < 1.5


def test_200_mib_are_refused_before_they_are_sent(teacher: Teacher) -> None:
    head = f"POST /logprobs HTTP/1.1\r\nhost: x\r\ncontent-type: {wire.MSGPACK}\r\ncontent-length: {200 * MIB}\r\n"
    with socket.create_connection(("127.0.0.1", teacher.port), timeout=20) as connection:
        connection.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        assert json.loads(answer.read())["detail"].startswith(f"the body has {200 * MIB} bytes")
