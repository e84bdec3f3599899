"""httpx's way to one replica: HTTP/1.1 with as little as possible between a request and the wire.

    ReplicaTransport ── idle connections, newest last ── _Connection ── httptools, the parser of uvicorn

A request is one write, an answer is parsed as it arrives and handed over when it is complete. httpx's own transport
(httpcore, h11, anyio) costs more processor time than the rest of the gateway together, and while engines keep all cores
busy that time is waited for. No redirects, proxies, HTTP/2, trailers, or answers that end with their connection.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque

import httptools
import httpx

MAX_CONNECTIONS_KEPT = 256
_KEEPALIVE_S = 3.0  # less than uvicorn's 5 s: the replica must not close a connection just as a request goes out on it
_MAX_HEAD_BYTES = 2**16
_NO_HEADER_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class AnswerTooLarge(Exception):
    """The answer exceeds the bytes that the request allows."""


class ReplicaTransport(httpx.AsyncBaseTransport):
    """Connections to one scheme, host and port.

    A request's extensions say what it may take: `timeout` as httpx writes it, of which `connect` and `read` (for all
    the rest) count, and `max_bytes` of the answer's body.
    """

    def __init__(self, url: httpx.URL) -> None:
        secure = url.scheme == "https"
        self._host, self._port = url.host, url.port or (443 if secure else 80)
        self._ssl = httpx.create_ssl_context(trust_env=False) if secure else None
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The complete answer.

        Raises:
            httpx.TransportError: no connection, no complete answer, or not in time.
            AnswerTooLarge: see there; the rest of the answer is not read.
        """
        head = _head(request)
        timeout = request.extensions["timeout"]
        try:
            async with asyncio.timeout(timeout["read"]):
                connection = self._take() or await self._connect(timeout["connect"])
                answer = await connection.exchange(head, request.content, request.extensions["max_bytes"])
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {timeout['read']:.1f} s") from None
        self._put_back(connection)
        return answer

    async def aclose(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().abort()

    def _take(self) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - _KEEPALIVE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    def _put_back(self, connection: _Connection) -> None:
        if self._is_closed or not connection.is_reusable or len(self._idle) >= MAX_CONNECTIONS_KEPT:
            connection.abort()
        else:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {timeout_s:.1f} s") from None
        except OSError as error:  # also a certificate that does not fit
            raise httpx.ConnectError(str(error)) from error
        return connection


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    for name, value in request.headers.raw:
        if _NO_HEADER_VALUE.search(value):
            raise httpx.LocalProtocolError(f"the header {name.decode()!r} holds a control character")
        lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection with at most one request under way. The methods on_… are the parser's.

    Attributes:
        idle_since: on the clock of the event loop.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._is_clean = False
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[httpx.Response] | None = None
        self._max_bytes = 0

    @property
    def is_reusable(self) -> bool:
        """It is open, and nothing of an earlier exchange can come any more."""
        return self._is_clean and not self._transport.is_closing()

    async def exchange(self, head: bytes, body: bytes, max_bytes: int) -> httpx.Response:
        """Send a request and wait for its answer; without one, whatever the reason, the connection is closed."""
        self._is_clean = False
        self._max_bytes = max_bytes
        self._begin()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines((head, body))
        try:
            return await self._answer
        except BaseException:  # also a cancellation: the replica learns of it in this way
            self.abort()
            raise

    def abort(self) -> None:
        """Close it without sending what is not sent yet."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(httpx.ReadError(str(error) if error else "the connection ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._is_clean = False
            self._fail(httpx.RemoteProtocolError(f"no HTTP answer: {error!r}"))
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_HEAD_BYTES + (self._max_bytes if self._has_head else 0):
            self._fail(AnswerTooLarge() if self._has_head else httpx.RemoteProtocolError("an endless head"))

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():
            self._is_clean = False  # more than was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        length = next((value for name, value in self._headers if name.lower() == b"content-length"), b"")
        if length.isdigit() and int(length) > self._max_bytes:
            self._fail(AnswerTooLarge())

    def on_body(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._begin()  # the answer itself is still to come
            return
        if self._answer is None or self._answer.done():
            return
        self._is_clean = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._answer.set_result(httpx.Response(status, headers=self._headers, stream=httpx.ByteStream(body)))
        self._chunks = []

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._has_head = False

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
