"""What is declared of plain tensors: the part of each rank, and its tp peers."""

from __future__ import annotations

import json

import pytest

from harness.core.case.dims import ParallelDims
from harness.recording.boxes import DeclaredSharding
from harness.recording.cli.work.same_training import parse_declared
from harness.recording.recorder import declared_shardings


@pytest.mark.parametrize(
    ("axis", "declared"),
    [("tp", DeclaredSharding("*.up", 0, 2, 1, tp=(2, 3))), ("dp_shard", DeclaredSharding("*.up", 0, 2, 1))],
)
def test_ranks_that_hold_parts_along_tp_are_known_to_one_another(
    axis: str, declared: DeclaredSharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = parse_declared(f"*.up={axis}:0", ParallelDims(dp_shard=2, tp=2))
    assert declared_shardings(json.dumps([told])) == (declared,)
