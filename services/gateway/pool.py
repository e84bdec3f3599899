"""The replicas of one teacher: which of them takes the next request, and which of them may serve at all.

Balancing is least outstanding tokens with two random choices: several gateways side by side, each knowing only its own
requests, then still spread the load, where "the least loaded of all" would send every gateway to the same replica.
Requests that name their prompt go to the replica that has it in its cache, as long as that is not too busy.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from services.gateway import affinity
from services.gateway.replica import Replica
from shared import log

_log = log.get(__name__)


class Pool:
    """All replicas of the teacher `name`.

    Attributes:
        replicas: the members; they change while the gateway runs.
        draining: former members that still have requests in flight.
        fingerprint: identity of the model that this teacher serves, set by the first replica that is ready. It changes
            only once no replica reports it any more: replacing a teacher is possible, a mixture of two is not, and a
            wrong replica does not take over because the right one is away.
    """

    def __init__(self, name: str, replicas: list[Replica], *, rng: random.Random | None = None) -> None:
        self.name = name
        self.replicas = replicas
        self.draining: list[Replica] = []
        self.fingerprint: str | None = None
        self._rng = rng or random.Random()

    @property
    def is_ready(self) -> bool:
        return any(replica.is_serving for replica in self.replicas)

    def choose(self, exclude: Collection[Replica] = (), prefix_key: str | None = None) -> Replica | None:
        """The replica for the next request, or None when none outside `exclude` may take it.

        A replica on trial takes one request at a time, unless there is nobody else.

        Args:
            prefix_key: names the request's prompt; None for one that shares its prompt with no other.
        """
        candidates = [replica for replica in self.replicas if replica.is_open and replica not in exclude]
        if not candidates:
            candidates = [replica for replica in self.replicas if replica.is_serving and replica not in exclude]
        if not candidates:
            return None
        if prefix_key is not None and (home := affinity.home(prefix_key, candidates)):
            return home
        # sample() shuffles, so that equal loads are shared evenly
        return min(self._rng.sample(candidates, min(2, len(candidates))), key=Replica.load)

    def admit(self, replica: Replica, info: dict[str, Any]) -> bool:
        """Let a replica that passed its probe serve, unless it serves something else than this teacher.

        Args:
            info: what its /info says; `fingerprint` is a text.
        """
        fingerprint, name = info["fingerprint"], info.get("model", self.name)
        if name != self.name:
            return self._refuse(replica, info, f"it serves the teacher {name!r}, not {self.name!r}")
        others = [other for other in self.replicas if other is not replica]
        if self.fingerprint not in (None, fingerprint):
            if any(other.fingerprint == self.fingerprint for other in others):
                reason = f"its fingerprint {fingerprint} is not its siblings' {self.fingerprint}"
                return self._refuse(replica, info, reason)
            _log.warning(
                "teacher_changed",
                extra=log.fields(teacher=self.name, old_fingerprint=self.fingerprint, new_fingerprint=fingerprint),
            )
        self.fingerprint = fingerprint
        before = replica.state
        replica.probe_passed(info)
        if replica.state is not before:
            _log.info("replica_admitted", extra=self._fields(replica, state=replica.state))
        return True

    def describe(self) -> dict[str, Any]:
        """What /info shows: the teacher's own information from a serving replica, and all replicas' states."""
        known = [replica.info for replica in self.replicas if replica.is_serving and replica.info]
        return {
            "ready": self.is_ready,
            "fingerprint": self.fingerprint,
            "info": known[0] if known else None,
            "replicas": [replica.describe() for replica in (*self.replicas, *self.draining)],
        }

    def _refuse(self, replica: Replica, info: dict[str, Any], reason: str) -> bool:
        if replica.trouble != reason:
            _log.error("replica_refused", extra=self._fields(replica, reason=reason))
        replica.refuse(info, reason)
        return False

    def _fields(self, replica: Replica, **values: object) -> dict[str, Any]:
        return log.fields(teacher=self.name, replica=replica.name, **values)
