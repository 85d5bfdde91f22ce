"""The data of a pre-flight's document: which ranks ran, what they held and moved, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.clusters.chosen import ChosenRanks
from harness.clusters.commands import CommandRun
from harness.clusters.figures import moved_by_axis
from harness.clusters.judging import Verdicts
from harness.clusters.launches import LoneRun
from harness.clusters.pages.layout_documents import figures_document
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.report.as_data import as_data
from harness.recording.pages.recording_documents import verdict_document


def case_document(
    case: Case,
    chosen: ChosenRanks,
    flown: LoneRun,
    verdicts: Verdicts,
    judging: float,
    *,
    set_aside: tuple[str, ...],
    gpu: str,
) -> dict[str, Any]:
    """Return the document of a case's pre-flight: the ranks that ran, the bytes they held and moved, the verdict, and
    figures.

    judging: seconds of plan and checks. gpu: the model whose memory is compared.
    """
    return {
        "case": case.name,
        "requested": case,
        "set_aside": set_aside,
        "seconds_judging": judging,
        "ran": [_rank_document(flown, verdicts, rank) for rank in flown.ranks],
        **_common_fields(case.dims, chosen, flown.seconds, verdicts),
        "figures": figures_document(case, verdicts.trial.plan, gpu),
    }


def command_document(
    words: Sequence[str], dims: ParallelDims, chosen: ChosenRanks, run: CommandRun, verdicts: Verdicts
) -> dict[str, Any]:
    """Return the document of a command's pre-flight: each process's exit code, and the verdict."""
    ran = [
        {"rank": rank, "code": code, "unable": run.unable_reasons.get(rank)} for rank, code in run.exit_codes.items()
    ]
    return {
        "command": words,
        "directory": run.directory,
        "ran": ran,
        **_common_fields(dims, chosen, run.seconds, verdicts),
    }


def _common_fields(dims: ParallelDims, chosen: ChosenRanks, seconds: float, verdicts: Verdicts) -> dict[str, Any]:
    """Return the fields that documents on cases and on commands have in common."""
    return {
        "dims": dims,
        "world": dims.world_size,
        "chosen": chosen.ranks_by_reason,
        "seed": chosen.seed,
        "seconds": seconds,
        **verdict_document(verdicts.results, verdicts.diagnosis),
    }


def _rank_document(flown: LoneRun, verdicts: Verdicts, rank: int) -> dict[str, Any]:
    """Return as data what one rank held and moved in its last step, and what its process took.

    Memory and bytes are left out if it finished no step. "unable": why the rank was not able, or None.
    """
    facts: dict[str, Any] = {"rank": rank, "unable": flown.unable_reasons.get(rank)}
    evidence = verdicts.trial.ranks.get(rank)
    if evidence is not None and evidence.steps:
        last = evidence.steps[-1]
        facts |= {"memory": last.memory, "moved": moved_by_axis(verdicts.trial, rank, last.step)}
    return as_data(facts | {"used": flown.usage_by_rank.get(rank)})
