"""What is declared of plain tensors: the part of each rank, and its tp peers."""

from __future__ import annotations

import json

import pytest

from harness.core.case.dims import ParallelDims
from harness.recording.boxes import Sharded
from harness.recording.cli.work.same_training import one_declared
from harness.recording.recorder import sharded_here


@pytest.mark.parametrize(
    ("axis", "declared"),
    [("tp", Sharded("*.up", 0, 2, 1, tp=(2, 3))), ("dp_shard", Sharded("*.up", 0, 2, 1))],
)
def test_ranks_that_hold_parts_along_tp_are_known_to_one_another(
    axis: str, declared: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = one_declared(f"*.up={axis}:0", ParallelDims(dp_shard=2, tp=2))
    assert sharded_here(json.dumps([told])) == (declared,)
