"""The output of recorded runs, merged: the grid that they printed, an HTML page, or a form for CI."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import other_trainer_lines
from harness.core.cli.work.verdict_codes import exit_code_of_verdict
from harness.core.evidence.own_folders import refuse_foreign_file, replace_own
from harness.core.report.grid import matrix_report
from harness.core.report.outcome import Outcome, outcome_document
from harness.core.report.output import print_error, print_lines
from harness.core.run import verdicts
from harness.core.run.verdicts import RecordedRun
from harness.nights.cli.report import ANNOTATIONS, FOLDERS, JUNIT, MARKDOWN
from harness.nights.history import read_runs
from harness.nights.merged import find_problems, merge_outcomes, provenance_lines
from harness.nights.page import build_page, evidence_folder_by_case
from harness.nights.pages.junit import junit_xml
from harness.nights.pages.markdown import github_annotations, markdown_summary

BuildForm = Callable[[Sequence[RecordedRun], Sequence[Outcome]], str]


def write_page(recorded: Sequence[Path], folders: Sequence[Path], history: Sequence[Path], file: Path) -> int:
    """Write the HTML page, print its path, and return the worst exit code of the cases on it.

    recorded: folders, of which the last run counts. folders: of single cases. history: of earlier runs, if any. Skipped
    cases do not count; a case without a verdict counts as not judged. Raises BadInput if no page can be made of them.
    Raises EvidenceError if something else than a page lies there.
    """
    from harness.core.report.page import is_page, page_html  # jinja2 takes a twentieth of a second

    refuse_foreign_file(file, is_page)
    runs = read_last_runs(recorded)
    earlier, unread = read_runs(history) if history else ([], [])
    for line in unread:
        print_error(line)
    try:
        page = build_page(runs, folders, earlier, file)
    except ValueError as error:
        raise BadInput(str(error)) from error
    replace_own(file, page_html(page), is_page)
    print_lines(file)
    return worst_exit_code(page.outcomes, lacking=bool(runs and find_problems(runs)[0]))


def show_runs(args: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Print the grid of the last run of each folder, merged. Return the worst exit code; a case without a verdict counts as 2.

    Cases without a verdict and cases that ended more than once are listed. Raises BadInput for runs that cannot be
    merged.
    """
    runs, outcomes = _read_and_merge(folders)
    lacking, notes = find_problems(runs)
    notes = [*notes, *other_trainer_lines(run.begins.get("trainer", "") for run in runs)]
    grid = matrix_report(outcomes, None) if outcomes else "no case came to its end"
    data = {
        "outcomes": list(map(outcome_document, outcomes)),
        "lacking": lacking,
        "notes": [*provenance_lines(runs), *notes],
    }
    print_or_keep_document(args, "matrix", data, grid, "", *provenance_lines(runs), *lacking, *notes)
    return worst_exit_code(outcomes, lacking=bool(lacking))


def show_runs_as(folders: Sequence[Path], form: BuildForm) -> int:
    """Print the last run of each folder, merged, in a form for CI; nothing if that text is empty. Return the exit code.

    form: builds the text from runs and outcomes.
    """
    runs, outcomes = _read_and_merge(folders)
    if text := form(runs, outcomes):
        print_lines(text)
    return worst_exit_code(outcomes, lacking=bool(find_problems(runs)[0]))


def _read_and_merge(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[Outcome]]:
    """Return the last run of each folder, and the merged outcomes. Raises BadInput for runs that cannot be merged."""
    runs = read_last_runs(folders)
    try:
        return runs, merge_outcomes(runs)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _markdown_form(
    runs: Sequence[RecordedRun], outcomes: Sequence[Outcome], since: Mapping[str, str] | None = None
) -> str:
    """Return the Markdown summary of runs and their merged outcomes. since: by case, the commit that broke it."""
    lacking, notes = find_problems(runs)
    return markdown_summary(outcomes, provenance_lines(runs), [*lacking, *notes], since)


def markdown_of_runs(runs: Sequence[RecordedRun], since: Mapping[str, str]) -> str:
    """Return the Markdown summary of runs, merged. since: by case, the commit that broke it."""
    return _markdown_form(runs, merge_outcomes(runs), since)


def _annotations_form(_: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    return "\n".join(github_annotations(outcomes))


def _failed_folders_form(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    """Return the evidence folders of the cases that failed or could not be judged, one a line.

    Cases without a folder are left out.
    """
    places = evidence_folder_by_case(runs)
    failed = [str(places[outcome.case]) for outcome in outcomes if outcome.failed and outcome.case in places]
    return "\n".join(folder.replace("\n", "\\n") for folder in failed)  # a line a folder, whatever letters it has


def _junit_form(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    return junit_xml(outcomes, find_problems(runs)[0])


FORM_BUILDERS: dict[str, BuildForm] = {
    MARKDOWN: _markdown_form,
    ANNOTATIONS: _annotations_form,
    FOLDERS: _failed_folders_form,
    JUNIT: _junit_form,
}


def read_last_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Return the last run of each folder. Lines that cannot be read are printed.

    Raises EvidenceError if a folder has no run.
    """
    runs: list[RecordedRun] = []
    for folder in folders:
        run, unread = verdicts.last_run(folder)
        runs.append(run)
        for line in unread:
            print_error(line)
    return runs


def worst_exit_code(outcomes: Sequence[Outcome], *, lacking: bool) -> int:
    """Return the worst exit code of all cases that were not skipped; 2 if all were skipped.

    lacking: a case has no verdict, which counts as 2.
    """
    codes = [exit_code_of_verdict(outcome.verdict) for outcome in outcomes if not outcome.skipped]
    return worst_code([*codes, *([NOT_JUDGED] if lacking else [])])
