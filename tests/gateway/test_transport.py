"""The connections to a replica, against a server that says what the test wants, byte by byte.

On both event loops (conftest.py): the gateway runs on uvloop, in-process tests on asyncio's own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.gateway import transport
from services.gateway.transport import AnswerTooLarge, ReplicaTransport
from tests.conftest import free_port, wait_until

GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


@dataclass
class Script:
    """A server's answers, one a request; None says nothing, one that ends with `close` is its connection's last."""

    answers: list[bytes | None] = field(default_factory=list)
    is_trickling: bool = False
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while request := await reader.read(2**20):  # what one write of the client has sent
                self.requests.append(request)
                answer = self.answers.pop(0) if self.answers else GOOD
                for piece in _pieces(answer or b"", 1 if self.is_trickling else 2**20):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer and answer.endswith(b"close"):
                    break
        finally:
            self.num_open -= 1
            writer.close()


def _pieces(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@asynccontextmanager
async def connected(script: Script, secure: ssl.SSLContext | None = None) -> AsyncIterator[ReplicaTransport]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=secure)
    scheme, port = "http" if secure is None else "https", server.sockets[0].getsockname()[1]
    client = ReplicaTransport(httpx.URL(f"{scheme}://127.0.0.1:{port}"))
    try:
        yield client
    finally:
        await client.aclose()
        server.close()


async def ask(
    client: ReplicaTransport, body: bytes = b"abc", read_s: float = 20.0, max_bytes: int = 100, **headers: str
) -> tuple[int, str]:
    extensions = {"timeout": {"connect": 5.0, "read": read_s}, "max_bytes": max_bytes}
    request = httpx.Request("POST", "http://replica:1/logprobs", headers=headers, content=body, extensions=extensions)
    response = await client.handle_async_request(request)
    return response.status_code, (await response.aread()).decode()


async def test_a_request_is_one_write_and_a_connection_serves_many():
    script = Script(is_trickling=True, answers=[GOOD, CHUNKED, b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + GOOD])
    async with connected(script) as client:
        assert [await ask(client, name="value") for _ in range(4)] == [(200, "hello")] * 4
    assert script.num_connections == 1 and len(script.requests) == 4
    head, _, body = script.requests[0].partition(b"\r\n\r\n")
    assert body == b"abc"
    assert head.split(b"\r\n")[0] == b"POST /logprobs HTTP/1.1"
    assert {b"Host: replica:1", b"name: value", b"Content-Length: 3"} <= set(head.split(b"\r\n"))


async def test_requests_side_by_side_have_connections_of_their_own():
    script = Script()
    async with connected(script) as client:
        assert await asyncio.gather(*(ask(client) for _ in range(5))) == [(200, "hello")] * 5
        assert script.num_connections == 5
        assert await asyncio.gather(*(ask(client) for _ in range(5))) == [(200, "hello")] * 5
    assert script.num_connections == 5


@pytest.mark.parametrize(
    "last",
    [
        GOOD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),  # it says so
        GOOD.replace(b"hello", b"close"),  # it just does
        GOOD + b"HTTP/1.1 200 OK\r\n",  # it says more than was asked
        GOOD + b"\0\0",
    ],
)
async def test_a_connection_that_cannot_go_on_is_replaced_without_an_error(last: bytes):
    script = Script(answers=[last])
    async with connected(script) as client:
        assert (await ask(client))[0] == 200
        await wait_until(lambda: not any(connection.is_reusable for connection in client._idle))
        assert await ask(client) == (200, "hello")
    assert script.num_connections == 2


async def test_what_comes_unasked_is_answer_to_nothing():
    script = Script()
    async with connected(script) as client:
        await ask(client)
        script.answers = [GOOD, GOOD]
        (connection,) = client._idle
        connection.data_received(GOOD.replace(b"hello", b"other"))
        assert await ask(client) == (200, "hello")
    assert script.num_connections == 2


async def test_a_connection_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    script = Script()
    async with connected(script) as client:
        await ask(client)
        monkeypatch.setattr(transport, "_KEEPALIVE_S", -1.0)
        await ask(client)
        await wait_until(lambda: (script.num_connections, script.num_open) == (2, 1))


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nclose", httpx.ReadError, "ended before the answer"),
        (b"HTTP/1.1 200 OK\r\n\r\nno length, so who knows: close", httpx.ReadError, "ended before the answer"),
        (b"SSH-2.0-OpenSSH_9.2 close", httpx.RemoteProtocolError, "no HTTP answer"),
        (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", httpx.RemoteProtocolError, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, httpx.RemoteProtocolError, "endless head"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n", AnswerTooLarge, None),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n20000\r\n" + b"z" * 0x20000,
            AnswerTooLarge,
            None,
        ),
    ],
)
async def test_no_answer_that_can_be_trusted_is_an_error_and_ends_the_connection(answer, error, words):
    script = Script(answers=[answer])
    async with connected(script) as client:
        with pytest.raises(error, match=words):
            await ask(client)
        await wait_until(lambda: script.num_open == 0)
        assert await ask(client) == (200, "hello")


async def test_late_answers_and_cancelled_requests_end_their_connection():
    script = Script(answers=[None, None])
    async with connected(script) as client:
        with pytest.raises(httpx.ReadTimeout, match=r"no answer within 0\.1 s"):
            await ask(client, read_s=0.1)
        await wait_until(lambda: script.num_open == 0)
        task = asyncio.create_task(ask(client))
        await wait_until(lambda: len(script.requests) == 2)
        task.cancel()
        await wait_until(lambda: script.num_open == 0)
        assert task.cancelled()
        assert await ask(client) == (200, "hello")


async def test_nobody_there_and_headers_that_would_be_two():
    client = ReplicaTransport(httpx.URL(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(httpx.ConnectError):
        await ask(client)
    with pytest.raises(httpx.LocalProtocolError, match="'accept' holds a control character"):
        await ask(client, accept="a\r\nhost: evil")


async def test_a_closed_transport_keeps_no_connection():
    script = Script()
    async with connected(script) as client:
        await ask(client)
        await client.aclose()
        await wait_until(lambda: script.num_open == 0)
        await ask(client)  # one that was on its way
        await wait_until(lambda: script.num_open == 0)


async def test_https_needs_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(_write_certificate(tmp_path))
    script = Script()
    async with connected(script, secure) as client:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await ask(client)
    trusting = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
    monkeypatch.setattr(httpx, "create_ssl_context", lambda trust_env: trusting)
    async with connected(script, secure) as client:
        assert [await ask(client) for _ in range(2)] == [(200, "hello")] * 2
        assert script.requests[0].endswith(b"\r\n\r\nabc") and len(script.requests) == 2


def _write_certificate(folder: Path) -> Path:
    """Key and certificate of 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "replica")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(private + certificate.public_bytes(pem))
    return path
