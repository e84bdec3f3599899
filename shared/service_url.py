"""The address of a service: scheme, host and port, and nothing else."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9.])?")


def check_url(text: str) -> str:
    """`http://host:port`, with nothing after it: everything else of a request is fixed.

    Raises:
        ValueError: what is wrong with it, and what to write instead.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(f"{text!r} is no address: write http://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError(f"{text!r} has more than scheme, host and port: write {parts.scheme}://{parts.netloc}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if not port:
        raise ValueError(f"{text!r} has no port: write {parts.scheme}://{parts.hostname}:PORT")
    if not _HOST.fullmatch(parts.hostname) and ip_address(parts.hostname) is None:
        raise ValueError(f"{text!r}: {parts.hostname!r} is neither a host name nor an IP address")
    return join(parts.scheme, parts.hostname, port)


ServiceUrl = Annotated[str, AfterValidator(check_url)]


def join(scheme: str, host: str, port: int) -> str:
    """The url of a host, in brackets where it is an IPv6 address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an IP address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
