"""Configuration of the gateway: where it listens, its limits, and the addresses of every teacher's replicas."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import Field

from services.gateway.addresses import DNS_PREFIX, ReplicaSource, check_host_patterns
from shared.config import (
    GatewaySection,
    ReplicasSection,
    Section,
    ServiceName,
    parse,
)
from shared.errors import ConfigError
from shared.overrides import add_config_arguments
from shared.parts import GatewayPart, load_part
from shared.service_url import join


class GatewayConfig(Section):
    """All that the gateway knows of a run.

    Attributes:
        teachers: replica addresses and DNS names by teacher name; a teacher without any waits for replicas to
            register. There is no default teacher.
    """

    gateway: GatewaySection
    teachers: dict[ServiceName, list[ReplicaSource]] = Field(min_length=1)


def load(argv: Sequence[str] | None = None) -> GatewayConfig:
    """The configuration from the command line, and from a run's file where one is named.

    Raises:
        ConfigError: what is wrong and what to write instead.
    """
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description=__doc__)
    add_config_arguments(parser, required=False)
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a replica of a teacher, http://HOST:PORT; all replicas behind a name, dns+http://NAME:PORT; or "
        "`register` for those that register themselves. Repeat it for more",
    )
    args = parser.parse_args(argv)
    if (args.config is None) == (not args.teacher):
        raise ConfigError("name the teachers either with --teacher NAME=http://HOST:PORT or with --config FILE")
    if args.config is not None:
        part = load_part(GatewayPart, args.config, args.overrides)
        gateway: dict[str, Any] = part.gateway.model_dump()
        teachers = {name: _sources(section) for name, section in part.teachers.items()}
    else:
        gateway = _read_overrides(args.overrides)
        teachers = _read_teachers(args.teacher)
    gateway |= {name: value for name in ("host", "port") if (value := getattr(args, name)) is not None}
    config = parse(GatewayConfig, {"gateway": gateway, "teachers": teachers}, origin=str(args.config or "command line"))
    _check_addresses(config)
    check_host_patterns(config.gateway.registration_hosts)
    return config


def _sources(section: ReplicasSection) -> list[str]:
    prefix = {"ports": "", "dns": DNS_PREFIX, "register": None}[section.discovery]
    return [] if prefix is None else [prefix + join("http", section.host, port) for port in section.ports]


def _read_teachers(items: Sequence[str]) -> dict[str, list[str]]:
    teachers: dict[str, list[str]] = {}
    for item in items:
        name, sign, url = item.partition("=")
        if not sign or not name or not url:
            raise ConfigError(f"--teacher {item}: write it as NAME=http://HOST:PORT")
        sources = teachers.setdefault(name, [])
        if url != "register":
            sources.append(url)
    return teachers


def _read_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`gateway.key=value` texts; without a run's file there is no other section to set."""
    values: dict[str, Any] = {}
    for item in items:
        key, sign, text = item.partition("=")
        section, _, name = key.partition(".")
        if not sign or section != "gateway" or not name:
            raise ConfigError(f"--set {item}: without --config only gateway.KEY=VALUE can be set")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item}: the value is not YAML") from error
    return values


def _check_addresses(config: GatewayConfig) -> None:
    """A replica serves one teacher: the same address twice is a slip."""
    owners: dict[str, str] = {}
    for name, urls in config.teachers.items():
        for url in urls:
            if url in owners:
                raise ConfigError(f"{url} is named twice, for {owners[url]!r} and {name!r}: give each its own address")
            owners[url] = name
