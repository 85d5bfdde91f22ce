"""`harness doctor`: a trainer's adapter, examined: one rank first, then two, with a sentence for whatever is wrong."""

from __future__ import annotations

import argparse
import shlex

from harness.adapters.onboarding.examination import Examination, examine
from harness.core.case.case import Case
from harness.core.case.usual_trainer import DefaultTrainer
from harness.core.case.variants import with_dtype
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, INTERRUPTED, NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import default_trainer_or_refuse, run_options_of
from harness.core.judge import golden
from harness.core.judge.result import Verdict
from harness.core.report.documents import case_document_here
from harness.core.report.output import print_error, print_lines
from harness.core.report.text import wrap_text
from harness.core.run.selection import select_matching

MOST_RANKS = 2
CODES = {Verdict.FAIL: BROKEN, Verdict.UNKNOWN: NOT_JUDGED, Verdict.PASS: PASSED}


def command(args: argparse.Namespace) -> int:
    """Examine the adapter on cases of one and two ranks, and print a line for each thing found.

    It ends at the first case that fails. Return 0 if all judged cases pass, 1 if the last one fails, 2 if it could not
    be judged. Return 130 if a person interrupts it after a first verdict. Raises BadInput.
    """
    lines: list[dict[str, str]] = []

    def tell(label: str, text: str) -> None:
        """Print the line at once, for ranks take their time, and keep it for the JSON."""
        lines.append({"label": label, "text": text})
        tell_line(label, text)

    why = "" if args.trainer else f", {_usual_trainer().reason}"
    cases = _small_cases(args)
    options = run_options_of(args)
    judged = dict[str, Verdict]()
    tell("adapter", f"{options.trainer} loads{why}")
    if (ranks := cases[0].dims.world_size) > MOST_RANKS:
        tell("cases", f"none of one or two ranks; the smallest has {ranks}: {cases[0].name}")
    try:
        examination = examine(cases, options, tell, judged)
    except KeyboardInterrupt as stop:
        if not judged:
            raise
        ended = ", ".join(f"{case} {verdict}" for case, verdict in judged.items())
        first = f"interrupted after {len(judged)} of {len(cases)} cases ({ended}); the ranks are killed"
        args.failed = "\n  ".join([first, *map(str, stop.args)])
        print_error(args.failed)
        return INTERRUPTED
    closing_lines = _closing_text(examination, cases, args)
    data = {"trainer": options.trainer, "judged": examination.judged, "lines": lines, "then": closing_lines[1:]}
    print_or_keep_document(
        args, "doctor", data | {"cases": list(map(case_document_here, examination.judgements))}, *closing_lines
    )
    return max((CODES[verdict] for verdict in examination.judged.values()), default=NOT_JUDGED)


def _usual_trainer() -> DefaultTrainer:
    """Return the adapter file that is used if no --trainer was typed. Raises BadInput if there is none in this folder.

    The harness' own trainer needs no doctor.
    """
    trainer = default_trainer_or_refuse()
    if not trainer.reason:
        raise BadInput(
            "--trainer: no *_adapter.py or adapter.py in this folder;"
            " `harness init train.py` writes one, or pass --trainer FILE.py"
        )
    return trainer


def _small_cases(args: argparse.Namespace) -> list[Case]:
    """Return the selected cases of one and two ranks, in the requested dtype; if there are none so small, the smallest one.

    Raises CaseError if none is selected.
    """
    chosen = [with_dtype(case, args.dtype) for case in select_matching(cases_of(args), args.expression)]
    smallest = min(chosen, key=lambda case: case.dims.world_size)
    return [case for case in chosen if case.dims.world_size <= MOST_RANKS] or [smallest]


def tell_line(label: str, text: str) -> None:
    """Print a label and a sentence beside it, wrapped."""
    first, *others = wrap_text(text, " " * 16) or [" " * 16]
    print_lines(f"{label:<14}  {first.lstrip()}", *others)


def _closing_text(examination: Examination, cases: list[Case], args: argparse.Namespace) -> list[str]:
    """Return the lines printed last: the command for all cases if all judged ones pass, else which cases were not run.

    Empty if nothing is left to say.
    """
    if not examination.stopped and all(verdict is Verdict.PASS for verdict in examination.judged.values()):
        matrix_command = shlex.join(["harness", "matrix", *_typed_options(args)])
        return [
            "",
            f"all is well in {', '.join(examination.judged)}; all cases: {matrix_command}",
            *_golden_lines(examination),
        ]
    not_run = [case.name for case in cases if case.name not in examination.judged]
    return ["", f"not run after this: {', '.join(not_run)}"] if not_run else []


def _typed_options(args: argparse.Namespace) -> list[str]:
    """Return the options of `doctor` that a longer command needs as well, as they were typed."""
    values_by_option = {"--trainer": args.trainer, "--cases": args.cases, "--dtype": args.dtype}
    words = []
    for option, value in values_by_option.items():
        if value:
            words += [option, value]
    return words


def _golden_lines(examination: Examination) -> list[str]:
    """Return a line with the command that accepts a reference's curve, for each case that has none.

    Without one `matrix` cannot pass.
    """
    accept = {golden.accept_command(case) for case in examination.unaccepted}
    return [f"before that, for its check `golden`: {command}; review what it writes" for command in sorted(accept)]
