"""Health endpoints, keys, ports and the end of a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from shared.errors import ConfigError
from shared.service import HealthServer, api_key, check_port_free, health_thread
from tests.conftest import REPO, free_port, wait_until


async def test_health_endpoints_answer_what_they_are_asked() -> None:
    port, state = free_port(), {"ready": False, "reason": "loading"}
    server = HealthServer("127.0.0.1", port, lambda: (state["ready"], state["reason"]))
    async with server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/healthz")).json() == {"status": "alive"}
        waiting = await client.get("/readyz")
        assert (waiting.status_code, waiting.json()) == (503, {"ready": False, "reason": "loading"})
        state.update(ready=True, reason="serving")
        assert (await client.get("/readyz?verbose=1")).status_code == 200
        assert "python_info" in (await client.get("/metrics")).text
        assert (await client.get("/other")).status_code == 404
        assert (await client.post("/healthz")).status_code == 405


@pytest.mark.parametrize("noise", [b"\r\n\r\n", b"GET\r\n\r\n", b"x" * 40_000, b""])
async def test_noise_on_the_health_port_is_harmless(noise: bytes) -> None:
    port = free_port()
    async with HealthServer("127.0.0.1", port, lambda: (True, "")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_health_is_answered_while_the_main_thread_computes() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/healthz"

    def answers() -> bool:
        try:
            return httpx.get(url).status_code == 200
        except httpx.TransportError:
            return False

    with health_thread("127.0.0.1", port, lambda: (True, "")):
        await wait_until(answers, 10)
    assert not answers()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*change trainer\.port"):
            check_port_free("127.0.0.1", taken.getsockname()[1], setting="trainer.port")


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_API_KEY", raising=False)
    monkeypatch.delenv("OPD_API_KEY_FILE", raising=False)
    assert api_key() is None
    monkeypatch.setenv("OPD_API_KEY", "from-env")
    assert api_key() == "from-env"
    file = tmp_path / "key"
    monkeypatch.setenv("OPD_API_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        api_key()
    file.write_text("from-file\n")
    assert api_key() == "from-file"


STUCK = """
import asyncio, shared.service
from shared import log
shared.service.STOP_WITHIN_S = 0.2
async def main():
    stop = shared.service.stop_event()
    print("up", flush=True)
    await stop.wait()
    await asyncio.sleep(600)  # what hangs: a Redis that is gone, a peer that does not answer
log.configure("stuck")
asyncio.run(main())
"""


def test_a_process_that_cannot_stop_ends_all_the_same() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO, env=dict(os.environ)
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(errors)["event"] == "stop_took_too_long"
