"""What is said of a configuration that does not fit: where, why, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel


def explain(model: type[BaseModel], item: Any) -> str:
    """One of pydantic's errors as people want it: where, what, and the nearest known key."""
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        message = item["msg"].removeprefix("Value error, ")
        return f"{location}: {message}" if location else message
    key = str(item["loc"][-1])
    if key in _REMOVED:
        return _removed(location)
    known = _known_keys(model, item["loc"][:-1])
    hint = f"did you mean {nearest(key, known)!r}?" if known else "it has no keys"
    return f"{location}: unknown key; {hint}"


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the section at `location`, found by walking the annotations."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = current.model_fields[part].annotation
        else:
            current = current.__args__[-1]  # dict[str, X] or list[X]
    return sorted(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known`, which is not empty, that is most like `word`."""
    return difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)[0]


def removed_keys(tree: dict[str, Any]) -> list[str]:
    """Keys that other systems have, at the top and among the teachers, where any name would pass, and the mends."""
    teachers = tree.get("teachers")
    places = {"": tree, "teachers.": teachers if isinstance(teachers, dict) else {}}
    found = [f"{place}{key}" for place, section in places.items() for key in section if key in _REMOVED]
    return [_removed(where) for where in found]


def _removed(where: str) -> str:
    return f"{where}: this key does not exist here; {_REMOVED[where.split('.')[-1]]}"


_REMOVED = {
    "distillation": "teachers, routes and losses have sections of their own: see configs/ for examples",
    "enable_resource_pool": "teachers always run on their own; delete the key, set teachers.NAME.ports (one a replica)",
    "teacher_model": "name every teacher under `teachers:` (teachers.NAME.model: PATH) and route to it under `routes:`",
    "teacher": "name every teacher under `teachers:` (teachers.NAME.model: PATH) and route to it under `routes:`",
    "n_gpus_per_node": "replicas are processes or containers: set teachers.NAME.ports, or scale the service",
    "teacher_models": "write `teachers:` with one entry per teacher name",
}
