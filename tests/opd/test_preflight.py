"""What would stop a run later is said before anything starts, by the real command."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import yaml

from opd import preflight
from shared.config import load_run
from shared.errors import ConfigError
from tests.conftest import REPO
from tests.integration.conftest import demo_config


def up(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "opd", "up", "--config", str(config), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=REPO, timeout=60)


def refusal(config: Path, *arguments: str) -> str:
    """The one line that `opd up` refuses with; nothing may be started, so nothing may be left."""
    run = up(config, *arguments)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout == ""
    assert not (config.parent / "run.lock").exists()
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_refused_start_leaves_no_file_and_no_folder(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    here = sorted(tmp_path.rglob("*"))
    refusal(config, "--set", f"run.dir={tmp_path / 'new' / 'runs' / 'one'}", "--set", "student.model=models/nothing")
    assert sorted(tmp_path.rglob("*")) == here


def test_a_missing_model_folder(tmp_path: Path) -> None:
    line = refusal(demo_config(tmp_path), "--set", "teachers.math.model=models/nothing")
    assert "teachers.math.model: there is no model folder models/nothing" in line


def test_a_teacher_with_another_tokenizer(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(REPO / "assets" / "demo" / "teacher-math", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    vocab = tokenizer["model"]["vocab"]
    vocab[words[5]], vocab[words[6]] = vocab[words[6]], vocab[words[5]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refusal(demo_config(tmp_path), "--set", f"teachers.math.model={other}")
    assert "teachers.math.model: the tokenizer of" in line and "differs from the student's" in line


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(demo_config(tmp_path), "--set", f"gateway.port={port}")
    assert f"cannot listen on 127.0.0.1:{port}" in line and "change gateway.port" in line


def test_a_port_given_twice(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    port = yaml.safe_load(config.read_text())["trainer"]["port"]
    line = refusal(config, "--set", f"rollout.port={port}")
    assert f"port {port} is given to both rollout.port and trainer.port" in line


def test_a_data_source_without_a_teacher(tmp_path: Path) -> None:
    line = refusal(demo_config(tmp_path), "--set", "prompts.sources.0.data_source=history")
    assert "data_source 'history' has no teacher: add `history: TEACHER` under routes" in line


def test_a_data_source_that_only_a_line_names(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1="}\n{"prompt": "2+2=", "data_source": "history"}\n')
    sources = f"prompts.sources=[{{data_source: add, file: {file}}}]"
    assert "data_source 'history' has no teacher" in refusal(demo_config(tmp_path), "--set", sources)


def test_a_malformed_prompt_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1="}\n{"prompt": \n')
    line = refusal(demo_config(tmp_path), "--set", f"prompts.sources=[{{data_source: add, file: {file}}}]")
    assert f"{file}, line 2: not JSON" in line


def test_an_unknown_key(tmp_path: Path) -> None:
    assert "did you mean 'batch_size'?" in refusal(demo_config(tmp_path), "--set", "trainer.batchsize=3")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = load_run(demo_config(tmp_path), [f"run.dir={tmp_path / 'file' / 'run'}"])
    with pytest.raises(ConfigError, match=r"cannot be made: .*file is a file"):
        preflight.check_disk(run)


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(demo_config(tmp_path))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, preflight.needed_bytes(run) - 1))
    with pytest.raises(ConfigError, match=r"MiB free, checkpoints and weight pushes need .* make room"):
        preflight.check_disk(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, preflight.needed_bytes(run)))
    preflight.check_disk(run)
