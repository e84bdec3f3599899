"""The parts of the scoring benchmark, without its servers: what it sends, counts and says."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import floor, models, replicas, report, requests, rounds, scoring, smollm2
from benchmarks.load import Measured, Plan, Target, carry_out
from benchmarks.report import Line
from benchmarks.servers import EngineSettings, Server
from shared.errors import ConfigError
from shared.wire import MSGPACK, Limits, parse_request
from tests.conftest import wait_until

_LIMITS = Limits(vocab_size=1000, max_model_len=64, max_top_k=8)


def test_both_servers_are_sent_the_same_tokens() -> None:
    (ids,) = requests.token_ids(1, 32, 1000, seed=3)
    url, body, headers = requests.body(requests.TEACHER, "http://t", ids, 8, 16, "float16", "bench")
    ours = parse_request(body, MSGPACK, _LIMITS)
    assert url == "http://t/logprobs"
    assert headers["x-teacher"] == "bench"
    assert ours.token_ids == [ids] and ours.prompt_len == [16]
    assert ours.top_k == 8 and ours.logprobs_dtype == "float16"
    url, body, _ = requests.body(requests.VLLM, "http://v", ids, 8, 16, "float16", "bench")
    theirs = json.loads(body)
    assert url == "http://v/v1/completions"
    assert theirs["prompt"] == ids and theirs["prompt_logprobs"] == 8 and theirs["max_tokens"] == 1
    _, body, _ = requests.body(requests.VLLM, "http://v", ids, None, None, "float16", "bench")
    assert "prompt_logprobs" not in json.loads(body)


def test_sequences_differ_and_are_repeatable() -> None:
    first, other = requests.token_ids(64, 8, 49_152, seed=1), requests.token_ids(64, 8, 49_152, seed=2)
    assert first == requests.token_ids(64, 8, 49_152, seed=1)
    assert len({ids[0] for ids in first}) > 60  # no prefix in common
    assert first != other


@pytest.fixture
async def stand_in() -> AsyncIterator[str]:
    """A server that answers 10 bytes at /logprobs, 20 at /v1/completions, and 503 under /full."""

    async def logprobs(request: web.Request) -> web.Response:
        assert await request.read()
        return web.Response(body=b"x" * 10)

    async def completions(request: web.Request) -> web.Response:
        assert len((await request.json())["prompt"]) == 16
        return web.Response(body=b"x" * 20)

    async def full(request: web.Request) -> web.Response:
        return web.Response(status=503, text="no room")

    app = web.Application()
    app.router.add_post("/logprobs", logprobs)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/full/logprobs", full)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_the_client_deals_requests_out_and_counts_bytes(stand_in: str) -> None:
    targets = [Target(stand_in, requests.TEACHER, 4), Target(stand_in, requests.VLLM, 4)]
    measured = await carry_out(Plan(targets, 10, num_tokens=16, vocab_size=1000, concurrency=3, seed=0))
    assert measured.answer_bytes == [[10] * 5, [20] * 5]
    assert [len(times) for times in measured.latency_ms] == [5, 5]
    assert measured.seconds > 0


async def test_the_client_refuses_to_measure_failures(stand_in: str) -> None:
    plan = Plan([Target(f"{stand_in}/full", requests.TEACHER, 4)], 2, 16, 1000, concurrency=1, seed=0)
    with pytest.raises(RuntimeError, match="503: b'no room'"):
        await carry_out(plan)


def test_medians_are_of_rounds() -> None:
    plan = Plan([], num_requests=10, num_tokens=100, vocab_size=9, concurrency=1, seed=0)
    runs = [(Measured(seconds, 0.5, [[seconds]], [[7]]), 2.0) for seconds in (1.0, 4.0, 2.0)]
    result = rounds._medians(plan, runs)
    assert result.tokens_per_s == 500
    assert result.server_cpu_us == 2000
    assert result.bytes_per_answer == 7
    assert result.median_ms == 2
    assert result.client_share == 0.25


def test_quantiles_are_values_that_occurred() -> None:
    times = [float(number) for number in range(200, 0, -1)]
    assert [replicas._quantile(times, percent) for percent in (50, 95, 99)] == [101.0, 191.0, 199.0]
    assert replicas._quantile([3.0], 99) == 3.0


async def test_a_replica_that_stands_still_goes_on_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_EVERY_S", replicas._STOP_S)  # stopped at once
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        async with replicas._standing_still(Server("sleeper", "", process.pid)):
            await wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        await wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_verdicts_and_table() -> None:
    lines = [
        Line("serve", "speed", 5.0, "x", at_least=5),
        Line("serve", "slow", 4.99, "x", at_least=5),
        Line("gateway", "added", 1.6, "ms", at_most=1.5),
        Line("gateway", "broken", float("nan"), "ms", at_most=1.5),
        Line("serve", "tokens", 12345.6, "tokens/s"),
    ]
    assert [line.verdict for line in lines] == ["PASS", "MISS", "MISS", "MISS", ""]
    assert report.missed(lines) == lines[1:4]
    rows = report.table(lines).splitlines()
    assert rows[0].split() == ["serve", "speed", "5.00", "x", "≥", "5", "PASS"]
    assert rows[4].split() == ["serve", "tokens", "12,346", "tokens/s"]


def test_report_is_json(tmp_path: Path) -> None:
    report.write(
        tmp_path / "a" / "r.json", [Line("s", "n", 1.0, "x", at_most=2)], {"threads": 2}, {"cores": 2}, ["a note"]
    )
    document = json.loads((tmp_path / "a" / "r.json").read_text())
    assert document["lines"] == [
        {"section": "s", "name": "n", "value": 1.0, "unit": "x", "at_least": None, "at_most": 2, "verdict": "PASS"}
    ]
    assert document["notes"] == ["a note"] and document["machine"] == {"cores": 2}


def test_a_model_is_a_folder_that_loads(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = models.bench_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen3", 49_152, 64)
    assert config.num_hidden_layers == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 49_152
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"
    weights = (folder / "model.safetensors").read_bytes()
    assert (models.bench_model(tmp_path / "again") / "model.safetensors").read_bytes() == weights


def test_the_floor_is_measured() -> None:
    assert floor.measure_here(num_rows=8, hidden=4, vocab_size=100, top_k=3, threads=1) > 0


def test_a_section_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scoring.main(["--only", "serve,sevre"])
    assert ended.value.code == 2
    assert "sevre: known sections are serve, gateway, replicas, router, smollm2" in capsys.readouterr().err


def test_a_model_that_was_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opd fetch smollm2-135m"):
        smollm2.run(EngineSettings(tmp_path), tmp_path, tmp_path / "none")
