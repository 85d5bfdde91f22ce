"""Recorded runs: their verdicts merged, as the grid that they printed, as a page, or in forms for CI."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import NOT_JUDGED, worst
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import other_trainers
from harness.core.cli.work.verdict_codes import code_of
from harness.core.evidence.own_folders import refuse_foreign_file, replace_own
from harness.core.report.grid import matrix_report
from harness.core.report.outcome import Outcome, as_document
from harness.core.report.output import complain, say
from harness.core.run import verdicts
from harness.core.run.verdicts import RecordedRun
from harness.nights.cli.report import ANNOTATIONS, FOLDERS, JUNIT, MARKDOWN
from harness.nights.history import runs_in
from harness.nights.merged import merged, problems, provenance
from harness.nights.page import page_of, places_of
from harness.nights.pages.junit import junit
from harness.nights.pages.markdown import annotated, markdown

Form = Callable[[Sequence[RecordedRun], Sequence[Outcome]], str]


def write_page(recorded: Sequence[Path], folders: Sequence[Path], history: Sequence[Path], file: Path) -> int:
    """Write the page. Return the exit code of the cases on it."""
    from harness.core.report.page import html, is_page  # jinja2 takes a twentieth of a second

    refuse_foreign_file(file, is_page)
    runs = last_runs(recorded)
    earlier, unread = runs_in(history) if history else ([], [])
    for line in unread:
        complain(line)
    try:
        page = page_of(runs, folders, earlier, file)
    except ValueError as error:
        raise BadInput(str(error)) from error
    replace_own(file, html(page), is_page)
    say(file)
    return code_of_all(page.outcomes, lacking=bool(runs and problems(runs)[0]))


def show(args: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Print the last run of each folder as one run.

    A case without a verdict is listed, and so is a case that several runs have. The first is never green.
    """
    runs, outcomes = _merged(folders)
    lacking, notes = problems(runs)
    notes = [*notes, *other_trainers(run.begins.get("trainer", "") for run in runs)]
    grid = matrix_report(outcomes, None) if outcomes else "no case came to its end"
    data = {"outcomes": list(map(as_document, outcomes)), "lacking": lacking, "notes": [*provenance(runs), *notes]}
    answer(args, "matrix", data, grid, "", *provenance(runs), *lacking, *notes)
    return code_of_all(outcomes, lacking=bool(lacking))


def show_as(folders: Sequence[Path], form: Form) -> int:
    """Print the last run of each folder as one run, in a form for CI. Return the exit code."""
    runs, outcomes = _merged(folders)
    if text := form(runs, outcomes):
        say(text)
    return code_of_all(outcomes, lacking=bool(problems(runs)[0]))


def _merged(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[Outcome]]:
    """Return the runs and their cases' outcomes. Raises BadInput for runs that cannot be one."""
    runs = last_runs(folders)
    try:
        return runs, merged(runs)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _markdown(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome], since: Mapping[str, str] | None = None) -> str:
    lacking, notes = problems(runs)
    return markdown(outcomes, provenance(runs), [*lacking, *notes], since)


def shown_as_markdown(runs: Sequence[RecordedRun], since: Mapping[str, str]) -> str:
    """Return the summary. since: by case, the commit that broke it."""
    return _markdown(runs, merged(runs), since)


def _annotations(_: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    return "\n".join(annotated(outcomes))


def _folders(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    """Return the evidence folders of the cases that are not green, one a line."""
    places = places_of(runs)
    failed = [str(places[outcome.case]) for outcome in outcomes if outcome.failed and outcome.case in places]
    return "\n".join(folder.replace("\n", "\\n") for folder in failed)  # a line a folder, whatever letters it has


def _junit(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    return junit(outcomes, problems(runs)[0])


MADE: dict[str, Form] = {MARKDOWN: _markdown, ANNOTATIONS: _annotations, FOLDERS: _folders, JUNIT: _junit}


def last_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Return the last run of each folder."""
    runs: list[RecordedRun] = []
    for folder in folders:
        run, unread = verdicts.last(folder)
        runs.append(run)
        for line in unread:
            complain(line)
    return runs


def code_of_all(outcomes: Sequence[Outcome], *, lacking: bool) -> int:
    """Return the worst exit code of all cases, but those that were skipped. lacking: a case has no verdict."""
    codes = [code_of(outcome.verdict) for outcome in outcomes if not outcome.skipped]
    return worst([*codes, *([NOT_JUDGED] if lacking else [])])
