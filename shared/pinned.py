"""Private API of a pinned library: it may move with any version, and must not do so unseen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import ConfigError


def check_signatures(expected: Mapping[Callable[..., Any], list[str]], *, library: str, project: str) -> None:
    """Compare methods with the parameter names that they have in the pinned version.

    Args:
        project: the file that pins the version.

    Raises:
        ConfigError: a method takes other parameters.
    """
    for method, parameters in expected.items():
        found = list(inspect.signature(method).parameters)
        if found != parameters:
            raise ConfigError(
                f"this {library} is not the pinned one: {method.__qualname__} takes {found}, expected {parameters}; "
                f"install the version in {project}"
            )
