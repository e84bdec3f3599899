"""Stand-ins around the worker: a student without an engine, a teacher without a model, a folder without weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from safetensors.numpy import save_file

from services.rollout.config import RolloutConfig
from services.rollout.sampler import Completion
from shared.config import RunConfig, parse
from shared.errors import Problem, WeightsError
from shared.parts import select
from shared.policy import Announcement, Canary
from shared.tokenizer import tokenizer_hash
from shared.weights import TensorBytes, write_push
from shared.wire import MSGPACK, Limits, LogprobsResponse, SequenceScores, encode_response, parse_request
from shared.wire_generate import GenerateResponse, encode_generate_response, parse_generate_request
from tests.conftest import free_port, wait_until
from tests.teacher.tiny_model import make_tokenizer

EOS = 256
LIMITS = Limits(vocab_size=320, max_model_len=64, max_top_k=16)
CANARY = Canary(token_ids=[5, 6, 7], logprobs=[-1.0, -2.0])


def make_student(folder: Path) -> Path:
    """A model folder with a real tokenizer and one tensor."""
    folder.mkdir()
    make_tokenizer(folder, 320)
    save_file({"w": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS, "vocab_size": 320}))
    return folder


def make_push(root: Path, version: int, *, shape: tuple[int, ...] = (2, 3)) -> Path:
    """A push that fits `make_student`, each value being the version."""
    data = np.full(shape, version, np.float32).tobytes()
    return write_push(root, version, [TensorBytes("w", "float32", shape, data)], keep=3)[0]


def announcement(root: Path, version: int, *, evaluate: bool = False, **push: Any) -> Announcement:
    """An announcement with its push on disk."""
    path = str(make_push(root, version, **push))
    return Announcement(version=version, step=version - 1, path=path, canary=CANARY, evaluate=evaluate)


def make_config(folder: Path, **sections: Any) -> RolloutConfig:
    """A configuration for spelling words backward: no shuffling, 2 completions a prompt, 2 prompts a step."""
    tree: dict[str, Any] = {
        "run": {"name": "test", "dir": str(folder / "run"), "steps": 3},
        "student": {"model": str(folder / "student"), "dtype": "float32", "max_model_len": 64},
        "teachers": {"words": {"model": "unused"}},
        "routes": {"spell": "words"},
        "prompts": {"sources": [{"data_source": "spell", "task": "spell_backward", "size": 20}]},
        "rollout": {"n": 2, "max_tokens": 8, "top_k": 3, "concurrency": 4, "lease_s": 30, "max_attempts": 2},
        "trainer": {"batch_size": 4},
        "eval": {"size": 5},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return select(RolloutConfig, parse(RunConfig, tree, origin="test"))


class FakeSampler:
    """Answers every prompt with the reversed word (greedy) or with "no" (sampled), each token at logprob -0.5.

    It finds the ids 5, 6, … most likely at every row.

    Attributes:
        loads: versions in the order loaded.
        bad_canaries: how many of the next canary answers are wrong.
        hold: while it is cleared, sampling waits.
    """

    def __init__(self) -> None:
        self.alive = True
        self.version = 0
        self.loads: list[int] = []
        self.bad_canaries = 0
        self.fail_load = False
        self.samples = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def start(self) -> None: ...

    async def sample(
        self,
        token_ids: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        top_k: int = 0,
    ) -> list[Completion]:
        assert self.version > 0, "sampled before any version was loaded"
        self.samples += n
        version = self.version
        await self.hold.wait()
        ids = self.answer(token_ids, greedy=temperature == 0)[:max_tokens]
        spans = [(version, len(ids))]
        if self.version != version:  # a load came between
            spans = [(version, 1), (self.version, len(ids) - 1)]
        logprobs = np.full(len(ids), -0.5, np.float32)
        top_ids = np.tile(np.arange(5, 5 + top_k, dtype=np.int32), (len(ids), 1))
        return [Completion(ids, logprobs, spans, "stop", top_ids) for _ in range(n)]

    @staticmethod
    def answer(token_ids: list[int], *, greedy: bool) -> list[int]:
        return [*(token_ids[-3::-1] if greedy else [78, 79]), EOS]  # the last two tokens of a prompt are "->"

    async def score(self, token_ids: list[int]) -> np.ndarray:
        served = np.asarray(CANARY.logprobs, np.float32)
        if self.bad_canaries:
            self.bad_canaries -= 1
            return served + 0.3
        return served

    async def load_weights(self, path: Path, version: int) -> None:
        if self.fail_load:
            raise WeightsError("the engine cannot load them")
        self.version = version
        self.loads.append(version)

    async def close(self) -> None:
        self.alive = False


class FakeTeacher:
    """HTTP teacher: logprob of id i is -i / 100; its top ids at each row are the id itself and the ones after it.

    Attributes:
        greedy: how it continues a prompt, by default with the reversed word and the end.
        generated: continuations asked for.
        problem: when set, the answer to every request.
    """

    def __init__(self, name: str, student: Path) -> None:
        self.name = name
        self.problem: Problem | None = None
        self.requests = 0
        self.generated = 0
        self.greedy: Callable[[list[int]], list[int]] = lambda prompt: FakeSampler.answer(prompt, greedy=True)
        self.info: dict[str, Any] = {
            "model": name,
            "tokenizer_hash": tokenizer_hash(student),
            "limits": {
                "vocab_size": 320, "max_model_len": 64, "max_top_k": 16, "max_candidates": 8
            },
        }  # fmt: skip

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Serve on a free port."""
        app = FastAPI()
        app.post("/logprobs")(self._logprobs)
        app.post("/generate")(self._generate)
        app.get("/info")(self._info)
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve())
        try:
            await wait_until(lambda: server.started)
            yield port
        finally:
            server.should_exit = True
            await task

    async def _info(self) -> Response:
        if self.problem is not None:
            return Response(json.dumps(self.problem.to_dict()), self.problem.status)
        return Response(json.dumps(self.info), media_type="application/json")

    async def _logprobs(self, request: Request) -> Response:
        self.requests += 1
        if self.problem is not None:
            return Response(json.dumps(self.problem.to_dict()), self.problem.status)
        asked = parse_request(await request.body(), MSGPACK, LIMITS)
        assert asked.token_ids is not None and asked.prompt_len is not None
        results = []
        tables = asked.candidate_ids or [None] * len(asked.token_ids)
        for ids, prompt_len, table in zip(asked.token_ids, asked.prompt_len, tables, strict=True):
            scored = np.asarray(ids[prompt_len:], np.int32)
            top_ids = (scored[:, None] + np.arange(asked.top_k, dtype=np.int32)) % 320 if asked.top_k else None
            logprobs = None if top_ids is None else (-top_ids / 100).astype(np.float32)
            chosen = None if table is None else (-table / 100).astype(np.float32)
            results.append(SequenceScores(scored, (-scored / 100).astype(np.float32), top_ids, logprobs, chosen))
        body, content_type = encode_response(LogprobsResponse(self.name, "print", results, {"tokens": 1}), MSGPACK)
        return Response(body, media_type=content_type)

    async def _generate(self, request: Request) -> Response:
        if self.problem is not None:
            return Response(json.dumps(self.problem.to_dict()), self.problem.status)
        asked = parse_generate_request(await request.body(), MSGPACK, LIMITS)
        self.generated += len(asked.token_ids)
        results = [self.greedy(ids)[: asked.max_tokens] for ids in asked.token_ids]
        body, content_type = encode_generate_response(GenerateResponse(self.name, "print", results), MSGPACK)
        return Response(body, media_type=content_type)
