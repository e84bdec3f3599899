"""The folder of a run: one user, nothing of somebody else's deleted, one file of configuration per service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from opd import run_folder
from shared.config import RunConfig, load_run
from shared.errors import ConfigError
from shared.parts import GatewayPart, RolloutPart, TeacherPart, TrainerPart, load_part
from tests.conftest import REPO
from tests.integration.conftest import demo_config

SECRET = "redis://user:s3cret@far.example:6379/2"


def demo(folder: Path, *overrides: str) -> RunConfig:
    return load_run(demo_config(folder), overrides)


def test_every_service_gets_its_part_in_a_private_file(tmp_path: Path) -> None:
    run = demo(tmp_path, f"redis.url={SECRET}")
    run_folder.prepare(run, fresh=False)
    files = run_folder.write_parts(run, SECRET)
    assert sorted(files) == ["gateway", "rollout", "teacher-math", "teacher-spell", "trainer"]
    for name, path in files.items():
        assert path.stat().st_mode & 0o777 == 0o600
        assert ("s3cret" in path.read_text()) == (name in ("rollout", "trainer")), name
        assert ("redis" in yaml.safe_load(path.read_text())) == (name in ("rollout", "trainer")), name
    assert set(yaml.safe_load(files["teacher-math"].read_text())["teachers"]) == {"math"}
    assert load_part(TeacherPart, files["teacher-math"]).teachers == {"math": run.teachers["math"]}
    assert load_part(GatewayPart, files["gateway"]).teachers["spell"].ports == run.teachers["spell"].ports
    assert load_part(RolloutPart, files["rollout"]).redis.url == SECRET
    assert load_part(TrainerPart, files["trainer"]).trainer == run.trainer


def test_the_record_of_the_run_holds_no_password(tmp_path: Path) -> None:
    run = demo(tmp_path, f"redis.url={SECRET}?password=s3cret")
    run_folder.prepare(run, fresh=False)
    record = tmp_path / "run" / "config.yaml"
    assert "s3cret" not in record.read_text()
    read = load_run(record)
    assert read.redis.url == "redis://user:***@far.example:6379/2"
    assert read.model_copy(update={"redis": run.redis}) == run


def test_fresh_deletes_only_what_a_run_made(tmp_path: Path) -> None:
    run = demo(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "metrics.jsonl.tmp", "evaluations.json.tmp", "config.yaml.tmp", "ledger.jsonl"):
        (folder / name).touch()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"it holds thesis\.txt, which no run of opd made"):
        run_folder.prepare(run, fresh=True)
    assert (folder / "metrics.jsonl").exists()
    (folder / "thesis.txt").unlink()
    run_folder.prepare(run, fresh=True)
    assert [item.name for item in folder.iterdir()] == ["config.yaml"]


def test_a_run_is_resumed_with_the_configuration_that_it_was_begun_with(tmp_path: Path) -> None:
    run_folder.prepare(demo(tmp_path), fresh=False)
    run_folder.prepare(demo(tmp_path, "rollout.n=8"), fresh=False)  # nothing was trained yet
    (tmp_path / "run" / "ledger.jsonl").touch()
    run_folder.prepare(demo(tmp_path, "rollout.n=8", "run.steps=100"), fresh=False)
    with pytest.raises(ConfigError, match=r"rollout\.n was 8 and is 2; .*run\.seed was 1 and is 2"):
        run_folder.prepare(demo(tmp_path, "rollout.n=2", "run.seed=2"), fresh=False)
    (tmp_path / "run" / "config.yaml").write_text("run: {old: 1}")
    with pytest.raises(ConfigError, match=r"its configuration is not readable any more .*--fresh"):
        run_folder.prepare(demo(tmp_path), fresh=False)
    run_folder.prepare(demo(tmp_path, "rollout.n=2"), fresh=True)


def test_one_at_a_time_and_no_lock_left(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with run_folder.only_one(folder):
        code = (
            "import pathlib, sys; from opd.run_folder import only_one; only_one(pathlib.Path(sys.argv[1])).__enter__()"
        )
        other = subprocess.run([sys.executable, "-c", code, folder], cwd=REPO, capture_output=True, text=True)
        assert "another `opd up` is running" in other.stderr
        assert folder.with_name("one.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with run_folder.only_one(folder):
        folder.mkdir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "one.lock").touch()
    with run_folder.only_one(tmp_path / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
