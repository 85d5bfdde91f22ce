"""`harness report`: stored evidence as a picture, recorded runs, merged, as the grid that they printed or as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import NOT_JUDGED, PASSED, code_of, worst
from harness.cli.options import BadInput, add_command, needs_matplotlib, other_trainers
from harness.evidence.store import write_text
from harness.report.documents import case_here
from harness.report.grid import matrix_report
from harness.report.markdown import annotated, markdown
from harness.report.outcome import Outcome, as_document
from harness.report.output import complain, say
from harness.run import verdicts
from harness.run.folders import case_folders
from harness.run.history import runs_in
from harness.run.judging import judge_folder
from harness.run.merged import merged, problems, provenance
from harness.run.page import page_of, places_of
from harness.run.verdicts import RecordedRun

Form = Callable[[Sequence[RecordedRun], Sequence[Outcome]], str]


def add(commands: Any) -> None:
    parser = add_command(
        commands, "report", command, "draw stored evidence, or show the verdicts of recorded runs, shards merged"
    )
    parser.add_argument(
        "folders",
        metavar="DIR",
        nargs="+",
        type=Path,
        help="of a case: a picture of who holds what, which groups moved what, losses; of `harness matrix`: its last run",
    )
    parser.add_argument(
        "--as",
        dest="form",
        choices=("text", *FORMS),
        default="text",
        help="of recorded runs: for the summary of a CI job, as GitHub's annotations, or the folders of what is not green",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="all of it as one page for a browser, instead")
    parser.add_argument(
        "--history",
        type=Path,
        metavar="DIR",
        action="append",
        help="earlier verdicts.jsonl, which the page shows by case",
    )


def command(args: argparse.Namespace) -> int:
    runs = [folder for folder in args.folders if verdicts.file_in(folder)]
    drawn = [folder for folder in args.folders if folder not in runs]
    if args.history and not args.html:
        raise BadInput("--history: it is for --html; `harness history` tells what changed")
    if args.json and (args.html or args.form != "text" or (runs and drawn)):
        raise BadInput("--json: it is of recorded runs or of folders of cases, and without --as or --html")
    if args.form != "text":
        if drawn or args.html:
            raise BadInput(f"--as {args.form}: it is of recorded runs, and without --html")
        return show_as(runs, FORMS[args.form])
    if args.html:
        return write_page(runs, drawn, args.history or [], args.html)
    if drawn:
        draw(args, drawn)
    return show(args, runs) if runs else PASSED


def draw(args: argparse.Namespace, folders: Sequence[Path]) -> None:
    """A picture beside each folder's evidence. Needs all ranks' evidence: a rank that left none has nothing to show."""
    needs_matplotlib()
    from harness.report.pictures import draw_judged  # matplotlib takes half a second

    cases = []
    for folder in case_folders(folders):
        judgement = judge_folder(folder)
        cases.append(case_here(judgement) | {"picture": draw_judged(judgement)})
        say(cases[-1]["picture"])
    answer(args, "cases", {"cases": cases})


def write_page(recorded: Sequence[Path], folders: Sequence[Path], history: Sequence[Path], file: Path) -> int:
    """The exit code is that of the cases on it."""
    from harness.report.page import html  # jinja2 takes a twentieth of a second

    runs = last_runs(recorded)
    earlier, unread = runs_in(history) if history else ([], [])
    for line in unread:
        complain(line)
    try:
        page = page_of(runs, folders, earlier, file)
    except ValueError as error:
        raise BadInput(str(error)) from error
    write_text(file, html(page))
    say(file)
    return code_of_all(page.outcomes, lacking=bool(runs and problems(runs)[0]))


def show(args: argparse.Namespace, folders: Sequence[Path]) -> int:
    """The last run of each, as one. What has no verdict, and what was counted once of several, is said and is not green."""
    runs = last_runs(folders)
    try:
        outcomes = merged(runs)
    except ValueError as error:
        raise BadInput(str(error)) from error
    lacking, told = problems(runs)
    told = [*told, *other_trainers(run.begins.get("trainer", "") for run in runs)]
    grid = matrix_report(outcomes, None) if outcomes else "no case came to its end"
    data = {"outcomes": list(map(as_document, outcomes)), "lacking": lacking, "notes": [*provenance(runs), *told]}
    answer(args, "matrix", data, grid, "", *provenance(runs), *lacking, *told)
    return code_of_all(outcomes, lacking=bool(lacking))


def show_as(folders: Sequence[Path], form: Form) -> int:
    runs = last_runs(folders)
    try:
        outcomes = merged(runs)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if text := form(runs, outcomes):
        say(text)
    return code_of_all(outcomes, lacking=bool(problems(runs)[0]))


def _markdown(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome], since: Mapping[str, str] | None = None) -> str:
    lacking, told = problems(runs)
    return markdown(outcomes, provenance(runs), [*lacking, *told], since)


def shown_as_markdown(runs: Sequence[RecordedRun], since: Mapping[str, str]) -> str:
    """since: by case, the commit that broke it."""
    return _markdown(runs, merged(runs), since)


def _annotations(_: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    return "\n".join(annotated(outcomes))


def _folders(runs: Sequence[RecordedRun], outcomes: Sequence[Outcome]) -> str:
    places = places_of(runs)
    return "\n".join(str(places[one.case]) for one in outcomes if one.failed and one.case in places)


FORMS: dict[str, Form] = {"markdown": _markdown, "annotations": _annotations, "folders": _folders}


def last_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """The last of each."""
    runs: list[RecordedRun] = []
    for folder in folders:
        run, unread = verdicts.last(folder)
        runs.append(run)
        for line in unread:
            complain(line)
    return runs


def code_of_all(outcomes: Sequence[Outcome], *, lacking: bool) -> int:
    codes = [code_of(outcome.verdict) for outcome in outcomes if not outcome.skipped]
    return worst([*codes, *([NOT_JUDGED] if lacking else [])])
