"""`harness matrix`: all cases, or those selected, side by side."""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Container, Sequence

from harness.core import rings, trainers
from harness.core.case import case_files, coverage, random_cases
from harness.core.case.case import Case
from harness.core.case.variants import with_dtype, with_seed
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.typed import typed_options
from harness.core.cli.work.abandoning import abandon
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import refuse_json, refuse_others, run_options_of, trainer_lines, trainer_under_test
from harness.core.cli.work.verdict_codes import exit_code_of_verdict
from harness.core.judge import golden
from harness.core.launch import slot_pool
from harness.core.report.grid import matrix_report
from harness.core.report.outcome import Outcome, outcome_document
from harness.core.report.output import print_error, print_lines
from harness.core.report.progress import Progress
from harness.core.run import verdicts
from harness.core.run.communication import device_text
from harness.core.run.matrix import Machines, run_all
from harness.core.run.options import Options
from harness.core.run.packing import (
    CaseLoad,
    cases_of_shard,
    estimate_loads,
    order_for_early_answers,
    order_loads,
    remembered_seconds,
)
from harness.core.run.reference_cache import takes_long
from harness.core.run.selection import count_processes, select_matching, select_tier
from harness.core.run.supported import reason_unsupported
from harness.core.run.verdicts import RunRecord

LIST_OPTIONS = (
    *(
        "--list",
        "--cases",
        "-k",
        "--tier",
        "--random",
        "--seed",
        "--dtype",
        "--trainer",
        "--source",
        "--device",
        "--out",
    ),
    *("--shard", "--durations", "--changed", "--map", "--last-failed"),
)
"""Options that choose which cases are listed."""


def command(args: argparse.Namespace) -> int:
    """Run the selected cases, print grid and reports, and return the exit code. Each outcome is recorded as its case ends.

    --all and --list only print. --resume runs the rest of the last run in OUT. Raises BadInput for options that do not
    go together.
    """
    if args.all:
        refuse_json(args, "--all")
        refuse_others(args, "a list of pairs", {"--all", "--cases", "--trainer"})
        return print_pairs(
            coverage.option_pairs(cases_of(args), trainers.load_adapter(trainer_under_test(args)).unsupported)
        )
    if args.list:
        refuse_json(args, "--list")
        refuse_others(args, "a list", LIST_OPTIONS)
    if args.resume and (unused := {"--last-failed", "--durations"} & {*typed_options(args)}):
        raise BadInput(
            f"{min(unused)} cannot be combined with --resume, which continues with the cases of the interrupted run"
        )
    cases, omitted = select_cases(args)
    notes = trainer_lines(args)
    selection = next(filter(None, (select(cases, args) for select in rings.functions_of("selections"))), None)
    if selection is not None:
        cases = list(selection.cases)
        notes = [*notes, selection.sentence()]
        if not cases:
            print_or_keep_document(args, "matrix", {"outcomes": [], "seconds": 0.0, "notes": notes}, *notes)
            return PASSED
    if not args.resume:
        cases = cases_of_part(cases, args)
    if args.list:
        print_lines("\n".join([case_list_text(cases), *notes]) if selection is not None else case_list_text(cases))
        return PASSED
    options = run_options_of(args)
    machines = next(filter(None, (where(args, options) for where in rings.functions_of("machines"))), None)
    cases, record, before = (
        resume_run(cases, options, args) if args.resume else (cases, begin_record(cases, options, args), {})
    )
    todo = [case for case in cases if case.name not in before]
    new_outcomes, seconds = run_cases(
        todo, options, record, jobs=args.jobs, max_failures=args.max_failures, machines=machines, again=args.again
    )
    done = before | {outcome.case: outcome for outcome in new_outcomes}
    outcomes = [done[case.name] for case in cases if case.name in done]
    if len(outcomes) < len(cases):
        notes += [
            f"{len(cases) - len(outcomes)} more were not run after {args.max_failures} failures: --resume runs them"
        ]
    if omitted:
        notes += [f"{omitted} more of other tiers were not run: --tier all"]
    data = {"outcomes": list(map(outcome_document, outcomes)), "seconds": seconds, "notes": notes}
    print_or_keep_document(args, "matrix", data, matrix_report(outcomes, seconds), *notes)
    return exit_code_of_matrix(outcomes)


def run_cases(
    cases: Sequence[Case],
    options: Options,
    record: RunRecord,
    *,
    jobs: int | None,
    max_failures: int | None = None,
    machines: Machines | None = None,
    again: int = 0,
    remedy: str = "; the same command with --resume runs the rest",
) -> tuple[list[Outcome], float]:
    """Run the cases, begun in the order of `order_cases`; return outcomes in the order of their ends, and the seconds
    of all.

    jobs: cases at a time; None: as many as slots allow. max_failures: failures after which no other begins. machines:
    others than this one. again: how often a failing case is rerun. remedy: printed after Ctrl-C, which ends the
    process.
    """
    slots = max(1, sum(machines.carries()) if machines else len(slot_pool(options.device).slots))
    named = {case.name: case for case in cases}
    todo = order_cases(cases, options, slots)
    progress = Progress({load.name: max(load.slot_seconds, 0.1) for load in todo}, sys.stderr)
    try:
        outcomes = run_all(
            [named[load.name] for load in todo],
            options,
            jobs=jobs or slots + 1,  # one that is judged has given its slots back
            progress=progress,
            ended=record.append_outcome,
            max_failures=max_failures,
            how=machines.run_case if machines else None,
            again=again,
        )
    except KeyboardInterrupt:
        abandon(progress, "cases", remedy)
    return outcomes, progress.elapsed_seconds()


