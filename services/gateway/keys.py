"""Who may ask, how much at a time, and who may change the members. Keys are never logged.

    OPD_API_KEY[_FILE]            the key "default", which this gateway also shows to replicas
    OPD_API_KEYS[_FILE]           more of them: NAME=KEY, one a line or separated by commas
    OPD_REGISTRATION_KEY[_FILE]   registering and removing replicas

Without any key for clients the gateway starts only where nobody else can reach it, or when OPD_AUTH=off says so.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from services.gateway.config import GatewayConfig
from shared.config import GatewaySection
from shared.errors import ConfigError, Problem
from shared.service import api_key, secret
from shared.service_url import ip_address

DEFAULT = "default"
ANONYMOUS = "anonymous"

_FULL_RETRY_S = 1.0
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(slots=True)
class Client:
    """Whoever shows one key: its limits and what it has under way."""

    name: str
    max_body_bytes: int
    request_timeout_s: float
    max_concurrency: int
    in_flight: int = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request while it is served. Raises Problem 429 when there are as many as allowed."""
        if self.in_flight >= self.max_concurrency:
            detail = f"the key {self.name!r} has {self.in_flight} requests under way, the most it may have"
            raise Problem("opd:overloaded", detail, retry_after_s=_FULL_RETRY_S)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Keys:
    """The keys of one gateway.

    Args:
        clients: keys by name; none switches the authentication of clients off.
        registration: the key for changing members; None switches that off.
        upstream: what this gateway shows to replicas.
    """

    def __init__(
        self,
        settings: GatewaySection,
        clients: Mapping[str, str] | None = None,
        *,
        registration: str | None = None,
        upstream: str | None = None,
    ) -> None:
        names = clients or {ANONYMOUS: ""}
        self.clients = {name: _client(name, settings) for name in names}
        self.upstream = upstream
        self._digests = {name: _digest(key) for name, key in (clients or {}).items()}
        self._registration = None if registration is None else _digest(registration)

    @property
    def is_on(self) -> bool:
        """Whether clients must show a key."""
        return bool(self._digests)

    def identify(self, headers: Mapping[str, str]) -> Client:
        """The client whose key a request shows; every key is compared, each in the same time. Raises Problem 401."""
        if not self._digests:
            return self.clients[ANONYMOUS]
        shown = _shown(headers)
        found = [name for name, digest in self._digests.items() if hmac.compare_digest(shown, digest)]
        if not found:
            raise Problem("opd:unauthorized", "send the header `Authorization: Bearer KEY` with a key of this gateway")
        return self.clients[found[0]]

    def check_registration(self, headers: Mapping[str, str]) -> None:
        """Problem 401 unless a request shows the registration key, 403 where none is set."""
        if self._registration is None:
            raise Problem("opd:forbidden", "registration is off: set OPD_REGISTRATION_KEY at the gateway")
        if not hmac.compare_digest(_shown(headers), self._registration):
            raise Problem("opd:unauthorized", "send `Authorization: Bearer KEY` with the gateway's registration key")


def load_keys(config: GatewayConfig) -> Keys:
    """The keys of this process's environment.

    Raises:
        ConfigError: what is wrong with them, naming a key by its name only; no key where there must be one; limits for
            a key that does not exist; a teacher that waits for registrations without a key for them.
    """
    settings = config.gateway
    upstream, registration = api_key(), secret("OPD_REGISTRATION_KEY")
    clients = {} if upstream is None else {DEFAULT: upstream}
    for name, key in _read_named(secret("OPD_API_KEYS") or ""):
        if name in clients:
            raise ConfigError(f"OPD_API_KEYS: the name {name!r} is given twice (OPD_API_KEY is {DEFAULT!r})")
        if key in clients.values():
            raise ConfigError(f"OPD_API_KEYS: {name!r} has the key of another name")
        clients[name] = key
    _check_off(settings, clients)
    if unknown := sorted(settings.limits.keys() - (clients.keys() or {ANONYMOUS})):
        known = ", ".join(sorted(clients) or [ANONYMOUS])
        raise ConfigError(f"gateway.limits.{unknown[0]}: there is no key of that name; known: {known}")
    if registration is not None and registration in clients.values():
        raise ConfigError("OPD_REGISTRATION_KEY is a client's key, which could then register replicas: take another")
    waiting = [name for name, sources in config.teachers.items() if not sources]
    if waiting and registration is None:
        raise ConfigError(
            f"teacher {waiting[0]!r} has no replica but those that register, and registration is off: "
            "set OPD_REGISTRATION_KEY or OPD_REGISTRATION_KEY_FILE"
        )
    return Keys(settings, clients, registration=registration, upstream=upstream)


def _read_named(text: str) -> Iterator[tuple[str, str]]:
    for number, item in enumerate(re.split(r"[\n,]", text), 1):
        entry = item.strip()
        if not entry or entry.startswith("#"):
            continue
        name, sign, key = entry.partition("=")
        if not sign or not _NAME.fullmatch(name.strip()) or not _KEY.fullmatch(key.strip()):
            raise ConfigError(f"OPD_API_KEYS: entry {number} is not NAME=KEY, a key without spaces")
        yield name.strip(), key.strip()


def _check_off(settings: GatewaySection, clients: Mapping[str, str]) -> None:
    said = os.environ.get("OPD_AUTH", "")
    if said not in ("", "off"):
        raise ConfigError(f"OPD_AUTH={said}: the only value is `off`, for a gateway without keys")
    address = ip_address(settings.host)
    is_local = settings.host == "localhost" or (address is not None and address.is_loopback)
    if not clients and not said and not is_local:
        raise ConfigError(
            f"the gateway would listen on {settings.host} without a key: set OPD_API_KEY or OPD_API_KEY_FILE "
            "(or OPD_AUTH=off, where whoever reaches it may use it)"
        )


def _client(name: str, settings: GatewaySection) -> Client:
    limits = settings.limits.get(name)
    chosen = {} if limits is None else limits.model_dump(exclude_none=True)
    return Client(
        name,
        max_body_bytes=chosen.get("max_body_bytes", settings.max_body_bytes),
        request_timeout_s=chosen.get("request_timeout_s", settings.request_timeout_s),
        max_concurrency=chosen.get("max_concurrency", settings.max_concurrency),
    )


def _shown(headers: Mapping[str, str]) -> bytes:
    """Digest of the key that a request shows; of nothing when it shows none."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return _digest(shown.strip()) if scheme.lower() == "bearer" else b""


def _digest(key: str) -> bytes:
    """Of one length for all keys, so that comparing takes the same time for all."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
