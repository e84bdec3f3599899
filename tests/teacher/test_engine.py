"""The real teacher as a real process on a tiny random Llama in float32, against a transformers forward."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from shared import wire
from shared.wire_generate import GenerateRequest, decode_generate_response, encode_generate_request
from tests.conftest import REPO, Service, free_port, wait_until
from tests.fuzzing import fuzz_openapi, good_bodies, memory_mib, mutations

pytestmark = pytest.mark.engine

CHUNK = 64  # max_num_batched_tokens: every sequence longer than this is prefilled in chunks
MAX_LEN = 400
VOCAB_SIZE = 320
ATOL = 1e-3
SETTINGS = [
    f"max_num_batched_tokens={CHUNK}", f"max_model_len={MAX_LEN}", "max_num_seqs=32", f"kv_cache_bytes={16 << 20}",
    "max_top_k=320",
]  # fmt: skip


class Teacher(Service):
    """A teacher process and its address."""

    def __init__(self, model: Path, log: Path, dtype: str = "float32", settings: list[str] = SETTINGS) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        argv = ["--name", "tiny", "--model", str(model), "--port", str(port), "--dtype", dtype]
        argv += [part for setting in settings for part in ("--set", setting)]
        super().__init__([sys.executable, "-m", "services.teacher", *argv], log)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def score(self, request: wire.LogprobsRequest) -> list[wire.SequenceScores]:
        return self.ask(request).results

    def ask(self, request: wire.LogprobsRequest) -> wire.LogprobsResponse:
        headers = {"content-type": wire.MSGPACK}
        response = httpx.post(f"{self.url}/logprobs", content=wire.encode_request(request), headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return wire.decode_response(response.content, response.headers["content-type"], 1 << 26)


async def gauge(client: httpx.AsyncClient, name: str, *, above: float, below: float = np.inf) -> bool:
    """Whether a metric lies between two bounds."""
    lines = (await client.get("/metrics")).text.splitlines()
    return above < float(next(line for line in lines if line.startswith(name + " ")).split()[1]) < below


@pytest.fixture(scope="module")
def teacher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    teacher = Teacher(model, tmp_path_factory.mktemp("log") / "teacher.log")
    asyncio.run(teacher.wait_ready(f"{teacher.url}/readyz"))
    yield teacher
    teacher.stop()


def sequence(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def picked(table: np.ndarray, token_ids: list[int], prompt_len: int) -> np.ndarray:
    """Reference logprobs of the response tokens."""
    return table[np.arange(prompt_len - 1, len(token_ids) - 1), token_ids[prompt_len:]]


@pytest.mark.parametrize(
    ("length", "prompt_len"),
    [
        (200, 1),
        (200, CHUNK),  # row 0 is the last row of a chunk
        (200, CHUNK + 1),  # P - 1 on the border of two chunks
        (200, 2 * CHUNK + 1),
        (2 * CHUNK, 10),  # the sequence ends with a chunk
        (2 * CHUNK + 1, 10),  # the last row is alone in its chunk
        (200, 199),
        (200, 200),  # no response
        (2, 1),
        (MAX_LEN - 1, 300),
        (MAX_LEN, 2),
    ],
)
def test_logprobs_equal_transformers(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray], length: int, prompt_len: int
) -> None:
    ids = sequence(length)
    [scores] = teacher.score(wire.LogprobsRequest(token_ids=[ids], prompt_len=[prompt_len]))
    assert scores.token_ids.tolist() == ids[prompt_len:]
    np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, prompt_len), atol=ATOL)


@pytest.mark.parametrize("k", [1, 7, VOCAB_SIZE])
def test_the_top_k_are_the_likeliest_in_order(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray], k: int
) -> None:
    ids, prompt_len = sequence(150, seed=1), 70
    [scores] = teacher.score(wire.LogprobsRequest(token_ids=[ids], prompt_len=[prompt_len], top_k=k))
    table = reference(ids)[prompt_len - 1 :]
    assert scores.top_ids.shape == (80, k)
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-table, axis=1)[:, :k], atol=ATOL)
    np.testing.assert_allclose(scores.top_logprobs, np.take_along_axis(table, scores.top_ids, axis=1), atol=ATOL)
    assert np.all(np.diff(scores.top_logprobs, axis=1) <= 0)
    assert all(len(set(row)) == k for row in scores.top_ids.tolist())


def test_a_batch_gets_the_answers_that_each_gets_alone(teacher: Teacher) -> None:
    batch = [sequence(length, seed=length) for length in (3, 64, 65, 100, 200, 333, 20, 21)]
    lengths = [1, 60, 1, 50, 129, 320, 5, 5]
    together = teacher.score(wire.LogprobsRequest(token_ids=batch, prompt_len=lengths, top_k=5))
    for ids, prompt_len, scores in zip(batch, lengths, together, strict=True):
        [alone] = teacher.score(wire.LogprobsRequest(token_ids=[ids], prompt_len=[prompt_len], top_k=5))
        np.testing.assert_allclose(scores.logprobs, alone.logprobs, atol=ATOL)
        np.testing.assert_allclose(scores.top_logprobs, alone.top_logprobs, atol=ATOL)
        assert scores.token_ids.tolist() == alone.token_ids.tolist() == ids[prompt_len:]


def test_ids_that_the_client_names_are_scored_at_every_row(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray]
) -> None:
    batch = [sequence(150, seed=2), sequence(90, seed=3), sequence(5, seed=4)]
    lengths = [70, 1, 5]
    rng = np.random.default_rng(5)
    tables = [rng.integers(0, VOCAB_SIZE, (len(ids) - p, 4)) for ids, p in zip(batch, lengths, strict=True)]
    tables[0][:, 1] = tables[0][:, 0]  # an id may repeat
    tables[0][3] = [0, VOCAB_SIZE - 1, batch[0][73], 0]  # the borders of the vocabulary, and the actual token
    for top_k in (0, 6):
        request = wire.LogprobsRequest(
            token_ids=batch, prompt_len=lengths, top_k=top_k, candidate_ids=[t.astype(np.int32) for t in tables]
        )
        for ids, prompt_len, table, scores in zip(batch, lengths, tables, teacher.score(request), strict=True):
            expected = reference(ids)[prompt_len - 1 :] if prompt_len < len(ids) else np.empty((0, VOCAB_SIZE))
            np.testing.assert_allclose(
                scores.candidate_logprobs, np.take_along_axis(expected, table, axis=1), atol=ATOL
            )
            np.testing.assert_allclose(scores.logprobs, picked(reference(ids), ids, prompt_len), atol=ATOL)
            assert top_k == 0 or scores.top_ids.shape == (len(ids) - prompt_len, top_k)


def test_requests_of_different_kinds_share_an_engine_step(
    teacher: Teacher, reference: Callable[[list[int]], np.ndarray]
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(kind: int) -> float:
        ids, prompt_len = sequence(100 + 7 * kind, seed=kind), 1 + 9 * kind
        table = np.full((len(ids) - prompt_len, kind % 3), kind, np.int32)
        request = wire.LogprobsRequest(
            token_ids=[ids], prompt_len=[prompt_len], top_k=kind % 4, candidate_ids=[table] if kind % 3 else None
        )
        [scores] = teacher.score(request)
        expected = reference(ids)[prompt_len - 1 :]
        errors = [np.abs(scores.logprobs - picked(reference(ids), ids, prompt_len)).max()]
        if kind % 3:
            errors.append(np.abs(scores.candidate_logprobs - expected[:, [kind] * (kind % 3)]).max())
        if kind % 4:
            errors.append(np.abs(scores.top_logprobs - -np.sort(-expected, axis=1)[:, : kind % 4]).max())
        return float(max(errors))

    with ThreadPoolExecutor(12) as pool:
        assert max(pool.map(one, range(12))) < ATOL


def test_greedy_continuations_equal_those_of_transformers(teacher: Teacher, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [sequence(length, seed=length) for length in (1, 5, 63, 64, 65, 200)]
    expected = [
        network.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    request = GenerateRequest(prompts, max_tokens=40)
    headers = {"content-type": wire.MSGPACK}
    response = httpx.post(
        f"{teacher.url}/generate", content=encode_generate_request(request), headers=headers, timeout=60
    )
    assert decode_generate_response(response.content, wire.MSGPACK, 1 << 20).results == expected
    assert len(expected[0]) < 40 and expected[0][-1] == 256  # this one writes its end, and stops there
    assert [len(ids) for ids in expected[1:]] == [40] * 5


def test_a_person_reads_tokens_and_probabilities(
    teacher: Teacher, model: Path, reference: Callable[[list[int]], np.ndarray]
) -> None:
    body = {"model": "tiny", "prompt": "2+2=", "completion": "4!", "top_k": 3}
    response = httpx.post(f"{teacher.url}/logprobs", json=body, timeout=60)
    result = response.json()["results"][0]
    usage = response.json()["usage"]
    assert usage["tokens"] == len("2+2=4!") and usage["queue_ms"] >= 0 and usage["engine_ms"] > 0
    assert result["tokens"] == ["4", "!"]
    assert [len(row) for row in result["top_tokens"]] == [3, 3]
    from tokenizers import Tokenizer

    prompt = Tokenizer.from_file(str(model / "tokenizer.json")).encode("2+2=").ids
    ids = [*prompt, *result["token_ids"]]
    np.testing.assert_allclose(result["logprobs"], picked(reference(ids), ids, len(prompt)), atol=ATOL)


def test_limits_are_those_of_the_engine(teacher: Teacher) -> None:
    info = httpx.get(f"{teacher.url}/info").json()
    assert (info["vocab_size"], info["dtype"], info["engine"]) == (VOCAB_SIZE, "float32", "vllm 0.32.0")
    assert (info["limits"]["max_model_len"], info["limits"]["max_top_k"]) == (MAX_LEN, VOCAB_SIZE)
    for fields, status in (
        ({"token_ids": [[1] * (MAX_LEN + 1)]}, 413),
        ({"token_ids": [[1, VOCAB_SIZE]]}, 422),
        ({"token_ids": [[1, 2]], "top_k": VOCAB_SIZE + 1}, 422),
    ):
        assert httpx.post(f"{teacher.url}/logprobs", json=fields).status_code == status
    assert httpx.get(f"{teacher.url}/readyz").status_code == 200


async def test_a_client_that_hangs_up_frees_its_engine_slots(teacher: Teacher) -> None:
    batch = [sequence(MAX_LEN, seed=seed) for seed in range(200)]
    content = wire.encode_request(wire.LogprobsRequest(token_ids=batch, top_k=200))
    async with httpx.AsyncClient(base_url=teacher.url) as client:
        asking = asyncio.create_task(
            client.post("/logprobs", content=content, headers={"content-type": wire.MSGPACK}, timeout=60)
        )
        await wait_until(lambda: gauge(client, "opd_teacher_engine_requests", above=100))
        asking.cancel()
        await wait_until(lambda: gauge(client, "opd_teacher_engine_requests", above=-1, below=1), timeout_s=5)
        await wait_until(lambda: gauge(client, "opd_teacher_queued_tokens", above=-1, below=1), timeout_s=5)
        assert await gauge(client, "opd_teacher_aborted_total", above=0, below=2)
    assert len(teacher.score(wire.LogprobsRequest(token_ids=[[1, 2, 3]]))[0].logprobs) == 2


async def test_a_deadline_is_kept_while_sequences_wait_in_the_engine(teacher: Teacher) -> None:
    batch = [sequence(MAX_LEN, seed=seed) for seed in range(200)]
    content = wire.encode_request(wire.LogprobsRequest(token_ids=batch, top_k=200))
    headers = {"content-type": wire.MSGPACK}
    async with httpx.AsyncClient(base_url=teacher.url, timeout=60) as client:
        working = asyncio.create_task(client.post("/logprobs", content=content, headers=headers))
        await wait_until(lambda: gauge(client, "opd_teacher_engine_requests", above=100))
        late = await client.post("/logprobs", content=content, headers=headers | {"x-timeout-s": "0.2"})
        assert (late.status_code, late.json()["type"]) == (504, "opd:deadline")
        assert "0.2 s" in late.json()["detail"]
        assert not working.done()
        assert (await working).status_code == 200
        await wait_until(lambda: gauge(client, "opd_teacher_engine_requests", above=-1, below=1), timeout_s=5)


async def test_it_sleeps_after_what_is_in_flight_and_wakes_the_same(teacher: Teacher) -> None:
    request = wire.LogprobsRequest(token_ids=[sequence(350, seed=3)], prompt_len=[300], top_k=5)
    before = teacher.score(request)[0]
    batch = wire.encode_request(wire.LogprobsRequest(token_ids=[sequence(MAX_LEN, seed=seed) for seed in range(100)]))
    headers = {"content-type": wire.MSGPACK}
    async with httpx.AsyncClient(base_url=teacher.url, timeout=60) as client:
        working = asyncio.create_task(client.post("/logprobs", content=batch, headers=headers))
        await wait_until(lambda: gauge(client, "opd_teacher_engine_requests", above=50))
        assert (await client.post("/sleep")).json() == {"state": "asleep"}
        assert (await working).status_code == 200
        assert (await client.get("/readyz")).json() == {"ready": False, "reason": "asleep"}
        refused = await client.post("/logprobs", content=batch, headers=headers)
        assert (refused.status_code, refused.json()["detail"]) == (503, "asleep")
        assert (await client.post("/sleep")).json() == {"state": "asleep"}
        assert (await client.post("/wake")).json() == {"state": "awake"}
        assert (await client.get("/readyz")).status_code == 200
        cached = []
        for _ in range(2):
            response = await client.post("/logprobs", content=wire.encode_request(request), headers=headers)
            cached.append(int(response.headers["x-cached-tokens"]))
    assert cached[0] == 0 < cached[1]  # a prefix whose keys and values were given back is not read
    after = teacher.score(request)[0]
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
    np.testing.assert_array_equal(after.top_ids, before.top_ids)


async def test_no_mutated_body_harms_the_engine(teacher: Teacher) -> None:
    """10,000 of them: no 500, nothing left in the engine, the same answers and as much memory as before."""
    reference = wire.LogprobsRequest(token_ids=[sequence(150, seed=3)], prompt_len=[100], top_k=5)
    before = teacher.score(reference)[0].logprobs
    bodies = good_bodies(VOCAB_SIZE)
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=teacher.url, timeout=60) as client:

        async def send(share: list[tuple[str, bytes]]) -> None:
            for path, body in share:
                response = await client.post(path, content=body, headers={"content-type": wire.MSGPACK})
                assert response.status_code in (200, 400, 404, 413, 422), (response.text, path, body)
                statuses[response.status_code] += 1

        for path, body in bodies:
            assert (await client.post(path, content=body, headers={"content-type": wire.MSGPACK})).status_code == 200
        changed = list(mutations(bodies, 10_000))
        for part, start in enumerate(range(0, 10_000, 2500)):
            await asyncio.gather(*(send(changed[start : start + 2500][lane::8]) for lane in range(8)))
            if part == 0:
                memory = memory_mib(teacher.process.pid)
        assert min(statuses[200], statuses[400], statuses[422]) > 200
        assert await gauge(client, "opd_teacher_engine_requests", above=-1, below=1)
        assert await gauge(client, "opd_teacher_bad_scores_total", above=-1, below=1)
        assert (await client.get("/readyz")).status_code == 200
    assert memory_mib(teacher.process.pid) - memory < 32
    np.testing.assert_allclose(teacher.score(reference)[0].logprobs, before, atol=1e-5)
    assert "Traceback" not in teacher.output()


async def test_requests_made_from_the_openapi_document(teacher: Teacher) -> None:
    answers = await asyncio.to_thread(fuzz_openapi, teacher.url, cases=200)
    assert {("/logprobs", 200), ("/generate", 200), ("/wake", 200)} <= set(answers)
    assert "Traceback" not in teacher.output()


async def test_the_death_of_the_engine_ends_the_service(teacher: Teacher) -> None:
    """Last user of the shared process."""
    children = teacher.children()
    next(child for child in children if "resource_tracker" not in " ".join(child.cmdline())).kill()
    await wait_until(lambda: teacher.process.poll() is not None, timeout_s=15, what="end of the service")
    assert teacher.process.returncode == 1
    assert "the engine has died" in teacher.output()
    await wait_until(lambda: not any(child.is_running() for child in children))


async def test_sigterm_while_the_engine_starts_and_when_it_is_ready(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    starting = Teacher(model, tmp_path / "starting.log")
    request.addfinalizer(lambda: starting.stop(signal.SIGKILL))
    await starting.wait_ready(f"{starting.url}/healthz")
    async with httpx.AsyncClient(base_url=starting.url) as client:
        assert (await client.get("/readyz")).json() == {"ready": False, "reason": "the engine is starting"}
    await wait_until(lambda: len(starting.children()) > 0, what="the engine's process")
    children = starting.children()
    assert starting.stop(timeout_s=15) == 0
    await wait_until(lambda: not any(child.is_running() for child in children))

    ready = Teacher(model, tmp_path / "ready.log")
    request.addfinalizer(lambda: ready.stop(signal.SIGKILL))
    await ready.wait_ready(f"{ready.url}/readyz")
    children = ready.children()
    assert children
    assert ready.stop(timeout_s=15) == 0
    await wait_until(lambda: not any(child.is_running() for child in children))
    assert "Traceback" not in ready.output()


def test_a_refusal_to_start_is_one_line_and_status_2(model: Path, tmp_path: Path) -> None:
    def start(*argv: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.teacher", "--name", "tiny", *map(str, argv)]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)

    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (("--model", model, "--port", port), f"cannot listen on 127.0.0.1:{port}"),
            (("--model", tmp_path / "none", "--port", free_port()), "there is no model folder"),
            (("--model", model, "--port", free_port(), "--set", "kv_cache_bytes=1000"), "kv_cache_bytes=1000 cannot"),
        ]
        for argv, words in cases:
            done = start(*argv)
            assert done.returncode == 2, done.stderr
            assert done.stderr.count("\n") == 1
            assert done.stderr.startswith("error: ")
            assert words in done.stderr
