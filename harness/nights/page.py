"""The data of a page, from recorded runs and the evidence that lies beside them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case.repository import repository_name_here
from harness.core.judge.judgement import Judgement
from harness.core.judge.stored_trial import load_trial
from harness.core.report import outcome as became
from harness.core.run.folders import find_case_folders
from harness.core.run.judging import judge_folder
from harness.core.run.matrix import unexpected_error_text
from harness.core.run.verdicts import RecordedRun, short_name
from harness.nights.changes import changing_curves
from harness.nights.history import comparison_key, group_nights
from harness.nights.merged import find_problems, merge_outcomes, provenance_lines

if TYPE_CHECKING:
    from harness.core.report.page import Page, PastVerdict, ShownEvidence, Trend


def build_page(
    runs: Sequence[RecordedRun], folders: Sequence[Path], earlier: Sequence[RecordedRun], file: Path
) -> Page:
    """Return the data of one HTML page: recorded runs, merged, and folders of single cases, which are judged now.

    earlier: runs for past verdicts and trends. file: where the page will lie, for relative links. Raises EvidenceError
    for a folder without a case, and ValueError for runs that cannot be merged.
    """
    from harness.core.report import text
    from harness.core.report.page import Page

    judgements = [judge_folder(folder) for folder in find_case_folders(folders)]
    outcomes = merge_outcomes(runs) if runs else []
    outcomes += [replace(became.judged_outcome(judgement), case=judgement.folder.name) for judgement in judgements]
    run_problems: list[str] = []
    if runs:
        lacking, repeated = find_problems(runs)
        run_problems = [*lacking, *repeated]
    case_provenance = [text.provenance_text(judgements)] if judgements else []
    evidence_folders = evidence_folder_by_case(runs) | {
        judgement.folder.name: judgement.folder for judgement in judgements
    }
    trainers = {run.trainer for run in runs} | {short_name(judgement.trainer) for judgement in judgements}
    repositories = {str(run.begins.get("repository") or "") for run in runs}
    if judgements:
        repositories.add(repository_name_here())
    machine_of_case: dict[str, str] = {}
    for run in runs:
        machine_of_case |= dict.fromkeys(run.outcomes, str(run.begins.get("machine", "")))
    shown_cases = {
        outcome.case: build_shown(evidence_folders[outcome.case], file, machine_of_case.get(outcome.case, ""))
        for outcome in outcomes
        if outcome.failed and outcome.case in evidence_folders
    }
    return Page(
        outcomes=outcomes,
        provenance=[*provenance_lines(runs), *case_provenance],
        device=_devices_text(runs, judgements),
        trainer=", ".join(sorted(trainers)),
        repository=", ".join(sorted(filter(None, repositories))),
        told=run_problems,
        past=past_verdicts(_earlier_runs(runs, earlier)),
        trends=_build_trends([*_earlier_runs(runs, earlier), *runs]),
        shown=shown_cases,
    )


def _earlier_runs(runs: Sequence[RecordedRun], earlier: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the earlier runs that are not among `runs` and have the trainer, device and launcher of one of them.

    If `runs` is empty, all earlier runs are returned.
    """
    own_names = {run.run for run in runs}
    kinds = {comparison_key(run) for run in runs}
    return [run for run in earlier if run.run not in own_names and (not kinds or comparison_key(run) in kinds)]


def _build_trends(runs: Sequence[RecordedRun]) -> list[Trend]:
    """Return the curves of measures that changed over the nights, for each trainer, device and launcher by itself."""
    from harness.core.report.page import Trend

    trends: list[Trend] = []
    for nights in group_nights(sorted(runs, key=lambda run: run.run)).values():
        trends += [Trend(curve.case, curve.measure, curve.values) for curve in changing_curves(nights)]
    return trends


def evidence_folder_by_case(runs: Sequence[RecordedRun]) -> dict[str, Path]:
    """Return by case the folder with its evidence, as the last run that recorded one for the case gives it.

    Cases without a recorded folder are left out. That the folder exists is not examined.
    """
    folder_of_case: dict[str, Path] = {}
    for run in sorted(runs, key=lambda run: run.run):
        for name, outcome in run.outcomes.items():
            if outcome.folder:
                folder_of_case[name] = run.file.parent / outcome.folder
    return folder_of_case


def _devices_text(runs: Sequence[RecordedRun], judgements: Sequence[Judgement]) -> str:
    """Return the devices of all runs and judgements, sorted, joined by "; ". A device that was not recorded counts as cpu."""
    devices = {run.begins.get("device", "cpu") for run in runs} | {
        judgement.made.get("device", "cpu") for judgement in judgements
    }
    return "; ".join(sorted(devices))


def build_shown(folder: Path, file: Path, machine: str = "") -> ShownEvidence:
    """Return the drawing of one case for the page, and where its evidence lies. file: the page. machine: that ran the case.

    Without evidence here, only the place is named. If drawing fails, `problem` says why, and the page shows the other
    cases.
    """
    from harness.core.report.drawings import draw_case
    from harness.core.report.page import ShownEvidence

    if not (folder / "case.json").exists():
        return ShownEvidence(place=f"{machine}, in a folder {folder.name}" if machine else "")
    page_folder = file.resolve().parent
    case_folder = folder.resolve()
    evidence = str(case_folder.relative_to(page_folder)) if case_folder.is_relative_to(page_folder) else ""
    link = ShownEvidence(evidence=evidence, place=f"{platform.node()}: {case_folder}")
    try:
        return replace(link, drawn=draw_case(load_trial(folder)))
    except Exception as error:  # evidence of a broken run may hold anything
        return replace(link, problem=unexpected_error_text(error))


def past_verdicts(runs: Sequence[RecordedRun]) -> Mapping[str, list[PastVerdict]]:
    """Return by case its verdicts in these runs, each with the run's time and commit, in the order of the runs."""
    from harness.core.report.page import PastVerdict

    past_by_case: dict[str, list[PastVerdict]] = {}
    for run in runs:
        for name, outcome in run.outcomes.items():
            past_verdict = PastVerdict(
                run.begins.get("began", ""), run.begins.get("commit") or "unknown", outcome.verdict
            )
            past_by_case.setdefault(name, []).append(past_verdict)
    return past_by_case
