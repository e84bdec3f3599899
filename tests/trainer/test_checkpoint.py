from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from services.trainer.checkpoint import Checkpoints, RunState
from shared.errors import RunFailed
from tests.conftest import REPO


def save(folder: Path) -> None:
    (folder / "rank0.safetensors").write_bytes(b"weights")


def test_the_newest_checkpoints_are_kept_and_read_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 30):
        state = RunState(step=step, version=step + 5, ledger_length=9, evaluations=[(1, 0)])
        checkpoints.write(state, save)
    found = checkpoints.latest()
    assert found is not None
    assert found[0].name == "step-00000030" and found[1].version == 35 and found[1].evaluations == [(1, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000030"]


@pytest.mark.parametrize(
    "damage", ["no state", "half state", "altered state", "short file", "altered byte", "missing file"]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(RunState(step=1), save)
    path = checkpoints.write(RunState(step=2), save)
    if damage == "no state":
        (path / "state.json").unlink()
    elif damage == "half state":
        (path / "state.json").write_text((path / "state.json").read_text()[:20])
    elif damage == "altered state":
        (path / "state.json").write_text((path / "state.json").read_text().replace('"step": 2', '"step": 3'))
    elif damage == "short file":
        (path / "rank0.safetensors").write_bytes(b"wei")
    elif damage == "altered byte":
        (path / "rank0.safetensors").write_bytes(b"wejghts")
    else:
        (path / "rank0.safetensors").unlink()
    found = checkpoints.latest()
    assert found is not None and found[1].step == 1
    (warning,) = caplog.records
    assert warning.msg == "checkpoint_broken" and warning.opd_fields["path"] == str(path)
    checkpoints.write(RunState(step=2, version=9), save)
    found = checkpoints.latest()
    assert found is not None and found[1].version == 9


def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 9):
        checkpoints.write(RunState(step=step), save)
    (tmp_path / "step-00000009" / "rank0.safetensors").unlink()
    checkpoints.write(RunState(step=6), save)  # resumed from 5 and stopped soon
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(RunState(step=1), save)

    def full(folder: Path) -> None:
        save(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match=r"No space left on device; make room or change run.dir"):
        checkpoints.write(RunState(step=2), full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from services.trainer.checkpoint import Checkpoints, RunState
from shared.errors import run_main

def save(count):
    return lambda folder: save_file({"w": np.ones(count)}, folder / "rank-00000.safetensors")

def main():
    checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
    checkpoints.write(RunState(step=1), save(9))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))  # what a write meets on a full disk, but for the number
    checkpoints.write(RunState(step=2), save(2**17))

run_main(main)
"""


def test_a_disk_that_fills_up_inside_the_writer_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    """safetensors' own writer fails with an error that is no OSError."""
    run = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, cwd=REPO)
    assert run.returncode == 3, run.stderr
    assert f"failed: checkpoint {tmp_path / 'step-00000002'} cannot be written" in run.stderr
    assert "make room or change run.dir, then start again to resume" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = Checkpoints(tmp_path, keep=2).latest()
    assert found is not None and found[1].step == 1


def test_what_a_crash_left_half_written_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "step-00000009.tmp").mkdir(parents=True)
    Checkpoints(tmp_path, keep=1).write(RunState(step=1), save)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert json.loads((tmp_path / "step-00000001" / "state.json").read_text())["files"] == {
        "rank0.safetensors": {"bytes": 7, "crc32": f"{zlib.crc32(b'weights'):08x}"}
    }
