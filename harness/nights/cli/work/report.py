"""`harness report PLACE`: what is stored there, shown. A look at the place decides what it is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import require_matplotlib
from harness.core.report.documents import case_document_here
from harness.core.report.output import print_lines
from harness.core.run.folders import find_case_folders
from harness.core.run.judging import judge_folder
from harness.nights.cli.work import history_report, run_report
from harness.nights.stored_kind import StoredKind, stored_kind_of
from harness.recording.cli.forms import CHROME
from harness.recording.cli.work import recording_report, trace_report

KINDS_BY_OPTION: Mapping[str, tuple[StoredKind, ...]] = {
    "as": (StoredKind.RUN, StoredKind.RECORDING),
    "html": (StoredKind.CASES, StoredKind.RUN, StoredKind.RECORDING, StoredKind.TRACES),
    "all": (StoredKind.RECORDING,),
    "layout": (StoredKind.RECORDING, StoredKind.TRACES),
    "gpu": (StoredKind.TRACES,),
    "nodes_of": (StoredKind.TRACES,),
    "quarantine": (StoredKind.HISTORY,),
}
"""Option -> the kinds of stored things that it is for."""


def command(args: argparse.Namespace) -> int:
    """Show what is stored in the places, by its kind, and return the exit code.

    Raises BadInput for places and options that do not belong together, or without a place.
    """
    shows_changes = bool(args.history) and not args.html
    kinds = {path: stored_kind_of(path) for path in args.places}
    if shows_changes:
        kinds = {path: StoredKind.HISTORY if kind is StoredKind.RUN else kind for path, kind in kinds.items()}
        kinds |= dict.fromkeys(args.history, StoredKind.HISTORY)
    if not kinds:
        raise BadInput("report: name what to show: a folder of a case, of a run, of a recording or of nights")
    _check_options(args, kinds)
    stored_kinds = set(kinds.values())
    if vars(args)["as"] == CHROME and stored_kinds == {StoredKind.RECORDING} and len(kinds) == 1:
        return recording_report.export_recording(args, args.places[0])
    if stored_kinds == {StoredKind.HISTORY}:
        return history_report.show_history(args, list(kinds), args.quarantine)
    if stored_kinds == {StoredKind.RECORDING} and len(kinds) == 1:
        return recording_report.show_recording(args, args.places[0], args.layout, whole=args.all, file=args.html)
    if stored_kinds == {StoredKind.TRACES}:
        return trace_report.show_traces(args, args.places, args.layout)
    if stored_kinds == {StoredKind.DUMPS}:
        return trace_report.show_dumps(args, args.places)
    if stored_kinds <= {StoredKind.CASES, StoredKind.RUN}:
        cases = [path for path, kind in kinds.items() if kind is StoredKind.CASES]
        return _show_runs_and_cases(args, [path for path in kinds if path not in cases], cases)
    places_text = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
    raise BadInput(f"report: these are not shown together: {places_text}")


def _check_options(args: argparse.Namespace, kinds: Mapping[Path, StoredKind]) -> None:
    """Raise BadInput for an option that is for another kind of place, or that needs or excludes another. kinds: by place."""
    for option, allowed_kinds in KINDS_BY_OPTION.items():
        wrong_path = next((path for path, kind in kinds.items() if kind not in allowed_kinds), None)
        if wrong_path and vars(args)[option]:
            raise BadInput(
                f"--{option.replace('_', '-')}: it is for {' or '.join(allowed_kinds)}, "
                f"and {wrong_path} holds {kinds[wrong_path]}"
            )
    if args.nodes_of and not args.gpu:
        raise BadInput("--nodes-of needs --gpu, whose links are compared")
    if args.all and args.json:
        raise BadInput("--all cannot be combined with --json, which has every line")
    kinds_of_a_page = {StoredKind.CASES, StoredKind.RUN}
    if args.history and args.html:
        wrong_path = next((path for path, kind in kinds.items() if kind not in kinds_of_a_page), None)
        if wrong_path:
            raise BadInput(
                f"--history: it is for a page of {' or '.join(sorted(kinds_of_a_page))}, "
                f"and {wrong_path} holds {kinds[wrong_path]}"
            )
    form = vars(args)["as"]
    recorded = StoredKind.RECORDING in kinds.values()
    if form and recorded != (form == CHROME):
        raise BadInput(f"--as {form}: it is for {StoredKind.RUN if recorded else StoredKind.RECORDING}")


def _show_runs_and_cases(args: argparse.Namespace, runs: Sequence[Path], cases: Sequence[Path]) -> int:
    """Print or write runs and folders of cases, as --html, --as and --json say. Return the exit code.

    Raises BadInput for options that cannot be combined.
    """
    form = run_report.FORM_BUILDERS.get(vars(args)["as"])
    if args.html and form:
        raise BadInput("--as and --html cannot be combined")
    if args.json and (args.html or form or (runs and cases)):
        raise BadInput("--json works on runs or case folders, and cannot be combined with --as or --html")
    if args.html:
        return run_report.write_page(runs, cases, args.history, args.html)
    if form:
        return run_report.show_runs_as(runs, form)
    if cases:
        draw_case_pictures(args, cases)
    return run_report.show_runs(args, runs) if runs else PASSED


def draw_case_pictures(args: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Judge the cases in the folders, write picture.png beside each one's evidence, and print its path.

    With --json also keep a document "cases" for main to print. folders: of a case, or of several. Raises BadInput without
    matplotlib. Raises EvidenceError if a case cannot be read, a rank left no evidence, or another picture.png is there.
    """
    require_matplotlib()
    from harness.nights.pages.pictures import draw_judged  # matplotlib takes half a second

    cases = []
    for folder in find_case_folders(folders):
        judgement = judge_folder(folder)
        cases.append(case_document_here(judgement) | {"picture": draw_judged(judgement)})
        print_lines(cases[-1]["picture"])
    print_or_keep_document(args, "cases", {"cases": cases})
