"""`harness faults`: every deliberate mistake of the catalogue, and which checks catch it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import faults
from harness.core import trainers
from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.usual_trainer import BUILTIN_TRAINER
from harness.core.case.variants import with_dtype
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.abandoning import abandon
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import refuse_json, refuse_others, run_options_of, trainer_under_test
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.store import write_text
from harness.core.launch import machine, slot_pool
from harness.core.report.output import print_lines
from harness.core.report.progress import Progress
from harness.core.run.selection import count_processes
from harness.faults import Fault, all_faults, faults_of_file
from harness.faults import catalogue_text as shown
from harness.faults import run_catalogue as catalogue
from harness.faults.attempt import Attempt, Outcome, accepted_attempts, attempts_to_json, is_attempts


def command(args: argparse.Namespace) -> int:
    """Run `harness faults`: list the faults, or try them, write OUT/faults.json and print the report. Return the exit code.

        0  every fault is caught as expected, or --list
        1  some fault is not
        2  some fault never fired or was not tried, or the control fails

    Raises BadInput, FaultError and CaseError.
    """
    args.trainer = args.trainer or (trainer_under_test(args) if args.file else BUILTIN_TRAINER)
    own_file = Path(faults.__file__).parent / f"{args.trainer}.py"
    file = args.file or (own_file if own_file.is_file() else None)
    control, every_fault = catalogue.split_control(faults_of_file(file) if file else all_faults())
    chosen = catalogue.select_faults(every_fault, args.expression)
    if args.list:
        refuse_json(args, "--list")
        refuse_others(args, "a list of faults", {"--list", "-k", "--file", "--trainer"})
        print_lines(shown.faults_text(chosen, accepted_attempts()))
        return PASSED
    if args.file and not args.cases and (trainer := _trainer_with_cases(args.file)):
        raise BadInput(
            f"--file {args.file}: mistakes in {trainer}, on cases of its own; `harness faults --trainer {trainer}` takes both"
        )
    refuse_foreign_file(args.out / "faults.json", is_attempts)
    done, control_done, seconds = try_faults(chosen, control, args)
    write_text(args.out / "faults.json", attempts_to_json(done))
    data = {"seconds": seconds, "control": control_done, "attempts": done}
    print_or_keep_document(args, "faults", data, shown.report_text(done, control_done, seconds))
    return exit_code_of_attempts(done, control_done)


def _trainer_with_cases(file: Path) -> str:
    """Return the trainer whose catalogue in the harness this file is. Empty for any other file.

    Such a trainer has cases of its own.
    """
    is_own_catalogue = file.resolve().parent == Path(faults.__file__).parent
    return file.stem if is_own_catalogue and file.stem in trainers.trainer_modules() else ""


def cases_to_break(args: argparse.Namespace) -> list[Case]:
    """Return the cases on which faults can be tried: the harness's and those of the trainer's adapter.

    With --file they are those of the user's folder, or of --cases. A case in a dtype that the trainer cannot compute in
    gets the trainer's first one. Raises CaseError.
    """
    cases = cases_of(args, case_files.CASES_FOLDER if args.file else case_files.BUILTIN_WORD)
    folder = trainers.folder_of_cases(args.trainer)
    if not (args.file or args.cases) and folder is not None:
        cases += load_all(folder)
    dtypes = trainers.load_adapter(args.trainer).dtypes
    return [case if case.training.dtype in dtypes else with_dtype(case, dtypes[0]) for case in cases]


def try_faults(
    chosen: Sequence[Fault], control: Fault, args: argparse.Namespace
) -> tuple[list[Attempt], Attempt, float]:
    """Run the baselines, then try each fault and the control. Return (attempts, the control's attempt, seconds for all).

    Draws progress on stderr. An interruption ends the process.
    """
    options = run_options_of(args, several_nodes=False)
    jobs = count_jobs(args.jobs, args.device)
    faults_and_control = [control, *chosen]
    needed = catalogue.cases_of_faults(faults_and_control, cases_to_break(args))
    weights = {case.name: count_processes(case) for case in needed}
    progress = Progress(weights | {fault.name: weights[fault.case] for fault in faults_and_control}, sys.stderr)
    try:
        baselines_by_case = catalogue.run_baselines(
            needed, options, jobs=jobs, curves=not args.checks_only, progress=progress
        )
        control_done, *done = catalogue.try_all(
            faults_and_control, baselines_by_case, options, jobs=jobs, progress=progress
        )
    except KeyboardInterrupt:
        abandon(progress, "cases and faults")
    return done, control_done, progress.elapsed_seconds()


def count_jobs(requested: int | None, device: str) -> int:
    """Return how many faults are tried at a time: as requested, else one more than slots on GPUs, else the cores, at least two.

    A cause is looked for on a core that ranks of other faults need, so there are no more faults at a time than cores.
    """
    if requested:
        return requested
    if device == "cuda":
        return len(slot_pool(device).slots) + 1
    return max(2, len(machine.usable_cores()))


def exit_code_of_attempts(done: Sequence[Attempt], control: Attempt) -> int:
    """Return the exit code of these attempts: 2 if the control is not MISSED, 0 if every fault is CAUGHT.

    Else 2 if the only other outcomes are UNFIRED and NOT TRIED, and 1 otherwise.
    """
    unproven_outcomes = {Outcome.UNFIRED, Outcome.NOT_TRIED}
    if control.outcome is not Outcome.MISSED:
        return NOT_JUDGED
    code_of_outcome = {Outcome.CAUGHT: PASSED} | dict.fromkeys(unproven_outcomes, NOT_JUDGED)
    return worst_code(code_of_outcome.get(attempt.outcome, BROKEN) for attempt in done)
