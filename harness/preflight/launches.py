"""A process for each rank, as many at a time as there are cores; each is forked from the rank server and runs alone."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import trainers
from harness.evidence.records import Exit, RankEvidence, Run
from harness.evidence.store import decoded_without_values
from harness.launch import Job, launch
from harness.preflight.lone_rank import evidence_file
from harness.spec.case import Case, to_json

ENTRY = "harness.preflight.lone_rank:rank"


@dataclass(frozen=True)
class Flown:
    """The ranks that ran. seconds: altogether. of_rank: processor time of the slowest; bytes: most memory of a process."""

    run: Run
    ranks: tuple[int, ...]
    seconds: float
    of_rank: float = 0.0
    bytes: int = 0


def fly(
    case: Case,
    ranks: Sequence[int],
    folder: Path,
    *,
    trainer: str = "llama3",
    fault: str | None = None,
    timeout: float = 600.0,
    at_once: int | None = None,
) -> Flown:
    """Run these ranks of a case's world. `folder` is fresh. A rank that fails is an Exit of the run."""
    began, width = time.monotonic(), at_once or os.cpu_count() or 1
    exits: list[Exit] = []
    for start in range(0, len(ranks), width):
        some = list(ranks[start : start + width])
        wanted = {"case": to_json(case), "trainer": trainer, "fault": fault, "directory": str(folder.resolve())}
        job = Job(
            folder / f"from_{start:05d}",
            len(some),
            ENTRY,
            {**wanted, "ranks": some},
            timeout=timeout,
            preload=trainers.load(trainer).preload,
        )
        exits += [dataclasses.replace(e, rank=some[e.rank], last_collective="") for e in launch(job)]
    evidence, seconds, most = _read(folder, ranks)
    run = Run(str(folder), case.dims.world_size, tuple(exits), evidence, fault=fault, trainer=trainer)
    return Flown(run, tuple(ranks), time.monotonic() - began, seconds, most)


def _read(folder: Path, ranks: Sequence[int]) -> tuple[dict[int, RankEvidence], float, int]:
    """What they left; the most processor seconds and bytes of one."""
    found, seconds, most = {}, 0.0, 0
    for rank in ranks:
        if evidence_file(folder, rank).exists():
            record = json.loads(evidence_file(folder, rank).read_text(encoding="utf-8"))
            found[rank] = decoded_without_values(RankEvidence, record["evidence"])
            seconds, most = max(seconds, record["used"]["seconds"]), max(most, record["used"]["bytes"])
    return found, seconds, most
