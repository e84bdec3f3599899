"""Who may ask, and who may change the members. Keys come from the environment or from files, and are never logged."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.config import GatewayConfig
from shared.errors import ConfigError, Problem
from shared.service import api_key, secret


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one gateway.

    Attributes:
        client: what clients must show; None switches their authentication off.
        registration: what registering and removing replicas takes; None switches both off.
    """

    client: str | None = field(default=None, repr=False)
    registration: str | None = field(default=None, repr=False)

    @property
    def is_on(self) -> bool:
        """Whether clients must show a key."""
        return self.client is not None

    @property
    def upstream(self) -> str | None:
        """What this gateway shows to replicas."""
        return self.client

    def check(self, headers: Mapping[str, str]) -> None:
        """Problem 401 unless a request shows the client key."""
        if self.client is not None and not _is_shown(headers, self.client):
            raise Problem("opd:unauthorized", "send the header `Authorization: Bearer KEY` with this gateway's key")

    def check_registration(self, headers: Mapping[str, str]) -> None:
        """Problem 401 unless a request shows the registration key, 403 where none is set."""
        if self.registration is None:
            raise Problem("opd:forbidden", "registration is off: set OPD_REGISTRATION_KEY at the gateway")
        if not _is_shown(headers, self.registration):
            raise Problem("opd:unauthorized", "send `Authorization: Bearer KEY` with the gateway's registration key")


def load_keys(config: GatewayConfig) -> Keys:
    """The keys of this process's environment.

    Raises:
        ConfigError: a key file cannot be read, or a teacher waits for registrations that no key allows.
    """
    keys = Keys(client=api_key(), registration=secret("OPD_REGISTRATION_KEY"))
    if keys.registration is None:
        for name, sources in config.teachers.items():
            if not sources:
                raise ConfigError(
                    f"teacher {name!r} has no replica but those that register, and registration is off: "
                    "set OPD_REGISTRATION_KEY or OPD_REGISTRATION_KEY_FILE"
                )
    elif keys.registration == keys.client:
        raise ConfigError("OPD_REGISTRATION_KEY is OPD_API_KEY: a client could then register replicas; take another")
    return keys


def _is_shown(headers: Mapping[str, str], key: str) -> bool:
    """Whether a request shows `key`; the comparison takes the same time for every wrong one."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(shown.strip().encode(), key.encode()) and scheme.lower() == "bearer"
