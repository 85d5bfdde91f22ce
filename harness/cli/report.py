"""`harness report`: stored evidence as a picture, recorded runs as the grid that they printed; several are merged."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import NOT_JUDGED, PASSED, code_of, worst
from harness.cli.options import BadInput, add_command, needs_matplotlib
from harness.report.grid import matrix_report
from harness.report.output import complain, say
from harness.run import verdicts
from harness.run.folders import case_folders
from harness.run.judging import judge_folder
from harness.run.merged import merged, problems, provenance
from harness.run.verdicts import RecordedRun


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


def command(args: argparse.Namespace) -> int:
    runs = [folder for folder in args.folders if verdicts.file_in(folder)]
    drawn = [folder for folder in args.folders if folder not in runs]
    if drawn:
        draw(drawn)
    return show(runs) if runs else PASSED


def draw(folders: Sequence[Path]) -> None:
    """A picture beside each folder's evidence. Needs all ranks' evidence: a rank that left none has nothing to show."""
    needs_matplotlib()
    from harness.report.pictures import draw_judged  # matplotlib takes half a second

    for folder in case_folders(folders):
        say(draw_judged(judge_folder(folder)))


def show(folders: Sequence[Path]) -> int:
    """The last run of each, as one. What has no verdict, and what was counted once of several, is said and is not green."""
    runs: list[RecordedRun] = []
    for folder in folders:
        run, unread = verdicts.last(folder)
        runs.append(run)
        for line in unread:
            complain(line)
    try:
        outcomes = merged(runs)
    except ValueError as error:
        raise BadInput(str(error)) from error
    lacking, told = problems(runs)
    say(
        matrix_report(outcomes, None) if outcomes else "no case came to its end", "", *provenance(runs), *lacking, *told
    )
    codes = [code_of(outcome.verdict) for outcome in outcomes if not outcome.skipped]
    return worst([*codes, *([NOT_JUDGED] if lacking else [])])
