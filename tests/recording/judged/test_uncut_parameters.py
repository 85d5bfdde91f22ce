"""Parameters outside of the mesh over which DTensors cut others, as norms under tp: each rank holds all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from literal_recording import judged_of, summary

from harness.core.case.dims import ParallelDims
from harness.core.evidence.claimed import uncut_contents
from harness.core.evidence.recording import RecordedStep
from harness.core.evidence.records import TensorEvidence
from harness.core.judge.result import Verdict

DIMS = ParallelDims(dp_shard=2, tp=2)
GRID = [[0, 1], [2, 3]]
NORM, WEIGHT, EXPERT, EXPERT_BIAS = "norm.weight", "mlp.weight", "expert.weight", "expert.bias"


def tensor(fqn: str, mesh: Any, *placements: str) -> TensorEvidence:
    return TensorEvidence(fqn, (4, 4), "float32", mesh, placements, np.zeros(0))


def record(*tensors: TensorEvidence, ignored: tuple[str, ...] = ()) -> Any:
    """What rank 0 leaves of two ranks by two: FSDP2 over [0,2], tensor parallelism over [0,1]."""
    wrapper = SimpleNamespace(ignored=ignored, shard_ranks=(0, 2), replicate_ranks=())
    evidence = SimpleNamespace(rank=0, parameters=tensors, structure={"": wrapper})
    digests = {one.fqn: number for number, one in enumerate(tensors, start=1)}
    began = RecordedStep(0, digests, constant=(NORM, EXPERT_BIAS))
    return SimpleNamespace(evidence=evidence, steps=(began, RecordedStep(1, digests)))


CUT = tensor(WEIGHT, GRID, "Shard(0)", "Shard(0)")


@pytest.mark.parametrize(
    ("tensors", "ignored", "kinds"),
    [
        ([CUT, tensor(NORM, [0, 2], "Shard(0)")], (), ["0,1 constant"]),
        ([CUT, tensor(NORM, None)], (), ["0,1 constant"]),
        (
            [CUT, tensor(NORM, GRID, "Shard(0)", "Replicate")],
            (),
            [],
        ),  # it claims to be copied, which is compared elsewhere
        ([CUT, tensor(EXPERT, [0, 2], "Shard(0)")], (), ["0,1 drawn"]),
        ([CUT, tensor(EXPERT, None), tensor(EXPERT_BIAS, None)], (), ["0,1 drawn"]),  # a layer cut by hand has both
        ([CUT, tensor(NORM, None)], (NORM,), []),  # a wrapper leaves it alone, as a rank's own experts
        ([tensor(NORM, [0, 2], "Shard(0)"), tensor(EXPERT, None)], (), []),  # FSDP2 alone cuts
    ],
)
def test_which_parameters_lie_outside(
    tensors: list[TensorEvidence], ignored: tuple[str, ...], kinds: list[str]
) -> None:
    assert [*uncut_contents(record(*tensors, ignored=ignored))] == kinds


@pytest.mark.parametrize(
    ("began", "after", "verdict", "found"),
    [
        ((7, 7), (8, 8), Verdict.PASS, []),
        ((7, 7), (8, 9), Verdict.FAIL, [((1,), 1)]),
        ((7, 6), (8, 9), Verdict.NOT_APPLICABLE, []),  # cut by hand: each rank began with a part of its own
    ],
)
def test_ranks_that_began_alike_hold_the_same_after_each_step(
    began: tuple[int, int], after: tuple[int, int], verdict: Verdict, found: list[tuple[tuple[int, ...], int]]
) -> None:
    summaries = [
        summary(rank, uncut={"0,1 constant": {0: began[rank], 1: after[rank]}} if rank < 2 else {}, slices=1 + rank)
        for rank in range(4)
    ]
    result = judged_of("replica_agreement", summaries, DIMS)
    assert result.verdict is verdict
    assert [(finding.ranks, finding.step) for finding in result.findings] == found
