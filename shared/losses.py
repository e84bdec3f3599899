"""The losses by name: what each asks of the teacher, which are refused and why. Formulas are in docs/losses.md.

A new loss is a line here and a function of that name, marked `@loss`, in services/trainer/losses.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Chooser = Literal["teacher", "student"]


@dataclass(frozen=True)
class LossSpec:
    """What a loss needs.

    Attributes:
        top_k_of: whose `rollout.top_k` most likely ids the teacher scores at each row; None where the sampled token's
            logprob is enough (then the teacher's top-k, if any, serves the metrics alone).
        weight_key: the key that holds the teacher's weight in a mixture of both, None for a loss without one.
        default_weight: where that key is not written.
        refused: why it cannot be trained with; empty where it can.
    """

    top_k_of: Chooser | None = None
    weight_key: Literal["beta", "alpha"] | None = None
    default_weight: float = 0.0
    refused: str = ""


LOSSES: dict[str, LossSpec] = {
    "forward_kl": LossSpec("teacher"),
    "reverse_kl": LossSpec("student"),
    "jsd": LossSpec("teacher", weight_key="beta", default_weight=0.5),
    "skew_kl": LossSpec("teacher", weight_key="alpha", default_weight=0.1),
    "k1": LossSpec(
        refused="as a supervised loss its gradient carries no teacher signal, since E[grad log q] = 0; write k2, or "
        "policy_gradient, whose advantage is -k1"
    ),
    "k2": LossSpec(),
    "k3": LossSpec(),
    "policy_gradient": LossSpec(),
}

NO_LOSS: dict[str, str] = {
    "topk_policy_gradient": "a top-k KL used as a scalar advantage has zero expected gradient, for it does not "
    "depend on the sampled token; write forward_kl or reverse_kl",
    "topk_reverse_kl": "reverse KL on the teacher's own top-k, without the rest of the mass, drives the student's mass "
    "out of the top-k; write reverse_kl, which lets the student choose the ids and keeps the rest as one more class",
}
"""Names that people may look for, and why there is no such loss."""


def loss_faults(name: str, *, teacher: str, top_k: int, weight_keys: frozenset[str]) -> Iterator[str]:
    """Why a loss would train towards nothing, and what to write instead; nothing for a sound one.

    Args:
        teacher: whose loss it is, for the message.
        top_k: `rollout.top_k`.
        weight_keys: which of `beta` and `alpha` the teacher's section sets.
    """
    where = f"teachers.{teacher}.loss: {name}"
    if name in NO_LOSS:
        yield f"{where} is refused: {NO_LOSS[name]}"
        return
    if name not in LOSSES:
        known = sorted(name for name, spec in LOSSES.items() if not spec.refused)
        yield f"{where} is unknown; there are {', '.join(known)}"
        return
    spec = LOSSES[name]
    if spec.refused:
        yield f"{where} is refused: {spec.refused}"
    if spec.top_k_of is not None and top_k < 1:
        yield f"{where} needs the {spec.top_k_of}'s top-k: set rollout.top_k to 1 or more (it is {top_k})"
    for key in sorted(weight_keys - {spec.weight_key}):
        owner = next(loss for loss, other in LOSSES.items() if other.weight_key == key)
        yield f"teachers.{teacher}.{key} belongs to the loss {owner}, and {where} has none: remove it"
