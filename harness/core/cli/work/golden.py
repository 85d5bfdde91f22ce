"""`harness golden`: comparing the reference with its accepted curves, and accepting them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.core import rings
from harness.core.case.case import Case
from harness.core.checks import golden as golden_check
from harness.core.checks import run_check
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst_code
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import refuse_json
from harness.core.evidence.records import Run
from harness.core.evidence.store import load_stored
from harness.core.judge import golden
from harness.core.judge.golden import GoldenError
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.report.finding_text import findings_text
from harness.core.report.output import print_lines
from harness.core.run.accepting import accept_golden_of
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.core.run.selection import select_matching
from harness.reference.record import ReferenceRun


def command(args: argparse.Namespace) -> int:
    """Compare the reference of each selected recipe with its golden, print the results, and return the worst exit code.

    With --accept rewrite the goldens instead: PASSED if there was any recipe, though nothing is judged. A ring may
    answer in place of both.
    """
    for replacement in rings.functions_for("instead", "golden"):
        if (code := replacement(args)) is not None:
            return int(code)
    if args.accept:
        refuse_json(args, "--accept")
    all_cases = cases_of(args)
    chosen = select_matching(all_cases, args.expression)
    recipes: dict[str, Case] = {}
    for case in chosen:
        recipes |= {
            golden.recipe_name(recipe_case): recipe_case for recipe_case in golden.launches_with_reference(case)
        }
    options = Options(out=args.out)
    if args.accept:
        names = [case.name for case in chosen]
        for case in recipes.values():  # done, though nothing is judged
            lines = accept_golden_of(case, options, all_cases, names)
            print_lines(*lines, f"  accepted, not judged: review `{golden.review_command(case)}`")
        for line in _unused_golden_lines(all_cases):
            print_lines(line)
        return PASSED if recipes else NOT_JUDGED
    results = {golden.golden_file(case).name: _against_golden(case, options) for case in recipes.values()}
    data = {
        "goldens": [{"file": file, "result": result} for file, result in results.items()],
        "unused": _unused_golden_lines(all_cases),
    }
    lines = []
    for file, result in results.items():
        lines += _result_lines(file, result)
    print_or_keep_document(args, "golden", data, *lines, *_unused_golden_lines(all_cases))
    codes = {Verdict.PASS: PASSED, Verdict.FAIL: BROKEN}
    return worst_code(codes.get(result.verdict, NOT_JUDGED) for result in results.values())


def _unused_golden_lines(all_cases: Sequence[Case]) -> list[str]:
    """Return a line for each stored golden that no case uses."""
    stored: set[Path] = set()
    for folder in {golden.golden_folder(case) for case in all_cases}:
        stored.update(folder.glob("*.json"))
    used: set[Path] = set()
    for case in all_cases:
        used.update(golden.golden_file(recipe_case) for recipe_case in golden.launches_with_reference(case))
    unused = sorted(stored - used)
    return [f"{path.name}: no case uses it; delete it" for path in unused]


def _result_lines(file: str, result: Result) -> list[str]:
    """Return the verdict on one golden and its note on a line, then the first findings."""
    return [f"{file}: {result.verdict}" + (f": {result.note}" if result.note else ""), *findings_text(result, "  ")]


def _against_golden(case: Case, options: Options) -> Result:
    """Return the result of the check `golden`, which examines no rank. It runs the reference if none is cached."""
    return run_check("golden", golden_check.check, _trial(case, options))


def _trial(case: Case, options: Options) -> Trial:
    """Return a trial for the check `golden`: reference, golden and plan of a launch, without any rank.

    A golden that cannot be loaded is None, and `golden_problem` says why. `saved` has those of the launches before.
    """
    reference = load_stored(reference_folder(case, options, ()) / "reference.npz", ReferenceRun)
    accepted = None
    problem = ""
    try:
        accepted = golden.load_golden(case)
    except GoldenError as error:
        problem = str(error)
    saved = tuple(_trial(recipe_case, options) for recipe_case in golden.launches_with_reference(case)[:-1])
    plan = make_plan(case)
    run = Run("", 0, (), {})
    return Trial(case, plan, run, reference, golden=accepted, golden_problem=problem, saved=saved)
