"""Processes that `opd up` starts, with real ones."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from opd.processes import Process, stop_all
from tests.conftest import REPO, wait_until

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
LOGS = """
import sys
from shared import log
log.configure("it")
logger = log.get("it")
try:
    raise ValueError("too far off")
except ValueError:
    logger.exception("canary_failed", extra=log.fields(version=7))
logger.info("a RuntimeError: that nobody minds")
print("Process group was not destroyed")
sys.exit(1)
"""
RANKS = """
import os, signal
from shared.errors import ConfigError, RunFailed, run_main
def main():
    if os.environ["RANK"] == "1":
        raise {error}("no such checkpoint")
    signal.pause()
run_main(main)
"""
PARENT = (
    "import subprocess,sys,time; child=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']); "
    "print(child.pid, flush=True); time.sleep(600)"
)


def process(tmp_path: Path, code: str) -> Process:
    return Process("it", [sys.executable, "-u", "-c", code], tmp_path / "logs" / "it.log")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def test_children_of_a_stopped_process_are_gone_too(tmp_path: Path) -> None:
    parent = process(tmp_path, PARENT)
    parent.start()
    await wait_until(lambda: parent.log.read_text().strip().isdigit())
    child = int(parent.log.read_text())
    assert stop_all([parent]) == []
    await wait_until(lambda: not alive(child))
    assert parent.status() == -signal.SIGTERM


async def test_a_stubborn_process_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.processes.STOP_TIMEOUT_S", 0.2)
    stubborn = process(tmp_path, STUBBORN)
    stubborn.start()
    await wait_until(lambda: "up" in stubborn.log.read_text())
    assert stop_all([stubborn]) == ["it"]
    assert stubborn.status() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "complaint", "again"),
    [
        (
            "import sys; print('noise'); sys.stderr.write('error: no such model\\n'); sys.exit(2)",
            "no such model",
            False,
        ),
        ("import sys; sys.stderr.write('failed: too much is broken\\n'); sys.exit(3)", "too much is broken", False),
        ("import os; print('half a word'); os._exit(7)", "half a word (exit status 7", True),
        ("import sys; sys.stderr.write('died: the engine\\n'); sys.exit(1)", "the engine", True),
        (LOGS, "canary_failed version=7 ValueError: too far off (exit status 1", True),
        ("print('Exception ignored'); raise KeyError('weights')", "KeyError: 'weights' (exit status 1", True),
    ],
)
def test_what_ended_is_explained(tmp_path: Path, code: str, complaint: str, again: bool) -> None:
    ended = process(tmp_path, code)
    ended.start()
    assert ended.wait(time.monotonic() + 20)
    assert ended.complaint().startswith(complaint)
    assert ended.may_restart() is again


@pytest.mark.parametrize("error", ["ConfigError", "RunFailed"])
async def test_a_rank_under_torchrun_is_believed(tmp_path: Path, error: str) -> None:
    """torchrun ends with 1 whatever a rank ends with; the reason must still stop the run at once."""
    script = tmp_path / "rank.py"
    script.write_text(RANKS.format(error=error))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = Process("it", torchrun, tmp_path / "it.log", env={"PYTHONPATH": str(REPO)})
    ended.start()
    assert ended.wait(time.monotonic() + 60), ended.log.read_text()
    assert ended.status() == 1
    assert ended.complaint() == "no such checkpoint"
    assert not ended.may_restart()


async def test_restarts_are_bounded(tmp_path: Path) -> None:
    dying = process(tmp_path, "import os; os._exit(7)")
    dying.start()
    while True:
        await wait_until(lambda: dying.status() is not None)
        if not dying.may_restart():
            break
        dying.restart()
    assert dying.restarts == 3
