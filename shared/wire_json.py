"""The JSON form of a response, laid out for a person at a terminal: one line a field, one line a row of a table.

JSON has no NaN or infinity: such a value is written as null and counted in `usage.non_finite`. Numbers are written with
the fewest digits that read back as the same float32.
"""

from __future__ import annotations

import json

import numpy as np

from shared.wire_types import LogprobsResponse, SequenceScores


def dump_response(response: LogprobsResponse) -> str:
    """The JSON text of a response."""
    results = ",\n".join(_dump_scores(scores) for scores in response.results)
    usage = {**response.usage, "non_finite": sum(_count_non_finite(scores) for scores in response.results)}
    return (
        "{\n"
        f'  "model": {json.dumps(response.model)},\n'
        f'  "fingerprint": {json.dumps(response.fingerprint)},\n'
        f'  "results": [{chr(10) + results + chr(10) + "  " if results else ""}],\n'
        f'  "usage": {json.dumps(usage)}\n'
        "}\n"
    )


def _dump_scores(scores: SequenceScores) -> str:
    fields = [("token_ids", scores.token_ids), ("tokens", scores.tokens), ("logprobs", scores.logprobs)]
    fields += [("top_ids", scores.top_ids), ("top_tokens", scores.top_tokens), ("top_logprobs", scores.top_logprobs)]
    fields += [("candidate_logprobs", scores.candidate_logprobs)]
    lines = [f'      "{name}": {_dump_value(value)}' for name, value in fields if value is not None]
    return "    {\n" + ",\n".join(lines) + "\n    }"


def _dump_value(value: np.ndarray | list[str] | list[list[str]]) -> str:
    if isinstance(value, np.ndarray):
        rows = _numbers(value) if value.ndim == 1 else [f"[{', '.join(_numbers(row))}]" for row in value]
        nested = value.ndim > 1
    else:
        rows = [json.dumps(item, ensure_ascii=False) for item in value]
        nested = bool(value) and isinstance(value[0], list)
    if nested and rows:
        return "[\n        " + ",\n        ".join(rows) + "\n      ]"
    return f"[{', '.join(rows)}]"


def _numbers(row: np.ndarray) -> list[str]:
    if row.dtype.kind != "f":
        return [str(number) for number in row.tolist()]
    texts = row.astype(np.float32).astype("U").tolist()
    return [text if finite else "null" for text, finite in zip(texts, np.isfinite(row).tolist(), strict=True)]


def _count_non_finite(scores: SequenceScores) -> int:
    values = (scores.logprobs, scores.top_logprobs, scores.candidate_logprobs)
    return sum(int(value.size - np.isfinite(value).sum()) for value in values if value is not None)
