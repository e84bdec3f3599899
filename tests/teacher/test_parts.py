"""Fingerprint, configuration and client disconnects, each by itself."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

from services.teacher.app import create_app
from services.teacher.config import load
from services.teacher.fingerprint import fingerprint
from services.teacher.scorer import ScoringError, check_scores
from services.teacher.service import TeacherService
from shared.errors import ConfigError
from shared.tokenizer import tokenizer_hash
from shared.wire import SequenceScores
from tests.conftest import free_port, wait_until
from tests.teacher.fake_scorer import FakeScorer


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.array([6, 8], np.int32)},
        {"logprobs": np.array([-1, np.nan], np.float32)},
        {"logprobs": np.array([-1, np.inf], np.float32)},
        {"top_logprobs": np.array([[-1], [np.nan]], np.float32)},
    ],
)
def test_scores_that_must_not_be_served(change: dict) -> None:
    good = {"token_ids": np.array([6, 7], np.int32), "logprobs": np.array([-1, -np.inf], np.float32)}
    check_scores([5, 6, 7], 1, SequenceScores(**good))
    with pytest.raises(ScoringError):
        check_scores([5, 6, 7], 1, SequenceScores(**{**good, **change}))


def test_the_fingerprint_follows_weights_tokenizer_and_dtype(fake_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(fake_model, tmp_path / "copy"))
    first = fingerprint(fake_model, "t", "float32")
    assert first == fingerprint(copy, "t", "float32")
    assert len({first, fingerprint(copy, "u", "float32"), fingerprint(copy, "t", "bfloat16")}) == 3
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[700] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert fingerprint(copy, "t", "float32") != first
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="damaged"):
        fingerprint(copy, "t", "float32")


def test_the_tokenizer_hash_is_of_ids_and_merges_alone(fake_model: Path, tmp_path: Path) -> None:
    tree = json.loads((fake_model / "tokenizer.json").read_text())
    tree["model"]["merges"] = [["a", "b"], ["c", "d"]]

    def hash_of(value: dict) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(value, indent=3))
        return tokenizer_hash(tmp_path)

    base = hash_of(tree)
    vocab = tree["model"]["vocab"]
    same = {**tree, "normalizer": None, "added_tokens": []}
    same["model"] = {**tree["model"], "vocab": dict(reversed(vocab.items())), "merges": ["a b", "c d"]}
    assert hash_of(same) == base
    swapped = {**vocab, "a": vocab["b"], "b": vocab["a"]}
    others = [
        {**tree, "model": {**tree["model"], "vocab": swapped}},
        {**tree, "model": {**tree["model"], "merges": [["c", "d"], ["a", "b"]]}},
        {**tree, "added_tokens": [{"id": 320, "content": "<new>"}]},
    ]
    assert len({base, *map(hash_of, others)}) == 4
    with pytest.raises(ConfigError, match=r"model\.vocab"):
        hash_of({"model": {}})
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        tokenizer_hash(tmp_path)


def test_configuration_from_options(fake_model: Path) -> None:
    config = load(
        ["--name", "math", "--model", str(fake_model), "--port", "9000", "--dtype", "float32", "--set", "max_top_k=5"]
    )
    assert (config.name, config.port, config.teacher.dtype, config.teacher.max_top_k) == ("math", 9000, "float32", 5)


def test_configuration_from_a_run(fake_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"""
run: {{name: r, dir: {tmp_path}, steps: 1}}
student: {{model: {fake_model}, max_model_len: 128}}
teachers: {{math: {{model: {fake_model}, ports: [8101, 8102]}}}}
routes: {{sums: math}}
prompts: {{sources: [{{data_source: sums, task: basic_arithmetic}}]}}
"""
    )
    base = ["--config", str(run), "--name", "math"]
    assert load([*base, "--replica", "1"]).port == 8102
    assert load([*base, "--set", "teachers.math.threads=2"]).teacher.threads == 2
    assert load([*base, "--host", "0.0.0.0", "--port", "7"]).teacher.host == "0.0.0.0"
    for argv, words in (
        ([*base, "--replica", "2"], "has 2 ports"),
        (["--config", str(run), "--name", "maths"], "known teachers: math"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--model PATH is missing"),
        (["--model", "/nowhere", "--port", "9000"], "--model: there is no model folder /nowhere"),
        (["--model", "MODEL", "--set", "max_topk=3"], "did you mean 'max_top_k'"),
        (["--model", "MODEL", "--set", "max_top_k"], "key=value"),
        (["--model", "MODEL", "--set", "max_top_k=[1"], "not YAML"),
        (["--model", "MODEL", "--set", "teachers.math.max_top_k=3"], "the teacher's key alone"),
        (["--model", "MODEL", "--dtype", "int8"], "dtype"),
        (["--model", "MODEL", "--port", "99999"], "port"),
    ],
)
def test_bad_configuration_names_the_setting(fake_model: Path, argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(["--name", "math", *(str(fake_model) if item == "MODEL" else item for item in argv)])


async def test_a_client_that_goes_away_frees_the_engine(
    service: TeacherService, scorer: FakeScorer, client: httpx.AsyncClient
) -> None:
    port = free_port()
    app = create_app(service, key=None)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    scorer.gate.clear()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=0.2) as real:
        with pytest.raises(httpx.ReadTimeout):
            await real.post("/logprobs", json={"token_ids": [[1, 2, 3]]})
        await wait_until(lambda: scorer.cancelled == 1)
    await wait_until(lambda: service.admission.tokens == 0)
    assert "opd_teacher_aborted_total 1.0" in (await client.get("/metrics")).text
    server.should_exit = True
    await serving
