"""`harness report PLACE`: what is stored there, shown. A look at the place decides what it is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import needs_matplotlib
from harness.core.report.documents import case_here
from harness.core.report.output import say
from harness.core.run.folders import case_folders
from harness.core.run.judging import judge_folder
from harness.nights.cli.work import history_report, run_report
from harness.nights.stored_kind import Kind, kind_of
from harness.recording.cli.forms import CHROME
from harness.recording.cli.work import recording_report, trace_report

FOR: Mapping[str, tuple[Kind, ...]] = {
    "as": (Kind.RUN, Kind.RECORDING),
    "html": (Kind.CASES, Kind.RUN, Kind.RECORDING, Kind.TRACES),
    "all": (Kind.RECORDING,),
    "layout": (Kind.RECORDING, Kind.TRACES),
    "gpu": (Kind.TRACES,),
    "nodes_of": (Kind.TRACES,),
    "quarantine": (Kind.HISTORY,),
}
"""Option -> the kinds of stored things that it is for."""


def command(args: argparse.Namespace) -> int:
    """Show what is stored in the places. Return the exit code.

    Raises BadInput for places and options that do not belong together.
    """
    shows_changes = bool(args.history) and not args.html
    kinds = {path: kind_of(path) for path in args.places}
    if shows_changes:
        kinds = {path: Kind.HISTORY if kind is Kind.RUN else kind for path, kind in kinds.items()}
        kinds |= dict.fromkeys(args.history, Kind.HISTORY)
    if not kinds:
        raise BadInput("report: name what to show: a folder of a case, of a run, of a recording or of nights")
    _check_options(args, kinds)
    stored_kinds = set(kinds.values())
    if vars(args)["as"] == CHROME and stored_kinds == {Kind.RECORDING} and len(kinds) == 1:
        return recording_report.exported(args, args.places[0])
    if stored_kinds == {Kind.HISTORY}:
        return history_report.shown(args, list(kinds), args.quarantine)
    if stored_kinds == {Kind.RECORDING} and len(kinds) == 1:
        return recording_report.shown(args, args.places[0], args.layout, whole=args.all, file=args.html)
    if stored_kinds == {Kind.TRACES}:
        return trace_report.shown(args, args.places, args.layout)
    if stored_kinds == {Kind.DUMPS}:
        return trace_report.shown_dumps(args, args.places)
    if stored_kinds <= {Kind.CASES, Kind.RUN}:
        cases = [path for path, kind in kinds.items() if kind is Kind.CASES]
        return _of_runs_and_cases(args, [path for path in kinds if path not in cases], cases)
    places_text = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
    raise BadInput(f"report: these are not shown together: {places_text}")


def _check_options(args: argparse.Namespace, kinds: Mapping[Path, Kind]) -> None:
    """Raise BadInput for an option that is for another kind of place."""
    for option, allowed_kinds in FOR.items():
        wrong_path = next((path for path, kind in kinds.items() if kind not in allowed_kinds), None)
        if wrong_path and vars(args)[option]:
            raise BadInput(
                f"--{option.replace('_', '-')}: it is for {' or '.join(allowed_kinds)}, "
                f"and {wrong_path} holds {kinds[wrong_path]}"
            )
    if args.nodes_of and not args.gpu:
        raise BadInput("--nodes-of: it is of --gpu, whose links are compared")
    if args.all and args.json:
        raise BadInput("--all: leave it out; the document of --json has every line")
    kinds_of_a_page = {Kind.CASES, Kind.RUN}
    if args.history and args.html:
        wrong_path = next((path for path, kind in kinds.items() if kind not in kinds_of_a_page), None)
        if wrong_path:
            raise BadInput(
                f"--history: it is for a page of {' or '.join(sorted(kinds_of_a_page))}, "
                f"and {wrong_path} holds {kinds[wrong_path]}"
            )
    form = vars(args)["as"]
    recorded = Kind.RECORDING in kinds.values()
    if form and recorded != (form == CHROME):
        raise BadInput(f"--as {form}: it is for {Kind.RUN if recorded else Kind.RECORDING}")


def _of_runs_and_cases(args: argparse.Namespace, runs: Sequence[Path], cases: Sequence[Path]) -> int:
    """Show runs and folders of cases, as the options say. Return the exit code."""
    form = run_report.MADE.get(vars(args)["as"])
    if args.html and form:
        raise BadInput("--as: leave it out, or --html")
    if args.json and (args.html or form or (runs and cases)):
        raise BadInput("--json: it is of recorded runs or of folders of cases, and without --as or --html")
    if args.html:
        return run_report.write_page(runs, cases, args.history, args.html)
    if form:
        return run_report.show_as(runs, form)
    if cases:
        draw(args, cases)
    return run_report.show(args, runs) if runs else PASSED


def draw(args: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Draw a picture beside each folder's evidence. It needs the evidence of all ranks."""
    needs_matplotlib()
    from harness.nights.pages.pictures import draw_judged  # matplotlib takes half a second

    cases = []
    for folder in case_folders(folders):
        judgement = judge_folder(folder)
        cases.append(case_here(judgement) | {"picture": draw_judged(judgement)})
        say(cases[-1]["picture"])
    answer(args, "cases", {"cases": cases})
