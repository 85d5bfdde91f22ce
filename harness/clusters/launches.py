"""A process for each rank, as many at a time as there are cores; each is forked from the rank server and runs alone."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from harness.clusters.lone_rank import RankUsage, evidence_file, unable_file
from harness.core import trainers
from harness.core.case.case import Case, to_json
from harness.core.evidence.codec import decoded_without_values
from harness.core.evidence.reading import read_json
from harness.core.evidence.records import AT_LIMIT, Exit, RankEvidence, Run
from harness.core.launch import Job, default_server, launch

ENTRY = "harness.clusters.lone_rank:run_lone_rank"
TIMEOUT_REASON = "it had not ended after {:g} s, and alone it waits for no other rank: --timeout gives it more"


@dataclass(frozen=True)
class LoneRun:
    """The result of running ranks alone."""

    run: Run
    """Their exits and their evidence."""
    ranks: tuple[int, ...]
    """Their numbers."""
    seconds: float
    """Seconds for all of them."""
    usage_by_rank: Mapping[int, RankUsage] = field(default_factory=dict)
    """Rank that left evidence -> what it used."""
    unable_reasons: Mapping[int, str] = field(default_factory=dict)
    """Rank -> why it could not be run alone."""


def run_lone_ranks(
    case: Case,
    ranks: Sequence[int],
    folder: Path,
    *,
    trainer: str = "llama3",
    fault: str | None = None,
    timeout: float = 600.0,
    at_once: int | None = None,
) -> LoneRun:
    """Run these ranks of a case's world, each alone in its own process, and return their exits, evidence and usage.

    folder: fresh; their jobs and evidence go there. A rank that fails is an Exit, and does not affect others. timeout:
    seconds for one rank. at_once: ranks at a time; None means one per core.
    """
    began = time.monotonic()
    preload = trainers.load_adapter(trainer).preload
    default_server(preload)
    common_options = {"case": to_json(case), "trainer": trainer, "fault": fault, "directory": str(folder.resolve())}

    def alone(rank: int) -> Exit:
        """Run one rank as a job of its own and return its exit, with its number in the case's world."""
        options = {**common_options, "ranks": [rank]}
        job = Job(folder / f"job_{rank:05d}", 1, ENTRY, options, timeout=timeout, preload=preload)
        return dataclasses.replace(launch(job)[0], rank=rank, last_collective="")

    pool = ThreadPoolExecutor(at_once or os.cpu_count() or 1)
    try:
        exits = tuple(pool.map(alone, ranks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    evidence, used = _read_evidence(folder, ranks)
    run = Run(str(folder), case.dims.world_size, exits, evidence, fault=fault, trainer=trainer)
    unable = {rank: text.read_text(encoding="utf-8") for rank in ranks if (text := unable_file(folder, rank)).exists()}
    unable |= {
        exit.rank: TIMEOUT_REASON.format(timeout) for exit in exits if exit.how == "killed" and AT_LIMIT in exit.error
    }
    return LoneRun(run, tuple(ranks), time.monotonic() - began, used, unable)


def _read_evidence(folder: Path, ranks: Sequence[int]) -> tuple[dict[int, RankEvidence], dict[int, RankUsage]]:
    """Return evidence and usage of the ranks that left a file, both by rank."""
    evidence_by_rank = {}
    used_by_rank = {}
    for rank in ranks:
        if evidence_file(folder, rank).exists():
            record = read_json(evidence_file(folder, rank))
            evidence_by_rank[rank] = decoded_without_values(RankEvidence, record["evidence"])
            used_by_rank[rank] = RankUsage(**record["used"])
    return evidence_by_rank, used_by_rank
