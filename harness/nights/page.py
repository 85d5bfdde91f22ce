"""From recorded runs, and the evidence that lies beside them, to what a page shows."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case.repository import name_here
from harness.core.judge.judgement import Judgement
from harness.core.judge.stored_trial import load_trial
from harness.core.report import outcome as became
from harness.core.run.folders import case_folders
from harness.core.run.judging import judge_folder
from harness.core.run.matrix import unexpected
from harness.core.run.verdicts import RecordedRun, short_name
from harness.nights.changes import curves
from harness.nights.history import kind, series
from harness.nights.merged import merged, problems, provenance

if TYPE_CHECKING:
    from harness.core.report.page import Page, Past, Shown, Trend


def page_of(runs: Sequence[RecordedRun], folders: Sequence[Path], earlier: Sequence[RecordedRun], file: Path) -> Page:
    """Return the page of these runs, merged, and of folders of single cases, which are judged now.

    file: where the page will lie. Raises EvidenceError for a folder that holds no case, and ValueError for runs that are
    not alike.
    """
    from harness.core.report import text
    from harness.core.report.page import Page

    judgements = [judge_folder(folder) for folder in case_folders(folders)]
    outcomes = [
        *(merged(runs) if runs else []),
        *(replace(became.judged(one), case=one.folder.name) for one in judgements),
    ]
    told = [line for lines in problems(runs) for line in lines] if runs else []
    made = [text.provenance(judgements)] if judgements else []
    lie = places_of(runs) | {one.folder.name: one.folder for one in judgements}
    trainers = {run.trainer for run in runs} | {short_name(one.trainer) for one in judgements}
    repositories = {str(run.begins.get("repository") or "") for run in runs} | ({name_here()} if judgements else set())
    machines = {name: str(run.begins.get("machine", "")) for run in runs for name in run.outcomes}
    return Page(
        outcomes=outcomes,
        provenance=[*provenance(runs), *made],
        device=_device(runs, judgements),
        trainer=", ".join(sorted(trainers)),
        repository=", ".join(sorted(filter(None, repositories))),
        told=told,
        past=past(_before(runs, earlier)),
        trends=_trends([*_before(runs, earlier), *runs]),
        shown={
            one.case: shown(lie[one.case], file, machines.get(one.case, ""))
            for one in outcomes
            if one.failed and one.case in lie
        },
    )


def _before(runs: Sequence[RecordedRun], earlier: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the others of the same trainer, device and launcher; all of them if none of these runs is recorded."""
    mine, kinds = {run.run for run in runs}, {kind(run) for run in runs}
    return [run for run in earlier if run.run not in mine and (not kinds or kind(run) in kinds)]


def _trends(runs: Sequence[RecordedRun]) -> list[Trend]:
    """Return the measures that changed from night to night, of each series of nights."""
    from harness.core.report.page import Trend

    rows = series(sorted(runs, key=lambda run: run.run)).values()
    return [Trend(one.case, one.measure, one.values) for nights in rows for one in curves(nights)]


def places_of(runs: Sequence[RecordedRun]) -> dict[str, Path]:
    """Return by case the folder with its evidence, beside the record that has its last outcome."""
    ordered = sorted(runs, key=lambda run: run.run)
    return {name: run.file.parent / one.folder for run in ordered for name, one in run.outcomes.items() if one.folder}


def _device(runs: Sequence[RecordedRun], judgements: Sequence[Judgement]) -> str:
    """Return all devices on which they ran: cuda alone if each rank had its own GPU."""
    found = {run.begins.get("device", "cpu") for run in runs} | {one.made.get("device", "cpu") for one in judgements}
    return "; ".join(sorted(found))


def shown(folder: Path, file: Path, machine: str = "") -> Shown:
    """Return what is drawn of a case. If nothing can be drawn, the page says why, and still shows the other cases."""
    from harness.core.report.drawings import drawn
    from harness.core.report.page import Shown

    if not (folder / "case.json").exists():
        return Shown(place=f"{machine}, in a folder {folder.name}" if machine else "")
    page, where = file.resolve().parent, folder.resolve()
    below = where.is_relative_to(page)
    link = Shown(evidence=str(where.relative_to(page)) if below else "", place=f"{platform.node()}: {where}")
    try:
        return replace(link, drawn=drawn(load_trial(folder)))
    except Exception as error:  # evidence of a broken run may hold anything
        return replace(link, problem=unexpected(error))


def past(runs: Sequence[RecordedRun]) -> Mapping[str, list[Past]]:
    """Return by case the verdicts that it had."""
    from harness.core.report.page import Past

    found: dict[str, list[Past]] = {}
    for run in runs:
        for name, one in run.outcomes.items():
            told = Past(run.begins.get("began", ""), run.begins.get("commit") or "unknown", one.verdict)
            found.setdefault(name, []).append(told)
    return found
