"""One rank of the test of `Ranks`: `ranks_rank.py RANK PORT FILE` writes what its operation was called with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

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

    ranks = Ranks({"note": note, "fail": fail})
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
        ranks.stop()
    else:
        ranks.follow()
    file.write_text(json.dumps(calls))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
