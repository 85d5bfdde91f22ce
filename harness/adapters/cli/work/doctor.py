"""`harness doctor`: a trainer's adapter, examined: one rank first, then two, with a sentence for whatever is wrong."""

from __future__ import annotations

import argparse
import shlex

from harness.adapters.onboarding.examination import Examination, examine
from harness.core.case.case import Case
from harness.core.case.usual_trainer import Usual
from harness.core.case.variants import in_dtype
from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import BROKEN, INTERRUPTED, NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import options_of, usual
from harness.core.judge import golden
from harness.core.judge.result import Verdict
from harness.core.report.documents import case_here
from harness.core.report.output import complain, say
from harness.core.report.text import wrapped
from harness.core.run.selection import matching

MOST_RANKS = 2
CODES = {Verdict.FAIL: BROKEN, Verdict.UNKNOWN: NOT_JUDGED, Verdict.PASS: PASSED}


def command(args: argparse.Namespace) -> int:
    lines: list[dict[str, str]] = []

    def tell(label: str, text: str) -> None:
        """Print the line at once, for ranks take their time."""
        lines.append({"label": label, "text": text})
        tell_line(label, text)

    why = "" if args.trainer else f", {_of_this_repository().because}"
    cases = _small_ones(args)
    options = options_of(args)
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
        complain(args.failed)
        return INTERRUPTED
    closing_lines = _then(examination, cases, args)
    data = {"trainer": options.trainer, "judged": examination.judged, "lines": lines, "then": closing_lines[1:]}
    answer(args, "doctor", data | {"cases": list(map(case_here, examination.judgements))}, *closing_lines)
    return max((CODES[verdict] for verdict in examination.judged.values()), default=NOT_JUDGED)


def _of_this_repository() -> Usual:
    """Return the trainer if none was typed. Raises BadInput if there is only the harness's own, which needs no doctor."""
    trainer = usual()
    if not trainer.because:
        raise BadInput(
            "--trainer: this folder has no *_adapter.py, nor adapter.py; `harness init train.py` begins one, or name yours"
        )
    return trainer


def _small_ones(args: argparse.Namespace) -> list[Case]:
    """On one rank and on two; where no case has so few, the smallest. Raises CaseError where none is selected."""
    chosen = [in_dtype(case, args.dtype) for case in matching(cases_of(args), args.expression)]
    smallest = min(chosen, key=lambda case: case.dims.world_size)
    return [case for case in chosen if case.dims.world_size <= MOST_RANKS] or [smallest]


def tell_line(label: str, text: str) -> None:
    first, *others = wrapped(text, " " * 16) or [" " * 16]
    say(f"{label:<14}  {first.lstrip()}", *others)


def _then(examination: Examination, cases: list[Case], args: argparse.Namespace) -> list[str]:
    if not examination.stopped and all(verdict is Verdict.PASS for verdict in examination.judged.values()):
        matrix_command = shlex.join(["harness", "matrix", *_as_typed(args)])
        return [
            "",
            f"all is well in {', '.join(examination.judged)}; all cases: {matrix_command}",
            *_goldens(examination),
        ]
    not_run = [case.name for case in cases if case.name not in examination.judged]
    return ["", f"not run after this: {', '.join(not_run)}"] if not_run else []


def _as_typed(args: argparse.Namespace) -> list[str]:
    """Return the options of `doctor` that a longer command needs as well, as they were typed."""
    values_by_option = {"--trainer": args.trainer, "--cases": args.cases, "--dtype": args.dtype}
    words = []
    for option, value in values_by_option.items():
        if value:
            words += [option, value]
    return words


def _goldens(examination: Examination) -> list[str]:
    """`matrix` judges by accepted curves as well, and ends as not judged without them."""
    accept = {golden.accept_command(case) for case in examination.unaccepted}
    return [f"before that, for its check `golden`: {command}; review what it writes" for command in sorted(accept)]
