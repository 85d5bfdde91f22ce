"""`harness faults`: every deliberate mistake of the catalogue, and which laws catch it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst
from harness.cli.interrupt import abandon
from harness.cli.options import add_cases, add_command, add_how_to_run, add_jobs, cases_of, options_of
from harness.evidence.store import write_text
from harness.faults import Fault, all_faults, faults_of_file
from harness.faults.attempt import Attempt, Outcome, accepted, to_json
from harness.launch import machine, pool_of
from harness.report import catalogue as shown
from harness.report.output import say
from harness.report.progress import Progress
from harness.run import catalogue
from harness.run.selection import weight
from harness.spec import case_files


def add(commands: Any) -> None:
    parser = add_command(
        commands, "faults", command, "make every deliberate mistake of the catalogue: which are caught?"
    )
    add_cases(parser)
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help="words of name, case, bug, kind of bug and laws"
    )
    add_jobs(parser, "at a time at most; default as many as there are cores, on GPUs as slots allow")
    parser.add_argument(
        "--file", type=Path, metavar="FILE.py", help="a catalogue of your own in place of harness/faults"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the faults, and what each was named when last accepted"
    )
    parser.add_argument(
        "--laws-only", action="store_true", help="do not measure weaker tests, which takes half of the time"
    )
    add_how_to_run(parser)


def command(args: argparse.Namespace) -> int:
    """0: every fault caught as it should be. 1: one is not. 2: one never fired or was not tried, or the control fails."""
    chosen = catalogue.matching(faults_of_file(args.file) if args.file else all_faults(), args.expression)
    if args.list:
        say(shown.listing(chosen, accepted()))
        return PASSED
    done, control, seconds = tried(chosen, args)
    write_text(args.out / "faults.json", to_json(done))
    say(shown.report(done, control, seconds))
    return faults_code(done, control)


def tried(chosen: Sequence[Fault], args: argparse.Namespace) -> tuple[list[Attempt], Attempt, float]:
    """What became of each fault and of the control, and how many seconds all took."""
    usual = case_files.USUAL if args.file else case_files.OURS  # the catalogue is about the cases that it comes with
    cases, options, jobs = cases_of(args, usual), options_of(args, several_nodes=False), jobs_of(args.jobs, args.device)
    faults = [catalogue.control(), *chosen]
    needed = catalogue.needed(faults, cases)
    weights = {case.name: weight(case) for case in needed}
    progress = Progress(weights | {fault.name: weights[fault.case] for fault in faults}, sys.stderr)
    try:
        based = catalogue.baselines(needed, options, jobs=jobs, curves=not args.laws_only, progress=progress)
        control, *done = catalogue.attempts(faults, based, options, jobs=jobs, progress=progress)
    except KeyboardInterrupt:
        abandon(progress, "cases and faults")
    return done, control, progress.elapsed()


def jobs_of(told: int | None, device: str) -> int:
    """A cause is looked for on the core that ranks of others need, so there are no more faults at a time than cores."""
    return told or (len(pool_of(device).slots) + 1 if device == "cuda" else max(2, len(machine.cores())))


def faults_code(done: Sequence[Attempt], control: Attempt) -> int:
    unproven = {Outcome.UNFIRED, Outcome.NOT_TRIED}
    if control.outcome is not Outcome.MISSED:
        return NOT_JUDGED
    codes = {Outcome.CAUGHT: PASSED} | dict.fromkeys(unproven, NOT_JUDGED)
    return worst(codes.get(attempt.outcome, BROKEN) for attempt in done)
