"""Where a teacher's replicas are, as it is written in the configuration; lookups of names.

`http://HOST:PORT` is one replica, `dns+http://NAME:PORT` one at every address that NAME resolves to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from shared.errors import ConfigError
from shared.service_url import check_url, ip_address

DNS_PREFIX = "dns+"
LOOKUP_TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(name, port) → the IP addresses behind it; OSError when there is no answer."""


def check_source(text: str) -> str:
    """A replica's url, or `dns+http://NAME:PORT`. Raises ValueError like `check_url`."""
    if not text.startswith(DNS_PREFIX):
        return check_url(text)
    url = check_url(text.removeprefix(DNS_PREFIX))
    if not url.startswith("http://"):  # a certificate is for a name, and the replicas are called by address
        raise ValueError(f"{text!r}: only http is served behind a DNS name: write dns+http://NAME:PORT")
    return DNS_PREFIX + url


ReplicaSource = Annotated[str, AfterValidator(check_source)]


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of a checked url, with or without the DNS prefix."""
    parts = urlsplit(url.removeprefix(DNS_PREFIX))
    assert parts.hostname is not None and parts.port is not None  # check_url saw to it
    return parts.hostname, parts.port


def check_host_patterns(patterns: Sequence[str]) -> None:
    """Raises ConfigError for a network that is none, such as 10.0.0.1/8 (which has host bits set)."""
    for pattern in patterns:
        try:
            if "/" in pattern:
                ipaddress.ip_network(pattern)
        except ValueError as error:
            raise ConfigError(
                f"gateway.registration_hosts: {error}; write 10.0.0.0/8, or a name such as teacher-*"
            ) from error


def is_allowed(url: str, patterns: Sequence[str]) -> bool:
    """Whether the host of `url` lies in one of the networks or matches one of the patterns.

    A host name never lies in a network: what it resolves to may change after the check.
    """
    host, _ = host_and_port(url)
    address = ip_address(host)
    if address is not None:
        return any("/" in pattern and address in ipaddress.ip_network(pattern) for pattern in patterns)
    return any("/" not in pattern and fnmatchcase(host, pattern) for pattern in patterns)


async def resolve(name: str, port: int) -> list[str]:
    """All IPv4 addresses behind a name, or its IPv6 addresses where it has no others.

    A container with an address of each family would otherwise count as two replicas.

    Raises:
        OSError: no answer, an empty one, or none within LOOKUP_TIMEOUT_S.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LOOKUP_TIMEOUT_S):  # TimeoutError is an OSError
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    by_family = {
        family: sorted({str(address[0]) for kind, *_, address in found if kind is family})
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    # an address with a scope (fe80::1%eth0) is link-local and can stand in no url
    return by_family[socket.AF_INET] or [address for address in by_family[socket.AF_INET6] if "%" not in address]
