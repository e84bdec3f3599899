"""Names of everything that a run keeps in Redis, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run.

    state        hash    version, step, needed (trajectories still wanted), done, failed
    cursor       int     the next prompt sequence number that nobody has had yet
    leases       zset    sequence number → time in ms at which its lease runs out (then it is handed out again)
    holders      hash    sequence number → token of the lease that holds it
    attempts     hash    sequence number → how often it was handed out
    reasons      hash    sequence number → why its last attempt failed
    trajectories stream  scored completions; an entry is deleted once a durable checkpoint holds its effect
    sizes        hash    stream entry id → payload bytes, for all entries of the stream
    waiting      hash    the same for those not yet trained or dropped: the queue that backpressure looks at
    waiting_bytes int    sum over `waiting`
    produced     list    id of every trajectory ever published (the ledger's left side)
    dead         stream  trajectories and prompts given up, with the reason
    counters     hash    requeued, lease_lost, lease_expired, prompts_failed
    policy       stream  announcements of weights
    """

    run: str

    def __getattr__(self, name: str) -> str:
        if name not in _NAMES:
            raise AttributeError(name)
        return f"opd:{self.run}:{name}"

    def evaluation(self, version: int) -> str:
        """Result of the evaluation of a policy version."""
        return f"opd:{self.run}:eval:{version}"

    def evaluation_lock(self, version: int) -> str:
        """Held by the worker that evaluates a policy version."""
        return f"opd:{self.run}:eval:{version}:lock"


_NAMES = frozenset(
    {
        "state",
        "cursor",
        "leases",
        "holders",
        "attempts",
        "reasons",
        "trajectories",
        "sizes",
        "waiting",
        "waiting_bytes",
        "produced",
        "dead",
        "counters",
        "policy",
    }
)
