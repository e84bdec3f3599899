"""Fuzzing of the HTTP services: requests made from their OpenAPI documents, and good bodies with bytes changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Iterator

import msgpack
import numpy as np
import psutil
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error, positive_data_acceptance

from shared import wire
from shared.wire_generate import GenerateRequest, encode_generate_request

# A schema cannot say that a sequence fits the model; and 503 and 504 are good answers, seen to below.
_NOT_ASKED = [positive_data_acceptance, not_a_server_error]


def fuzz_openapi(
    url: str, *, cases: int, leave_out: Collection[str] = (), headers: dict[str, str] | None = None
) -> Counter[tuple[str, int]]:
    """Send about `cases` requests, half of them against the schema, the same ones every time; answers by path.

    Args:
        leave_out: paths.
        headers: sent with those that follow the schema, instead of made up.

    Fails on 500, and on a status, content type or body that the document does not name, and on a request against the
    schema that is answered with success.
    """
    operations = [result.ok() for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
    operations = [operation for operation in operations if operation.path not in leave_out]
    fuzzed = [operation for operation in operations if operation.body]
    answers: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        for operation in operations:
            modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
            for mode in modes:
                fixed = headers if mode is GenerationMode.POSITIVE and operation.body else None
                count = cases // len(fuzzed) // len(modes) if operation.body else 10

                @settings(
                    max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                @given(case=operation.as_strategy(generation_mode=mode, headers=fixed))
                def send(case: Case) -> None:
                    response = case.call(session=session, timeout=30)
                    answers[case.path, response.status_code] += 1
                    case.validate_response(response, excluded_checks=_NOT_ASKED)
                    assert response.status_code != 500, case.as_curl_command()

                send()
    return answers


def good_bodies(vocab_size: int) -> list[tuple[str, bytes]]:
    """Path and msgpack body of requests of every kind that a teacher with candidates answers."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, vocab_size, length).tolist() for length in (6, 9)]
    tables = [rng.integers(0, vocab_size, (len(sequence) - 2, 3)).astype(np.int32) for sequence in ids]
    text = {"prompt": "2+2=", "completion": "4", "top_k": 2}
    chat = {"messages": [{"role": "user", "content": "2+2?"}], "completion": "4"}
    plain = {"token_ids": ids, "prompt_len": [2, 3], "top_k": 4, "logprobs_dtype": "float16"}
    scores = [
        wire.encode_request(wire.LogprobsRequest(token_ids=ids, prompt_len=[2, 3], top_k=4)),
        wire.encode_request(wire.LogprobsRequest(token_ids=ids, prompt_len=[2, 2], candidate_ids=tables)),
        *(msgpack.packb(fields) for fields in (plain, text, chat)),
    ]
    continuations = [
        encode_generate_request(GenerateRequest(ids, 3)),
        msgpack.packb({"token_ids": ids, "max_tokens": 2}),
    ]
    return [("/logprobs", body) for body in scores] + [("/generate", body) for body in continuations]


def mutations(bodies: list[tuple[str, bytes]], count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Good bodies with a byte changed, a few inserted or cut, their end lost, or a piece of another body in them."""
    rng = random.Random(seed)
    for _ in range(count):
        path, good = rng.choice(bodies)
        body = bytearray(good)
        if rng.random() < 0.5:  # mostly ids and numbers: still a message, with other values
            body[rng.randrange(len(body))] = rng.choice((0, 1, rng.randrange(256)))
            yield path, bytes(body)
            continue
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(body) or 1)
            body[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        if rng.random() < 0.1:
            del body[rng.randrange(len(body) or 1) :]
        if rng.random() < 0.1:
            other = rng.choice(bodies)[1]
            start = rng.randrange(len(other))
            place = rng.randrange(len(body) or 1)
            body[place:place] = other[start : start + rng.randint(1, 40)]
        yield path, bytes(body)


def memory_mib(pid: int) -> float:
    """Resident memory of a process and its children."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)]) / 2**20


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def nested_json(depth: int, size: int) -> bytes:
    """`depth` lists in each other, filled up with blanks to `size` bytes."""
    body = json.dumps({"model": "math"})[:-1].encode() + b', "token_ids": ' + b"[" * depth + b"]" * depth + b"}"
    return body + b" " * (size - len(body))
