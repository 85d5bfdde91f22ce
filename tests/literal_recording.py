"""Literal summaries: what the ranks of a recorded job would leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core.case.dims import ParallelDims
from harness.core.checks import all_checks, run_check
from harness.core.evidence.summary import Outside, Summary, Use
from harness.core.judge.result import Result
from harness.recording.judged.recorded import trial_of
from harness.recording.judged.stored_recording import Recording

GATHER = ("all_gather", "forward", "float32", 3, 1000)
SUM = ("all_reduce", "backward", "float32", 1, 250)


def summary(rank: int, world: int = 4, **changes: Any) -> Summary:
    plain: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(Summary)), 0)
    tables = (
        "placements",
        "contents",
        "fed",
        "not_finite",
        "memory",
        "settings",
        "versions",
        "wrappers",
        "roles",
        "seconds",
        "copies",
        "tokens",
        "ignored",
        "unclaimed",
        "inputs",
        "samples",
        "uncut",
    )
    plain |= {name: {} for name in tables}
    plain |= {
        name: ()
        for name in (
            "parts",
            "optimizers",
            "uses",
            "issued",
            "idle",
            "argv",
            "left_out",
            "failed",
            "outside",
            "whole",
            "background",
            "idle_steps",
            "places",
            "hooks",
            "own_groups",
            "beside",
            "drawn",
        )
    }
    plain |= {
        "rank": rank,
        "world": world,
        "ended": "ok",
        "error": "",
        "host": "h",
        "last": None,
        "joined": None,
        "reached": None,
        "launch": "",
    }
    plain["steps_seen"] = 3
    return Summary(**plain | changes)


def outside(ranks: str, calls: int, size: int, steps: str, *, dtype: str = "float32", phase: str = "other") -> Outside:
    """An all_reduce."""
    return Outside(ranks, "all_reduce", phase, dtype, calls, size, steps)


def hsdp(rank: int, **changes: Any) -> Summary:
    shard, replicate = ("0,1" if rank < 2 else "2,3"), ("0,2" if rank % 2 == 0 else "1,3")
    roles = {shard: "sharded by fsdp2", replicate: "replicated by fsdp2"}
    uses = (Use(shard, *GATHER), Use(replicate, *SUM))
    plain = {"roles": roles, "uses": uses, "slices": 1 + rank % 2, "contents": {1: 10 + rank % 2}}
    return summary(rank, **plain | changes)


def judged_of(check: str, summaries: Sequence[Summary], dims: ParallelDims) -> Result:
    """What a check says of these ranks, and of none besides them, by this layout."""
    recording = Recording(Path("r"), {one.rank: one for one in summaries}, requested=dims.world_size)
    trial = trial_of({}, dims, "r", dims.world_size, recording=recording)
    return run_check(check, all_checks()[check].check, trial)
