"""What is said of a pre-flight, as the data of a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.clusters.chosen import Chosen
from harness.clusters.commands import CommandRun
from harness.clusters.figures import moved_by_axis
from harness.clusters.judging import Verdicts
from harness.clusters.launches import Flown
from harness.clusters.pages.layout_documents import figures
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.report.as_data import as_data
from harness.recording.pages.recording_documents import judged


def of_case(
    case: Case,
    chosen: Chosen,
    flown: Flown,
    verdicts: Verdicts,
    judging: float,
    *,
    set_aside: tuple[str, ...],
    gpu: str,
) -> dict[str, Any]:
    """Return what ran, what it was seen to hold and to move, the verdict, and the figures of all ranks."""
    return {
        "case": case.name,
        "requested": case,
        "set_aside": set_aside,
        "seconds_judging": judging,
        "ran": [_rank(flown, verdicts, rank) for rank in flown.ranks],
        **_common(case.dims, chosen, flown.seconds, verdicts),
        "figures": figures(case, verdicts.trial.plan, gpu),
    }


def of_command(
    words: Sequence[str], dims: ParallelDims, chosen: Chosen, run: CommandRun, verdicts: Verdicts
) -> dict[str, Any]:
    """Return what became of each process, and the verdict."""
    ran = [{"rank": rank, "code": code, "unable": run.unable.get(rank)} for rank, code in run.codes.items()]
    return {
        "command": words,
        "directory": run.directory,
        "ran": ran,
        **_common(dims, chosen, run.seconds, verdicts),
    }


def _common(dims: ParallelDims, chosen: Chosen, seconds: float, verdicts: Verdicts) -> dict[str, Any]:
    """Return the fields that documents on cases and on commands have in common."""
    return {
        "dims": dims,
        "world": dims.world_size,
        "chosen": chosen.why,
        "seed": chosen.seed,
        "seconds": seconds,
        **judged(verdicts.results, verdicts.diagnosis),
    }


def _rank(flown: Flown, verdicts: Verdicts, rank: int) -> dict[str, Any]:
    """Return what one rank held and moved in its last step, and what its process took."""
    facts: dict[str, Any] = {"rank": rank, "unable": flown.unable.get(rank)}
    evidence = verdicts.trial.ranks.get(rank)
    if evidence is not None and evidence.steps:
        last = evidence.steps[-1]
        facts |= {"memory": last.memory, "moved": moved_by_axis(verdicts.trial, rank, last.step)}
    return as_data(facts | {"used": flown.used.get(rank)})
