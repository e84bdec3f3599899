from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.ledger import DEAD_LETTER, DROPPED_STALE, TRAINED, Ledger, audit


def test_books_balance(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file, 0)
    ledger.record(TRAINED, ["0-0", "0-1"], step=1)
    ledger.record(DROPPED_STALE, ["1-0"], step=2)
    ledger.record(DEAD_LETTER, ["1-1"], step=2)
    ledger.record(TRAINED, [], step=2)
    ledger.close()
    books = audit(file, ["0-0", "0-1", "1-0", "1-1", "2-0"], ["2-0", "1-1"])
    expected = {"produced": 5, "trained": 2, "dropped_stale": 1, "dead_letter": 1, "queued": 1}
    assert books == {**expected, "lost": 0, "trained_twice": 0}


def test_lost_and_trained_twice_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file, 0)
    ledger.record(TRAINED, ["0-0"], step=1)
    ledger.record(TRAINED, ["0-0"], step=2)
    ledger.close()
    books = audit(file, ["0-0", "0-1"], [])
    assert (books["lost"], books["trained_twice"]) == (1, 1)


def test_a_resumed_ledger_tells_the_surviving_lineage_only(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file, 0)
    ledger.record(TRAINED, ["0-0"], step=1)
    length = ledger.sync()
    ledger.record(TRAINED, ["0-1"], step=2)
    ledger.close()
    resumed = Ledger(file, length)
    assert resumed.kind("0-0") == TRAINED and resumed.kind("0-1") is None
    assert resumed.counts == {TRAINED: 1}
    resumed.close()
    assert audit(file, ["0-0", "0-1"], ["0-1"])["queued"] == 1


def test_a_ledger_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="altered"):
        Ledger(tmp_path / "ledger.jsonl", 10)


def test_a_stream_that_lost_its_data_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", 0)
    ledger.record(TRAINED, ["0-0", "0-1"], step=1)
    ledger.check_produced(["0-0", "0-1", "0-2"])
    with pytest.raises(ConfigError, match=r"know 1 trajectories that Redis has never seen, e\.g\. 0-1"):
        ledger.check_produced(["0-0"])


def test_no_ledger_means_nothing_settled(tmp_path: Path) -> None:
    assert audit(tmp_path / "none", ["0-0"], [])["lost"] == 1
