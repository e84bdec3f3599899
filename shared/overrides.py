"""The command line of a configuration: `--config FILE`, and `--set dotted.key=value` for one key of its tree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds `--config FILE` and `--set dotted.key=value` to a service's command line."""
    parser.add_argument("--config", type=Path, required=required, help="the run's YAML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, e.g. trainer.lr=1e-5",
    )


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key of a configuration tree; values are read as YAML. ConfigError where that is not possible."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {override}: write it as dotted.key=value")
    node: Any = tree
    parts = key.split(".")
    for part in parts[:-1]:
        if isinstance(node, list):
            node = _list_item(node, part, override)
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if not isinstance(node, dict | list):
            raise ConfigError(f"--set {override}: {part!r} is a value, not a section")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML") from error
    if isinstance(value, str):
        value = _number(value)
    if isinstance(node, list):
        _list_item(node, parts[-1], override)
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value


def _number(text: str) -> str | float:
    """YAML 1.1 takes 1e-5 for a string; people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"--set {override}: {index!r} is not an index into a list of {len(items)}")
    return items[int(index)]
