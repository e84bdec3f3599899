"""One request over several replicas: its sequences are shared out where that is clearly faster.

    body ──▶ worth it? ──▶ groups of one prompt ──▶ a part for each replica ──▶ Proxy.forward, side by side ──▶ merge

The estimate counts tokens: unsplit, the request is done when the least loaded replica has read what it has and all of
this; split, when the last of its parts has been read. Sequences with one prompt stay together, since the second part
would have to read the prompt again; a group is cut only where it is larger than a replica's fair share.
Whatever goes wrong with a part other than a replica's failure (a refusal, answers of different models), the whole
request goes to one replica instead: its answer is the one that the client would have had without all this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from services.gateway import parts
from services.gateway.metrics import GatewayMetrics
from services.gateway.parts import MergeError, Sequences
from services.gateway.pool import Pool
from services.gateway.proxy import Inbound, Proxy
from services.gateway.replica import Replica
from services.gateway.upstream import MAX_ANSWER_BYTES, Answer
from shared import aio

MIN_PART_TOKENS = 2048
"""A part smaller than this gains nothing: an engine reads as much in one step."""

WORTH = 0.75
"""A split is done when it is estimated to take at most this part of the time."""

_THREAD_BYTES = 2**20  # answers over this are merged beside the event loop


class Splitter:
    """Sends a request to one replica, or its parts to several."""

    def __init__(self, proxy: Proxy, metrics: GatewayMetrics) -> None:
        self._proxy = proxy
        self._metrics = metrics

    async def forward(self, pool: Pool, inbound: Inbound) -> tuple[Answer, list[Replica]]:
        """An answer for the whole request, and who gave it. Raises as `Proxy.forward`."""
        plan = self._plan(pool, inbound)
        if plan is not None:
            sequences, shares = plan
            answered = await self._forward_parts(pool, inbound, sequences, shares)
            self._metrics.splits.labels(pool.name, "merged" if answered else "sent_whole").inc()
            if answered is not None:
                return answered
        answer, replica = await self._proxy.forward(pool, inbound)
        return answer, [replica]

    def _plan(self, pool: Pool, inbound: Inbound) -> tuple[Sequences, dict[Replica, list[int]]] | None:
        if inbound.path != "/logprobs" or inbound.num_tokens < 2 * MIN_PART_TOKENS:
            return None
        replicas = sorted((replica for replica in pool.replicas if replica.is_open), key=Replica.load)
        loads = {replica: replica.load() for replica in replicas}
        if len(replicas) < 2 or loads[replicas[1]] + MIN_PART_TOKENS > WORTH * (
            loads[replicas[0]] + inbound.num_tokens
        ):
            return None  # no other replica is idle enough for even the smallest part
        media_type = inbound.headers.get("content-type", "").split(";", 1)[0].strip().lower()
        sequences = parts.read(inbound.body, is_json=media_type == "application/json")
        shares = share_out(sequences, loads) if sequences is not None else None
        return (sequences, shares) if sequences is not None and shares is not None else None

    async def _forward_parts(
        self, pool: Pool, inbound: Inbound, sequences: Sequences, shares: dict[Replica, list[int]]
    ) -> tuple[Answer, list[Replica]] | None:
        indices = list(shares.values())
        try:
            pieces = [
                replace(
                    inbound,
                    body=sequences.cut(share),
                    num_tokens=_size(sequences, share),
                    prefix_key=None,
                    first=replica,
                )
                for replica, share in shares.items()
            ]
        except (ValueError, RecursionError):
            return None  # nested too deep to be written again
        running = [asyncio.ensure_future(self._forward_part(pool, piece)) for piece in pieces]
        try:
            outcomes = await asyncio.gather(*running)
        except _Refused:
            return None
        finally:
            await aio.end(running)
        answers = [answer for answer, _ in outcomes]
        media_types = {answer.headers.get("content-type", "") for answer in answers}
        size = sum(len(answer.body) for answer in answers)
        if len(media_types) > 1 or size > MAX_ANSWER_BYTES:
            return None
        bodies, is_json = [answer.body for answer in answers], media_types == {"application/json"}
        try:
            if size > _THREAD_BYTES:
                body = await asyncio.to_thread(parts.merge, bodies, indices, is_json=is_json)
            else:
                body = parts.merge(bodies, indices, is_json=is_json)
        except MergeError:
            return None
        headers = {"content-type": answers[0].headers.get("content-type", "")}
        return Answer(200, headers, body), [replica for _, replica in outcomes]

    async def _forward_part(self, pool: Pool, piece: Inbound) -> tuple[Answer, Replica]:
        answer, replica = await self._proxy.forward(pool, piece)
        if answer.status != 200:
            raise _Refused  # its detail counts sequences within the part: the client must get one for the whole
        return answer, replica


class _Refused(Exception):
    """A part was answered with an error that is the client's business."""


def share_out(sequences: Sequences, loads: dict[Replica, float]) -> dict[Replica, list[int]] | None:
    """Indices of sequences by replica, in ascending order; None when one replica alone is about as fast.

    Args:
        loads: outstanding tokens of the replicas that may take a part, least loaded first.
    """
    whole = min(loads.values()) + sum(sequences.lengths)
    best: tuple[float, dict[Replica, list[int]]] | None = None
    for number in range(2, len(loads) + 1):
        replicas = list(loads)[:number]
        groups = _groups(sequences, number)
        if len(groups) < number:
            break
        shares: dict[Replica, list[int]] = {replica: [] for replica in replicas}
        levels = {replica: loads[replica] for replica in replicas}
        for group in sorted(groups, key=lambda group: -_size(sequences, group)):
            least = min(replicas, key=levels.__getitem__)
            shares[least] += group
            levels[least] += _size(sequences, group)
        finish = max(levels[replica] for replica in replicas if shares[replica])
        fits = all(_size(sequences, share) >= MIN_PART_TOKENS for share in shares.values())
        if fits and (best is None or finish < best[0]):
            best = finish, {replica: sorted(share) for replica, share in shares.items()}
    return best[1] if best is not None and best[0] <= WORTH * whole else None


def _groups(sequences: Sequences, number: int) -> list[list[int]]:
    """Sequences with one prompt, cut where a group is larger than one of `number` fair shares."""
    by_prompt: dict[object, list[int]] = {}
    for index, prompt in enumerate(sequences.prompts):
        by_prompt.setdefault(index if prompt is None else prompt, []).append(index)
    fair = sum(sequences.lengths) / number
    groups: list[list[int]] = []
    for members in by_prompt.values():
        groups.append([])
        size = 0
        for index in members:
            if groups[-1] and size + sequences.lengths[index] > fair:
                groups.append([])
                size = 0
            groups[-1].append(index)
            size += sequences.lengths[index]
    return groups


def _size(sequences: Sequences, indices: Sequence[int]) -> int:
    return sum(sequences.lengths[index] for index in indices)
