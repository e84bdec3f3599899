"""Makers of valid objects that a test then changes in the one place it is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.trajectory import Trajectory


def make_trajectory(
    id: str = "0-0", *, rows: int = 3, k: int = 2, prompt_len: int = 4, version: int = 1, **changes: Any
) -> Trajectory:
    """A trajectory of ones and small numbers that passes every check."""
    values: dict[str, Any] = {
        "id": id,
        "prompt_id": "p0",
        "data_source": "add",
        "teacher": "math",
        "fingerprint": "f",
        "token_ids": np.arange(prompt_len + rows, dtype=np.int32),
        "prompt_len": prompt_len,
        "loss_mask": np.ones(rows, np.uint8),
        "rollout_logprobs": np.full(rows, -1.0, np.float32),
        "version_spans": ((version, rows),),
        "teacher_logprobs": np.full(rows, -0.5, np.float32),
        "top_ids": np.tile(np.arange(k, dtype=np.int32), (rows, 1)),
        "top_logprobs": np.full((rows, k), -1.5, np.float32),
        "candidate_ids": np.empty((rows, 0), np.int32),
        "candidate_logprobs": np.empty((rows, 0), np.float32),
        "reward": None,
        "advantage": None,
        "created_at": 1.0,
        "scored_at": 2.0,
    }
    return Trajectory(**{**values, **changes})


def make_run_tree(**sections: Any) -> dict[str, Any]:
    """The smallest valid configuration tree, with sections replaced."""
    tree: dict[str, Any] = {
        "run": {"name": "test", "dir": "runs/test", "steps": 4},
        "student": {"model": "models/student", "max_model_len": 64},
        "teachers": {"math": {"model": "models/math"}},
        "routes": {"add": "math"},
        "prompts": {"sources": [{"data_source": "add", "task": "add"}]},
        "rollout": {"n": 4, "max_tokens": 8, "top_k": 16},
    }
    return {**tree, **sections}
