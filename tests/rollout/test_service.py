"""The worker as a process: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis.asyncio
import yaml

from shared.keys import Keys
from shared.policy import Announcement, Canary, Policy
from shared.trajectory import decode
from tests.conftest import Service, free_port, wait_until
from tests.rollout.fakes import FakeTeacher, make_student
from tests.rollout.tiny_students import logprobs, make_model, push, save

NOWHERE = "redis://127.0.0.1:1/0"


def write_config(folder: Path, **sections: Any) -> Path:
    """A configuration file for `make_student`'s folder."""
    tree: dict[str, Any] = {
        "run": {"name": "service", "dir": str(folder / "run"), "steps": 2},
        "student": {"model": str(folder / "student"), "dtype": "float32", "max_model_len": 64},
        "teachers": {"words": {"model": "unused"}},
        "routes": {"spell": "words"},
        "prompts": {"sources": [{"data_source": "spell", "task": "spell_backward", "size": 20}]},
        "rollout": {"n": 2, "max_tokens": 8, "top_k": 3, "port": free_port(), "kv_cache_bytes": 32 * 2**20},
        "trainer": {"batch_size": 4},
        "gateway": {"port": free_port()},
        "redis": {"url": NOWHERE},
        "eval": {"size": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


async def refusal(service: Service) -> str:
    """The one line of a process that refuses to start, with exit status 2."""
    await wait_until(lambda: service.process.poll() is not None, 60, "the process ends")
    lines = service.output().splitlines()
    assert service.process.returncode == 2, service.output()
    assert len(lines) == 1, service.output()
    return lines[0]


async def test_missing_model_folder(tmp_path: Path, run_service: Callable[..., Service]) -> None:
    path = write_config(tmp_path)
    line = await refusal(run_service("services.rollout", "--config", path))
    assert line.startswith(f"error: student.model: there is no model folder {tmp_path / 'student'}")


async def test_port_in_use(tmp_path: Path, run_service: Callable[..., Service]) -> None:
    make_student(tmp_path / "student")
    path = write_config(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = await refusal(run_service("services.rollout", "--config", path, "--port", port))
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "--port" in line


async def test_redis_not_reachable(tmp_path: Path, run_service: Callable[..., Service]) -> None:
    make_student(tmp_path / "student")
    line = await refusal(run_service("services.rollout", "--config", write_config(tmp_path)))
    assert f"redis.url {NOWHERE} does not answer" in line


async def test_data_source_of_a_line_without_a_teacher(tmp_path: Path, run_service: Callable[..., Service]) -> None:
    make_student(tmp_path / "student")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2=", "data_source": "sums"}\n')
    prompts = {"sources": [{"data_source": "spell", "file": str(tmp_path / "prompts.jsonl")}]}
    line = await refusal(run_service("services.rollout", "--config", write_config(tmp_path, prompts=prompts)))
    assert "data_source 'sums' has no teacher: add `sums: TEACHER` under routes" in line


async def test_gateway_not_reachable(tmp_path: Path, run_service: Callable[..., Service], redis_server: str) -> None:
    make_student(tmp_path / "student")
    path = write_config(tmp_path, redis={"url": redis_server})
    line = await refusal(run_service("services.rollout", "--config", path))
    assert "teacher 'words' is not to be had at the gateway http://127.0.0.1:" in line
    assert "does not answer" in line


@pytest.fixture
async def teacher(tmp_path: Path) -> AsyncIterator[tuple[FakeTeacher, int]]:
    made = FakeTeacher("words", make_student(tmp_path / "student"))
    async with made.serve() as port:
        yield made, port


async def test_tokenizer_differs(
    tmp_path: Path, run_service: Callable[..., Service], redis_server: str, teacher: tuple[FakeTeacher, int]
) -> None:
    made, port = teacher
    made.info["tokenizer_hash"] = "0" * 32
    path = write_config(tmp_path, redis={"url": redis_server}, gateway={"port": port})
    line = await refusal(run_service("services.rollout", "--config", path))
    assert "teacher 'words' (words) has another tokenizer than student.model" in line


async def test_teacher_not_known_at_the_gateway(
    tmp_path: Path, run_service: Callable[..., Service], redis_server: str, teacher: tuple[FakeTeacher, int]
) -> None:
    made, port = teacher
    made.info["model"] = "math"
    path = write_config(tmp_path, redis={"url": redis_server}, gateway={"port": port})
    assert "this is teacher 'math', not 'words'" in await refusal(run_service("services.rollout", "--config", path))


async def test_prompt_too_long(
    tmp_path: Path, run_service: Callable[..., Service], redis_server: str, teacher: tuple[FakeTeacher, int]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x" * 64}))
    path = write_config(
        tmp_path,
        redis={"url": redis_server},
        gateway={"port": teacher[1]},
        prompts={"sources": [{"data_source": "spell", "file": str(tmp_path / "prompts.jsonl")}]},
    )
    line = await refusal(run_service("services.rollout", "--config", path))
    assert "has 64 tokens and leaves no room for a response in 64" in line


@pytest.mark.engine
async def test_a_worker_with_its_engine(
    tmp_path: Path,
    run_service: Callable[..., Service],
    redis_server: str,
    redis_client: redis.asyncio.Redis,
    teacher: tuple[FakeTeacher, int],
) -> None:
    """Real process, engine, Valkey and HTTP: waits for weights, publishes, evaluates, refuses wrong weights, ends."""
    models = [make_model("llama", tied=True, seed=seed) for seed in range(2)]
    save(models[0], tmp_path / "student")
    path = write_config(tmp_path, redis={"url": redis_server}, gateway={"port": teacher[1]})
    port = yaml.safe_load(path.read_text())["rollout"]["port"]
    url = f"http://127.0.0.1:{port}"
    policy, keys = Policy(redis_client, Keys("service")), Keys("service")
    service = run_service("services.rollout", "--config", path, "--worker-id", "w0")
    async with httpx.AsyncClient() as client:

        async def waits_for_weights() -> bool:
            try:
                answer = (await client.get(f"{url}/readyz")).json()
            except httpx.TransportError:
                return False
            return answer == {"ready": False, "reason": "waiting for the trainer's first weights"}

        await wait_until(waits_for_weights, 120, "the engine starts")
        assert await redis_client.xlen(keys.trajectories) == 0

        async def announce(version: int, model: Any) -> None:
            ids = list(range(60, 90))
            canary = Canary(token_ids=ids, logprobs=logprobs(model, ids).tolist())
            folder = str(push(models[1], tmp_path / "weights", version))
            made = Announcement(version=version, step=0, path=folder, canary=canary, evaluate=True)
            await policy.announce(made, [], needed=4)

        await announce(1, models[1])
        await wait_published(redis_client, keys, 4)
        for _, body in await redis_client.xrange(keys.trajectories):
            one = decode(body[b"payload"], trajectory_id=body[b"id"].decode())
            expected = logprobs(models[1], one.token_ids.tolist())[one.prompt_len - 1 :]
            assert abs(one.rollout_logprobs - expected).max() < 2e-3
            assert one.version_spans == ((1, one.num_rows),)

        async def evaluated() -> bool:
            return await policy.evaluation(1) is not None

        await wait_until(evaluated, 30)
        assert (await policy.evaluation(1))["data_sources"]["spell"]["accuracy"] == 0.0
        assert (await client.get(f"{url}/readyz")).json() == {"ready": True, "reason": "serving weights v1"}
        assert "opd_rollout_completions_total 4.0" in (await client.get(f"{url}/metrics")).text
    engine = psutil.Process(service.process.pid).children(recursive=True)
    assert engine
    await announce(2, models[0])  # the canary belongs to other weights than the push
    await wait_until(lambda: service.process.poll() is not None, 30, "the worker refuses the weights")
    assert service.process.returncode == 3
    last = service.output().splitlines()[-1]
    assert last.startswith("failed: worker w0: weights v2 from ")
    assert "were loaded twice and still answer the canary with logprobs that differ" in last
    await wait_until(lambda: not [process for process in engine if _alive(process)], 5, "no process is left")


async def wait_published(store: redis.asyncio.Redis, keys: Keys, count: int) -> None:
    async def there() -> bool:
        return await store.xlen(keys.trajectories) >= count

    await wait_until(there, 60, f"{count} trajectories")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("signum", "phase"),
    [(signal.SIGTERM, "starting"), (signal.SIGTERM, "running"), (signal.SIGKILL, "running")],
    ids=["term-starting", "term-running", "kill-running"],
)
async def test_a_signal_leaves_nothing(
    tmp_path: Path,
    run_service: Callable[..., Service],
    redis_server: str,
    redis_client: redis.asyncio.Redis,
    teacher: tuple[FakeTeacher, int],
    signum: int,
    phase: str,
) -> None:
    """SIGTERM ends everything within 15 s, while the engine loads or later; SIGKILL leaves no orphan either."""
    save(make_model("llama", tied=True, seed=0), tmp_path / "student")
    path = write_config(tmp_path, redis={"url": redis_server}, gateway={"port": teacher[1]})
    service = run_service("services.rollout", "--config", path)
    parent = psutil.Process(service.process.pid)
    if phase == "running":
        await wait_until(lambda: '"event": "started"' in service.output(), 120, "the worker runs")
    else:  # the resource tracker of multiprocessing is the first child, the engine core the second
        await wait_until(lambda: len(parent.children(recursive=True)) >= 2, 120, "the engine core's process")
    children = parent.children(recursive=True)
    assert len(children) >= 2
    status = await asyncio.to_thread(service.stop, signum, 15.0)
    assert status == (0 if signum == signal.SIGTERM else -signal.SIGKILL), service.output()
    # What was stopped in order leaves nothing; what was killed takes its engine along as soon as that notices.
    patience_s = 1 if signum == signal.SIGTERM else 15
    await wait_until(lambda: not [child for child in children if _alive(child)], patience_s, "all processes end")


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
