"""A comparison of two runs of a matrix, case by case: verdicts, and, where evidence is there, the structure of what
ranks did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.core.evidence.store import EvidenceError, load_run
from harness.core.judge.measures import HELD, MOVED, PEAK, SECONDS
from harness.core.report.outcome import Outcome
from harness.core.run.verdicts import RecordedRun
from harness.nights.merged import merge_outcomes
from harness.nights.page import evidence_folder_by_case
from harness.nights.pages.compared_runs import ComparedCase
from harness.recording.judged.figures import Figures, figures_of_measures, figures_of_recording, find_shifts
from harness.recording.judged.run_as_recording import recording_of_run
from harness.recording.judged.structure import differences, structure

T = TypeVar("T")
Pair = tuple[T, T]
COMPARED_KEYS = ("trainer", "torch", "commit", "device", "launcher", "machine")
NO_OUTCOME = Outcome("", "none")


def differences_of_runs(first: RecordedRun, second: RecordedRun) -> list[tuple[str, str, str]]:
    """Return what the runs themselves differ in, of COMPARED_KEYS: (name, value of the first, value of the second) each.

    Missing values are "unknown". Empty if nothing differs.
    """
    texts = [
        (name, str(first.begins.get(name) or "unknown"), str(second.begins.get(name) or "unknown"))
        for name in COMPARED_KEYS
    ]
    return [difference for difference in texts if difference[1] != difference[2]]


def compare_cases(first_run: RecordedRun, second_run: RecordedRun) -> list[ComparedCase]:
    """Return the comparison of every case that either run has, in the order of the first run, then of the second.

    A case that one run lacks has the verdict "none" there. Cases that both runs skipped are left out.
    """
    first_outcomes = _outcomes_by_case(first_run)
    second_outcomes = _outcomes_by_case(second_run)
    first_folders = evidence_folder_by_case([first_run])
    second_folders = evidence_folder_by_case([second_run])
    compared = []
    for name in dict.fromkeys([*first_outcomes, *second_outcomes]):
        first = first_outcomes.get(name, NO_OUTCOME)
        second = second_outcomes.get(name, NO_OUTCOME)
        if not (first.skipped and second.skipped):
            compared.append(_compare_case(name, (first, second), (first_folders.get(name), second_folders.get(name))))
    return compared


def _outcomes_by_case(run: RecordedRun) -> dict[str, Outcome]:
    return {outcome.case: outcome for outcome in merge_outcomes([run])}


def _compare_case(name: str, pair: Pair[Outcome], places: Pair[Path | None]) -> ComparedCase:
    """Return the comparison of one case. pair: its outcomes. places: the folders of its evidence.

    If it did not run on one side, only verdicts and costs are compared. If evidence cannot be read, sums of bytes take
    the place of the structure, and `problem` says why.
    """
    first, second = pair
    costs = (_costs_of(first), _costs_of(second))
    if not (first.checks and second.checks):  # one of them did not run
        return ComparedCase(name, tuple(differences(_verdict_data(first), _verdict_data(second))), costs)
    structures: Sequence[Mapping[str, Any]]
    figures_of_both: Sequence[Figures]
    problem = ""
    try:
        structures, figures_of_both = zip(*map(structure_and_figures, places), strict=True)
    except EvidenceError as error:
        problem = str(error)
        structures = (_byte_sums(first), _byte_sums(second))
        figures_of_both = (figures_of_measures(first.measures), figures_of_measures(second.measures))
    facts = [
        {**_verdict_data(outcome), **found_structure} for outcome, found_structure in zip(pair, structures, strict=True)
    ]
    return ComparedCase(name, tuple(differences(*facts)), costs, tuple(find_shifts(*figures_of_both)), problem)


def structure_and_figures(folder: Path | None) -> tuple[Mapping[str, Any], Figures]:
    """Return the structure and the figures of a case's judged launch, as `harness record` has them of a job.

    folder: of the case's evidence. Raises EvidenceError if it is None, has no case.json, or no rank left evidence.
    """
    if folder is None or not (folder / "case.json").exists():
        raise EvidenceError("the evidence is not beside its verdict")
    recording = recording_of_run(load_run(folder / "run"))
    if not recording.summaries:
        raise EvidenceError("no rank left evidence")
    return structure(recording), figures_of_recording(recording)


def _verdict_data(outcome: Outcome) -> dict[str, Any]:
    """Return the verdict with its cause or reason as one text, and the verdict of each check by name."""
    reason = outcome.cause or outcome.reason
    return {"verdict": f"{outcome.verdict}: {reason}" if reason else outcome.verdict, "checks": dict(outcome.checks)}


def _byte_sums(outcome: Outcome) -> dict[str, Any]:
    """Return under "sums" the bytes that ranks held and moved, by the measure's name. Other measures are left out."""
    byte_sums = {name: int(value) for name, value in outcome.measures.items() if name == HELD or name.startswith(MOVED)}
    return {"sums": byte_sums}


def _costs_of(outcome: Outcome) -> dict[str, float]:
    """Return the "step time" in seconds and the "peak memory" in bytes, without what was not measured."""
    names = {"step time": SECONDS, "peak memory": PEAK}
    return {word: outcome.measures[name] for word, name in names.items() if name in outcome.measures}
