"""Which keys of a run's configuration may differ when it is resumed: those that change how it runs, not what it is."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from shared.config import Section
from shared.errors import ConfigError

_MAY_CHANGE = {
    "run": ("dir", "steps"),
    # addresses, and limits of an engine
    "teachers.*": ("host", "ports.*", "discovery", "max_*", "kv_cache_bytes", "threads"),
    "gateway": ("*",),
    "redis": ("url",),
    "rollout": ("host", "port", "concurrency", "max_num_seqs", "kv_cache_bytes", "threads", "lease_s", "max_attempts"),
    "flow": ("*",),
    "trainer": (
        *("host", "port", "threads", "microbatch_tokens", "checkpoint_every", "keep_*", "data_timeout_s"),
        *("max_bad_trajectories", "max_skipped_steps"),
        # the optimizer's: a lower rate is what one tries after steps whose gradient was not finite
        *("lr", "betas.*", "eps", "weight_decay", "grad_clip", "warmup_steps"),
        "recompute",
        "*_parallel",  # a checkpoint that cannot be read with another split says so itself
    ),
    "eval": ("*",),
}
"""Everything else makes another run of it: what is sampled, who scores it, what is learned from it."""

_NAMED = 4


def check_same_run(before: Section, now: Section, *, where: str) -> None:
    """Refuse to resume with a configuration that makes another run of it.

    Args:
        before: the configuration, or a service's part of it, that the run had.
        now: the same of the process that would resume it.
        where: names the run in the message.

    Raises:
        ConfigError: names the keys with both values, and the mend.
    """
    old, new = _leaves(before.model_dump(mode="json")), _leaves(now.model_dump(mode="json"))
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and not _may_change(key)]
    if keys:
        said = "; ".join(f"{key} was {_shown(old, key)} and is {_shown(new, key)}" for key in keys[:_NAMED])
        more = f"; and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        raise ConfigError(
            f"{where} was begun with another configuration and cannot go on with this one: {said}{more}: change it "
            "back, start anew with --fresh, or take another --set run.dir=…"
        )


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, f"{section}.{name}") for section, names in _MAY_CHANGE.items() for name in names)


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Dotted key → value, lists by index."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= _leaves(value, f"{path}.{key}" if path else str(key))
    return found


def _shown(leaves: dict[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not there"