def begin_record(cases: Sequence[Case], options: Options, args: argparse.Namespace) -> RunRecord:
    return verdicts.begin_record(cases, options, args.shard or "")


def resume_run(
    selected_cases: Sequence[Case], options: Options, args: argparse.Namespace
) -> tuple[list[Case], RunRecord, dict[str, Outcome]]:
    """Return the selected cases that the interrupted run had, its record to go on in, and the outcomes that it has, by
    case.

    Lines that cannot be read are printed. Raises EvidenceError if the run is another one.
    """
    record, run, unread = verdicts.resume_record(selected_cases, options, args.shard)
    for line in unread:
        print_error(line)
    return [case for case in selected_cases if case.name in run.begins["cases"]], record, run.outcomes


def order_cases(cases: Sequence[Case], options: Options, slots: int) -> list[CaseLoad]:
    """Return the cases' loads in the order in which they begin, by how long they took when they were last run here.

    A few small cases come first, then the largest; those with long references are spread between them.
    """
    file = verdicts.verdicts_file_in(options.out)
    runs, _ = verdicts.read_verdicts(file) if file else ([], [])
    seconds = remembered_seconds(
        runs, trainer=verdicts.name_of_trainer(options.trainer), device=device_text(options), machine=platform.node()
    )
    long = {case.name for case in cases if takes_long(case, options)}
    return order_for_early_answers(
        order_loads(estimate_loads(cases, seconds, slots), slots), small_cases(cases, long), long
    )


EARLY_CASES = 10
"""Cases whose verdicts a person sees before the large ones begin."""


def small_cases(cases: Sequence[Case], long: Container[str]) -> list[str]:
    """Return the names of the EARLY_CASES smallest cases of the recipe that most cases have; empty if all are `long`.

    They wait for one reference, a short one. long: names of cases whose references take long.
    """
    shared = Counter(golden.recipe_name(case) for case in cases if case.name not in long)
    if not shared:
        return []
    ((recipe, _),) = shared.most_common(1)
    of_recipe = [case for case in cases if case.name not in long and golden.recipe_name(case) == recipe]
    return [case.name for case in sorted(of_recipe, key=lambda case: (count_processes(case), case.name))[:EARLY_CASES]]


def cases_of_part(cases: Sequence[Case], args: argparse.Namespace) -> list[Case]:
    """Return the cases that --last-failed and --shard leave: those that failed in the last run in OUT, and those of the
    shard.

    Raises BadInput where none is left, or for --durations without --shard.
    """
    cases = list(cases)
    if args.last_failed:
        run, _ = verdicts.last_run(args.out)
        cases = [case for case in cases if case.name in run.outcomes and run.outcomes[case.name].failed]
    if args.shard:
        cases = cases_of_shard(cases, durations_of_files(args), args.shard)
    elif args.durations:
        raise BadInput("--durations needs --shard; without it, durations are read from --out")
    if not cases:
        raise BadInput(
            "--last-failed: no selected case failed in the last run" if args.last_failed else "--shard: no case is left"
        )
    return cases


def durations_of_files(args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each case in the files of --durations, by name; empty without any.

    Every machine that is given the same files finds the same.
    """
    if not args.durations:
        return {}
    runs: list[verdicts.RecordedRun] = []
    for file in args.durations:
        recorded, _ = verdicts.read_verdicts(file)
        runs += recorded
    return remembered_seconds(runs, trainer=verdicts.name_of_trainer(run_options_of(args).trainer), device=args.device)


def select_cases(args: argparse.Namespace) -> tuple[list[Case], int]:
    """Return the selected cases with seed and dtype changed as typed, and how many more there are in other tiers.

    --random draws them instead. Raises BadInput or CaseError.
    """
    if args.random:
        if unused := {"-k", "--tier", "--cases"} & {*typed_options(args)}:
            raise BadInput(f"{min(unused)} cannot be combined with --random, which draws its own cases")
        options = run_options_of(args)
        seed = 1 if args.seed is None else args.seed
        return random_cases.draw_runnable_cases(
            args.random, seed, lambda case: reason_unsupported(case, options), dtype=args.dtype
        ), 0
    return select_cases_of_files(args)


def select_cases_of_files(args: argparse.Namespace) -> tuple[list[Case], int]:
    """Return the cases that -k and --tier select, with seed and dtype changed as typed, and how many more there are in
    other tiers.

    Raises CaseError if none is selected.
    """
    chosen = select_matching(cases_of(args), args.expression)
    cases = select_tier(chosen, args.tier)
    cases = [with_dtype(case if args.seed is None else with_seed(case, args.seed), args.dtype) for case in cases]
    return cases, len(chosen) - len(cases)


def exit_code_of_matrix(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code. Cases that were skipped count for nothing; if no other is left, nothing was judged."""
    return worst_code(exit_code_of_verdict(outcome.verdict) for outcome in outcomes if not outcome.skipped)


def print_pairs(pairs: Sequence[coverage.Pair]) -> int:
    """Print every pair of options with its case or its reason. Return NOT_JUDGED if a pair has neither, else PASSED."""
    print_lines(coverage.pairs_text(pairs))
    return NOT_JUDGED if any(pair.is_missing for pair in pairs) else PASSED


def case_list_text(cases: Sequence[Case]) -> str:
    """Return a line for each case, with ranks and purpose, below the path of its file. There must be at least one case."""
    width = max(len(case.name) for case in cases)
    lines = []
    for file in dict.fromkeys(case.file for case in cases):
        lines += [case_files.shown_path(file)] if file else []
        lines += [
            f"  {case.name:<{width}}  {case.dims.world_size:>2} ranks  {case.why}"
            for case in cases
            if case.file == file
        ]
    return "\n".join(lines)
