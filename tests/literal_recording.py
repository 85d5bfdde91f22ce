"""Literal summaries: what the ranks of a recorded job would leave."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core.case.dims import ParallelDims
from harness.core.checks import all_checks, run_check
from harness.core.evidence.format import field_name, is_inlined
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Outside, Use
from harness.core.judge.result import Result
from harness.recording.judged.recorded import trial_of
from harness.recording.judged.stored_recording import Recording

GATHER = ("all_gather", "forward", "float32", 3, 1000)
SUM = ("all_reduce", "backward", "float32", 1, 250)


PARTS: dict[str, Any] = {
    field.name: typing.get_type_hints(Summary)[field.name] for field in dataclasses.fields(Summary) if is_inlined(field)
}
EMPTY = {"dict": {}, "tuple": (), "str": "", "int": 0, "float": 0.0}


def summary(rank: int, world: int = 4, **changes: Any) -> Summary:
    """Return the summary of a rank that left nothing but these changes, by the names that fields have in files."""
    plain = Summary(rank=rank, world=world, shown=0, **{name: empty(kind) for name, kind in PARTS.items()})
    return with_changes(plain, **{"ended": "ok", "host": "h", "steps_seen": 3} | changes)


def empty(kind: Any) -> Any:
    """Return a part of a summary of which nothing was seen."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return kind(**{name: None if "None" in text else EMPTY[text.partition("[")[0]] for name, text in types.items()})


def with_changes(plain: Summary, **changes: Any) -> Summary:
    """Return a summary with other values, by the names that fields have in files."""
    parts = {}
    for name, kind in PARTS.items():
        stored = {field_name(field): field.name for field in dataclasses.fields(kind)}
        changed = {field: changes.pop(old) for old, field in stored.items() if old in changes}
        parts[name] = dataclasses.replace(getattr(plain, name), **changed)
    return dataclasses.replace(plain, **parts, **changes)


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
