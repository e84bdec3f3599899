"""A trajectory: one completion of one prompt with everything that the trainer needs to learn from it.

Shapes: S tokens in all, P of them prompt, R = S − P response rows, k and C alternatives a row. Row t belongs to the
token `token_ids[P + t]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from shared.arrays import pack, unpack
from shared.errors import PayloadError, WireError

SCHEMA_VERSION = 2
"""Version 1 had no candidates and no advantage; it is read as one without them."""

READABLE = (1, 2)
MAX_ARRAY_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One scored completion.

    Attributes:
        id: "{prompt sequence number}-{completion number}", unique in a run.
        version_spans: (policy version, number of response tokens) in order; the counts sum to R.
        loss_mask: [R] uint8, 1 where the token is trained on.
        rollout_logprobs: [R] float32, natural log at temperature 1 by the policy that sampled.
        teacher_logprobs: [R] float32, of the sampled token.
        top_ids, top_logprobs: [R, k] the teacher's own, most likely first; k may be 0.
        candidate_ids, candidate_logprobs: [R, C] the student's most likely ids when it sampled, first the likeliest,
            and the teacher's logprobs of them; C may be 0.
        reward: task reward, None where the task has no checker.
        advantage: reward minus the mean reward of the prompt's n completions, None without a reward.
        created_at, scored_at: seconds since the epoch.
    """

    id: str
    prompt_id: str
    data_source: str
    teacher: str
    fingerprint: str
    token_ids: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    version_spans: tuple[tuple[int, int], ...]
    teacher_logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    candidate_ids: np.ndarray
    candidate_logprobs: np.ndarray
    reward: float | None
    advantage: float | None
    created_at: float
    scored_at: float

    @property
    def num_rows(self) -> int:
        """R, the number of response tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token, the one that staleness is counted from."""
        return min(version for version, _ in self.version_spans)


def encode(trajectory: Trajectory) -> bytes:
    """The versioned msgpack map that travels on the stream."""
    body: dict[str, Any] = {"schema": SCHEMA_VERSION}
    for name in Trajectory.__slots__:
        value = getattr(trajectory, name)
        body[name] = pack(value) if isinstance(value, np.ndarray) else value
    return msgpack.packb(body, use_bin_type=True)


def decode(payload: bytes, *, trajectory_id: str) -> Trajectory:
    """Read and check a payload.

    Args:
        trajectory_id: what the stream entry says that it holds.

    Raises:
        PayloadError: truncated or altered bytes, an unknown schema version, or arrays that do not fit each other.
    """
    try:
        body = msgpack.unpackb(payload, raw=False)
        if not isinstance(body, dict):
            raise WireError("the payload is no map")
        if body.get("schema") not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise WireError(f"schema version {body.get('schema')!r} is unknown, this trainer reads {known}")
        trajectory = _from_map(body)
    except (ValueError, KeyError, TypeError, msgpack.exceptions.UnpackException, WireError) as error:
        raise PayloadError(trajectory_id, f"unreadable payload: {error}") from error
    if trajectory.id != trajectory_id:
        raise PayloadError(trajectory_id, f"the payload belongs to trajectory {trajectory.id}")
    return trajectory


def check_values(trajectory: Trajectory, vocab_size: int) -> None:
    """Raises PayloadError when a value could not be trained on: non-finite logprobs or ids beyond the vocabulary.

    Among alternatives a logprob of −inf is legal (a probability of zero), NaN and +inf are not.
    """
    for name in ("rollout_logprobs", "teacher_logprobs"):
        if not np.isfinite(getattr(trajectory, name)).all():
            raise PayloadError(trajectory.id, f"{name} holds a value that is not finite")
    for name in ("top_logprobs", "candidate_logprobs"):
        if not (getattr(trajectory, name) < np.inf).all():
            raise PayloadError(trajectory.id, f"{name} holds NaN or +inf")
    if trajectory.advantage is not None and not np.isfinite(trajectory.advantage):
        raise PayloadError(trajectory.id, "advantage is not finite")
    for name in ("token_ids", "top_ids", "candidate_ids"):
        ids = getattr(trajectory, name)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise PayloadError(trajectory.id, f"{name} holds an id outside 0 … {vocab_size - 1}")


def _from_map(body: Mapping[str, Any]) -> Trajectory:
    def array(name: str, dtypes: set[str], ndim: int) -> np.ndarray:
        return unpack(body[name], dtypes=dtypes, ndim=ndim, max_bytes=MAX_ARRAY_BYTES)

    token_ids = array("token_ids", {"<i4"}, 1)
    prompt_len = int(body["prompt_len"])
    rows = len(token_ids) - prompt_len
    if prompt_len < 1 or rows < 1:
        raise WireError(f"prompt_len {prompt_len} of {len(token_ids)} tokens leaves no response")
    spans = tuple((int(version), int(count)) for version, count in body["version_spans"])
    if sum(count for _, count in spans) != rows or any(count < 1 for _, count in spans):
        raise WireError(f"version_spans {spans} do not cover {rows} response tokens")
    arrays = {
        "loss_mask": array("loss_mask", {"|u1"}, 1),
        "rollout_logprobs": array("rollout_logprobs", {"<f4"}, 1),
        "teacher_logprobs": array("teacher_logprobs", {"<f4"}, 1),
        "top_ids": array("top_ids", {"<i4"}, 2),
        "top_logprobs": array("top_logprobs", {"<f4", "<f2"}, 2),
    }
    if body["schema"] == 1:
        arrays["candidate_ids"] = np.empty((rows, 0), np.int32)
        arrays["candidate_logprobs"] = np.empty((rows, 0), np.float32)
    else:
        arrays["candidate_ids"] = array("candidate_ids", {"<i4"}, 2)
        arrays["candidate_logprobs"] = array("candidate_logprobs", {"<f4", "<f2"}, 2)
    for name, value in arrays.items():
        if len(value) != rows:
            raise WireError(f"{name} has {len(value)} rows, the response has {rows}")
    for kind in ("top", "candidate"):
        if arrays[f"{kind}_ids"].shape != arrays[f"{kind}_logprobs"].shape:
            raise WireError(f"{kind}_ids and {kind}_logprobs differ in shape")
    texts = {name: str(body[name]) for name in ("id", "prompt_id", "data_source", "teacher", "fingerprint")}
    reward, advantage = body["reward"], body.get("advantage")
    return Trajectory(
        **texts,
        **arrays,
        token_ids=token_ids,
        prompt_len=prompt_len,
        version_spans=spans,
        reward=None if reward is None else float(reward),
        advantage=None if advantage is None else float(advantage),
        created_at=float(body["created_at"]),
        scored_at=float(body["scored_at"]),
    )
