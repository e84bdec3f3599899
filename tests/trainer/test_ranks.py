"""Rank 0 leads another real process over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPO, free_port


def test_every_rank_runs_what_rank_zero_calls_and_its_failure_is_known(tmp_path: Path) -> None:
    port = str(free_port())
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(REPO / "tests" / "trainer" / "ranks_rank.py")
    files = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), port, str(files[rank])], env=env, cwd=REPO)
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    calls = [json.loads(file.read_text()) for file in files]
    assert calls[0] == calls[1] == [[100_000, 7], [], [0, "ü"]]
