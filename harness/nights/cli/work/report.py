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
    """Raises BadInput for places and options that do not belong together."""
    changes = bool(args.history) and not args.html
    kinds = {place: kind_of(place) for place in args.places}
    if changes:
        kinds = {place: Kind.HISTORY if kind is Kind.RUN else kind for place, kind in kinds.items()}
        kinds |= dict.fromkeys(args.history, Kind.HISTORY)
    if not kinds:
        raise BadInput("report: name what to show: a folder of a case, of a run, of a recording or of nights")
    _check_options(args, kinds)
    found = set(kinds.values())
    if vars(args)["as"] == CHROME and found == {Kind.RECORDING} and len(kinds) == 1:
        return recording_report.exported(args, args.places[0])
    if found == {Kind.HISTORY}:
        return history_report.shown(args, list(kinds), args.quarantine)
    if found == {Kind.RECORDING} and len(kinds) == 1:
        return recording_report.shown(args, args.places[0], args.layout, whole=args.all, file=args.html)
    if found == {Kind.TRACES}:
        return trace_report.shown(args, args.places, args.layout)
    if found == {Kind.DUMPS}:
        return trace_report.shown_dumps(args, args.places)
    if found <= {Kind.CASES, Kind.RUN}:
        cases = [place for place, kind in kinds.items() if kind is Kind.CASES]
        return _of_runs_and_cases(args, [place for place in kinds if place not in cases], cases)
    of = ", ".join(f"{place} ({kind})" for place, kind in kinds.items())
    raise BadInput(f"report: these are not shown together: {of}")


def _check_options(args: argparse.Namespace, kinds: Mapping[Path, Kind]) -> None:
    """Raises BadInput for an option that is for another kind of place."""
    for option, of in FOR.items():
        wrong = next((place for place, kind in kinds.items() if kind not in of), None)
        if wrong and vars(args)[option]:
            raise BadInput(
                f"--{option.replace('_', '-')}: it is for {' or '.join(of)}, and {wrong} holds {kinds[wrong]}"
            )
    if args.nodes_of and not args.gpu:
        raise BadInput("--nodes-of: it is of --gpu, whose links are compared")
    if args.all and args.json:
        raise BadInput("--all: leave it out; the document of --json has every line")
    paged = {Kind.CASES, Kind.RUN}
    if args.history and args.html and (wrong := next((at for at, kind in kinds.items() if kind not in paged), None)):
        raise BadInput(f"--history: it is for a page of {' or '.join(sorted(paged))}, and {wrong} holds {kinds[wrong]}")
    form, recorded = vars(args)["as"], Kind.RECORDING in kinds.values()
    if form and recorded != (form == CHROME):
        raise BadInput(f"--as {form}: it is for {Kind.RUN if recorded else Kind.RECORDING}")


def _of_runs_and_cases(args: argparse.Namespace, runs: Sequence[Path], cases: Sequence[Path]) -> int:
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
