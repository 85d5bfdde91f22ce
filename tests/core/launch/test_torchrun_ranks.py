"""What the first node makes of ranks of other nodes, whose records come through a disk or a network: no torchrun is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.launch import torchrun
from harness.core.launch.job import Job, rank_file, write_json
from harness.core.launch.torchrun import TorchrunRanks


def ranks_after(torchrun_ended_with: int, tmp_path: Path, *arguments: str) -> TorchrunRanks:
    """Of two nodes, of which this one has rank 0, that ended well."""
    job = Job(tmp_path, 2, "package:entry", torchrun_args=arguments)
    ranks: Any = TorchrunRanks(job, tmp_path / "job.json", {})
    ranks.process = SimpleNamespace(poll=lambda: torchrun_ended_with)
    ended(tmp_path, 0)
    return ranks


def ended(folder: Path, rank: int) -> None:
    record = rank_file(folder, "exits", rank)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, {"pid": 1, "host": f"host{rank}", "status": 0, "ended": 1.0})


def test_what_a_rank_of_another_node_left_may_arrive_after_torchrun_ended(tmp_path: Path) -> None:
    ranks = ranks_after(0, tmp_path, "--nnodes", "2")
    ranks.read_records()
    assert (ranks.gone, ranks.statuses) == (False, {0: 0})
    ended(tmp_path, 1)
    ranks.read_records()
    assert ranks.statuses == {0: 0, 1: 0}


@pytest.mark.parametrize("code", [0, 1])
def test_what_never_arrives_is_not_waited_for_for_ever(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "RECORD_PATIENCE", {True: 0.0, False: 0.0})
    ranks = ranks_after(code, tmp_path, "--nnodes", "2")
    ranks.read_records()
    assert ranks.gone and ranks.trouble.startswith(f"torchrun exited with code {code}, see")


def test_nothing_is_waited_for_where_no_rank_began_or_all_are_of_this_node(tmp_path: Path) -> None:
    alone = ranks_after(0, tmp_path / "alone")
    begun = ranks_after(2, tmp_path / "none", "--nnodes", "2")
    rank_file(tmp_path / "none", "exits", 0).unlink()
    for ranks in (alone, begun):
        ranks.read_records()
        assert ranks.gone
