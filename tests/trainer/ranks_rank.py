"""One rank of the test of `Ranks`: `ranks_rank.py RANK PORT FILE` writes what its operation was called with."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from services.trainer.checkpoint import Checkpoints, RunState
from services.trainer.ranks import Ranks


def main(rank: int, port: str, file: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    calls: list[list[object]] = []

    def note(argument: list[object] | None) -> int:
        calls.append([len(argument[0]), argument[1]] if argument else [])
        return 10 * rank + len(calls)

    def fail(who: int) -> None:
        if rank == who:
            raise OSError(f"no room on {who}")

    def save(folder: str) -> None:
        """Rank 1 begins when rank 0 is done, and takes its time."""
        while rank == 1 and not (Path(folder) / "rank-0").exists():
            time.sleep(0.01)
        for part in range(200 if rank else 1):
            with (Path(folder) / f"rank-{rank}").open("a") as out:
                out.write(f"{part}\n" * 1000)

    ranks = Ranks({"note": note, "fail": fail, "save": save})
    if rank == 0:
        results = [ranks.call("note", [b"x" * 100_000, 7]), ranks.call("note"), ranks.call("note", [b"", "ü"])]
        assert results == [1, 2, 3]
        reasons = []
        for who in (0, 1, 2):
            try:
                ranks.call("fail", who)
            except OSError as error:
                reasons.append(str(error))
        assert reasons == ["no room on 0", "rank 1: no room on 1"]
        written = Checkpoints(file.parent, keep=1).write(
            RunState(step=1), lambda folder: ranks.call("save", str(folder))
        )
        files = json.loads((written / "state.json").read_text())["files"]
        sizes = {name: said["bytes"] for name, said in files.items()}
        assert sizes == {"rank-0": 2000, "rank-1": (written / "rank-1").stat().st_size}
        assert (written / "rank-1").read_text().count("199\n") == 1000
        ranks.stop()
    else:
        ranks.follow()
    file.write_text(json.dumps(calls))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
