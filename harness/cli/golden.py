"""`harness golden`: the reference's accepted curves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from harness.checks import golden as golden_check
from harness.checks import run_check
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst
from harness.cli.options import add_cases, add_command, add_out, add_selection, cases_of, needs_matplotlib
from harness.evidence.records import Run
from harness.evidence.store import load
from harness.judge import golden
from harness.judge.golden import GoldenError
from harness.judge.result import Result, Verdict
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference.record import ReferenceRun
from harness.report.output import say
from harness.report.text import finding_text
from harness.run.options import Options
from harness.run.reference_cache import reference_folder
from harness.run.selection import matching
from harness.spec.case import Case


def add(commands: Any) -> None:
    parser = add_command(commands, "golden", command, "compare the reference with its accepted curves, or accept it")
    add_cases(parser)
    add_selection(parser)
    parser.add_argument("--accept", action="store_true", help="rewrite the goldens; judges nothing, refused in CI")
    parser.add_argument(
        "--plot", action="store_true", help="pictures and a table: correct runs, bounds, small mistakes"
    )
    add_out(parser, help="where references and pictures go; default out")


def command(args: argparse.Namespace) -> int:
    every = cases_of(args)
    chosen = matching(every, args.expression)
    recipes = {golden.recipe_name(case): case for case in chosen}
    options = Options(out=args.out)
    if args.plot:
        return _margins(chosen, options)
    noises = {name: _noise_keys(name, every) for name in recipes}
    code = worst(_golden(case, options, noises[name], accept=args.accept) for name, case in recipes.items())
    stored = {path for folder in {golden.home(case) for case in every} for path in folder.glob("*.json")}
    for path in sorted(stored - {golden.path_of(case) for case in every}):
        say(f"{path.name}: no case uses it; delete it")
    return code


def _margins(cases: Sequence[Case], options: Options) -> int:
    needs_matplotlib()
    from harness.run import margins  # matplotlib takes half a second

    pictured = []
    for users in margins.recipes(cases):
        one = margins.margin(users, options)
        say(margins.table(one), margins.draw(one, options.out))
        pictured.append(one)
    if len(pictured) > 1:
        say(margins.draw_all(pictured, options.out))
    return PASSED if pictured else NOT_JUDGED


def _noise_keys(recipe: str, cases: Sequence[Case]) -> list[str]:
    """What the golden must hold for all cases of its recipe to be judged."""
    users = [case for case in cases if golden.recipe_name(case) == recipe and not case.exact]
    return list(dict.fromkeys(key for case in users for key in (case.noise_key, case.golden_noise_key)))


def _golden(case: Case, options: Options, noise: Sequence[str], *, accept: bool) -> int:
    """Compare one recipe's reference with its golden, or accept it and measure its noise: done, though nothing is judged."""
    reference = load(reference_folder(case, options, noise if accept else ()) / "reference.npz", ReferenceRun)
    if accept:
        review = golden.review_command(case)
        say(golden.accept(case, reference), f"  accepted, not judged: review `{review}`")
        return PASSED
    result = _against_golden(case, reference)
    say(f"{golden.path_of(case).name}: {result.verdict}" + (f": {result.note}" if result.note else ""))
    for finding in result.shown:
        say(finding_text(finding, "  "))
    return {Verdict.PASS: PASSED, Verdict.FAIL: BROKEN}.get(result.verdict, NOT_JUDGED)


def _against_golden(case: Case, reference: ReferenceRun) -> Result:
    """The check `golden`, which looks at no rank."""
    accepted, problem = None, ""
    try:
        accepted = golden.load(case)
    except GoldenError as error:
        problem = str(error)
    trial = Trial(case, make_plan(case), Run("", 0, (), {}), reference, golden=accepted, golden_problem=problem)
    return run_check("golden", golden_check.check, trial)
