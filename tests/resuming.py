"""Trials that continue from a checkpoint, with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from literal import (
    ADAMW,
    tiny_case,
    trial_of,
    with_rank,
)

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.judge.trial import Trial

FSDP_4, TP_2 = ParallelDims(dp_shard=4), ParallelDims(tp=2)
WEIGHT = "layers.0.attention.wq.weight"


def resumed(before: ParallelDims = TP_2, after: ParallelDims = FSDP_4, training: Any = ADAMW, **changes: Any) -> Trial:
    """Two steps in one layout, saved, the third in another."""
    return trial_of(tiny_case(after, training, resume=(Saved(2, before),), **changes))


def with_resumed(trial: Trial, rank: int, what: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Trial:
    """what: parameters or optimizer_state."""
    held = trial.ranks[rank].resumed
    assert held is not None
    return with_rank(trial, rank, resumed=replace(held, **{what: change(dict(getattr(held, what)))}))


def everywhere(trial: Trial, what: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Trial:
    for rank in trial.ranks:
        trial = with_resumed(trial, rank, what, change)
    return trial
