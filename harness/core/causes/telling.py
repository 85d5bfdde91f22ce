"""What was proven and seen, and what neither explains, as causes and lines of evidence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.core.causes.differences import NUMBERS
from harness.core.causes.engine import Explanation
from harness.core.causes.hypothesis import Fact, Hypothesis
from harness.core.causes.localise import KIND, localise
from harness.core.causes.words import Broken
from harness.core.checks import all_checks, run_check
from harness.core.judge.result import Cause, Diagnosis, Lines, Result, Verdict
from harness.core.judge.trial import Trial, launch_label

HARMLESS = frozenset({"memory", "traffic"})
"""Checks of what is kept or moved in addition: where more is wrong, that goes first."""


def broken_elsewhere(trial: Trial, results: Sequence[Result], told: Sequence[Result]) -> Lines:
    """Checks that fail in a launch, and not in the one that is diagnosed, whose results come last: maybe another mistake."""
    known = {result.check for result in told if result.verdict is Verdict.FAIL}
    where = launch_label(trial) or "the last launch"
    others = [one for one in results if one.verdict is Verdict.FAIL and one.check not in known and one.findings]
    first = [replace(result.findings[0], launch=where) for result in others]
    return tuple(("also failing", Cause(KIND, "", finding=finding)) for finding in first)


def told(trial: Trial, results: Sequence[Result], found: Explanation) -> Diagnosis:
    """What is proven and what was seen; and of what neither explains, where it first goes wrong."""
    seen = {fact.cause for fact in found.facts}
    first = sorted(found.proofs[0].hypotheses if found.proofs else (), key=lambda one: one.cause not in seen)
    facts, symptoms = _besides(first, found.facts)
    unfinished = [fact for fact in facts if "completed" in fact.checks]  # what did not run explains the most
    said = {fact.cause: fact.lines for fact in unfinished}
    said |= {one.cause: one.lines for one in first} | {fact.cause: fact.lines for fact in facts}
    said = {cause: of_one for cause, of_one in said.items() if not _said_before(cause, said)}
    lines = [line for of_one in said.values() for line in of_one]
    lines += [("also seen", fact.cause) for fact in symptoms]
    ways = [tuple(one.cause for one in proof.hypotheses) for proof in found.proofs]
    others = [way for way in dict.fromkeys(ways[1:]) if way != ways[0]]
    lines += [("and" if place else "or else", cause) for way in others for place, cause in enumerate(way)]
    left = {result.check: result for result in results if result.check in found.left and result.findings}
    if left:
        known = bool(found.proofs) and not found.proofs[0].renumbers
        assumed = found.proofs[0].assumed if known else trial
        if known:
            again = {name: run_check(name, all_checks()[name].check, assumed) for name in left}
            left = {name: result for name, result in again.items() if result.findings} or left
        held = frozenset(result.check for result in results if result.verdict is Verdict.PASS)
        place, more = _located(assumed, left, found.tried, held, bool(said))
        label = "still failing" if known else "not explained"
        aside = HARMLESS.issuperset(check for fact in facts for check in fact.checks)
        most = not found.proofs and aside and bool(NUMBERS & {*left})
        lines += [(label, place), *more] if said and not most else more
        said = {place: (), **said} if most or not said else said
    lines += [("not tried", text) for text in found.raised]
    lines += [("not searched further", found.ended)] * bool(found.ended)
    lines = [line for line in dict.fromkeys(lines) if line[1] not in said]
    explained = _explained(found)
    causes = tuple(_with_extent(cause, explained.get(cause, found.left), results) for cause in said)
    return Diagnosis(causes, (*_assuming(found, results), *lines))


def _said_before(cause: Cause, said: Iterable[Cause]) -> bool:
    """Whether an earlier cause of that kind says the same, and maybe more."""
    earlier = itertools.takewhile(lambda one: one is not cause, said)
    return bool(cause.observed) and any((one.kind, one.observed) == (cause.kind, cause.observed) for one in earlier)


def _explained(found: Explanation) -> dict[Cause, tuple[str, ...]]:
    """Return the failing checks by what explains them."""
    explained = {fact.cause: fact.checks for fact in found.facts}
    for one in found.proofs[0].hypotheses if found.proofs else ():
        explained[one.cause] = found.proofs[0].explained or one.seen
    return explained


def _with_extent(cause: Cause, checks: Sequence[str], results: Sequence[Result]) -> Cause:
    """Return the cause with the failing checks that it explains, and where their findings are."""
    failed = [result for result in results if result.verdict is Verdict.FAIL and result.check in checks]
    found = [finding for result in failed for finding in result.findings]
    return replace(
        cause,
        explains=tuple(result.check for result in failed),
        ranks=tuple(sorted({rank for one in found for rank in one.ranks})),
        steps=tuple(sorted({one.step for one in found if one.step is not None})),
        parameters=tuple(dict.fromkeys(one.name for one in found if one.kind == "parameter")),
    )


def _besides(first: Sequence[Hypothesis], facts: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Facts that are causes in addition to what is proven, and symptoms, which are causes if there is no other. A finding alone
    adds nothing to a proven cause of its kind."""
    proven = {one.cause.kind for one in first}
    new = [fact for fact in facts if fact.cause.observed or fact.cause.kind not in proven]
    named, symptoms = [fact for fact in new if not fact.symptom], [fact for fact in new if fact.symptom]
    return (named, symptoms) if first or named else (symptoms, [])


def _located(trial: Trial, left: Broken, tried: int, held: frozenset[str], rest: bool) -> tuple[Cause, Lines]:
    """The first finding as it is, where even that raises."""
    try:
        return localise(trial, left, tried, held, rest=rest)
    except Exception as error:
        return Cause(KIND, "", finding=next(iter(left.values())).findings[0]), (
            ("not located", f"{type(error).__name__}: {error}"),
        )


def _assuming(found: Explanation, results: Sequence[Result]) -> Lines:
    if not found.proofs:
        return ()
    failed = {result.check for result in results if result.verdict is Verdict.FAIL}
    given = {check for one in found.proofs[0].hypotheses for check in one.given} & failed
    broken, proven = len(failed - given), [check for check in found.proofs[0].explained if check not in given]
    failed -= {*proven, *given}
    seen = dict.fromkeys(check for fact in found.facts for check in fact.checks if check in failed)
    aside = found.proofs[0].aside
    rest = f"; taken as given: {', '.join(sorted(given))}" * bool(given)
    rest += f"; seen, not proven: {', '.join(seen)}" * bool(seen)
    fails = "no passing check fails" + " but {}, which is left aside".format(", ".join(aside)) * bool(aside)
    return (("assuming this", f"{len(proven)} of {broken} failing checks pass, and {fails}{rest}"),)


def what_weaker_tests_say(results: Sequence[Result]) -> Lines:
    """The checks that pass although the trainer is wrong: what weaker tests would have said."""
    passing = {result.check: result for result in results if result.verdict is Verdict.PASS}
    broken = {result.check for result in results if result.verdict is Verdict.FAIL}
    lines = []
    numbers = [name for name in ("loss", "gradients") if name in passing]
    if numbers and broken != {"golden"}:
        worst = max(passing[name].largest or 0.0 for name in numbers)
        blind = ": a loss-curve test passes here" if "loss" in passing and "reported_loss" not in broken else ""
        close = f"within {worst:.1e}" if worst else "exactly"
        lines.append((", ".join(numbers), f"equal to the reference {close}{blind}"))
    if "process_groups" in passing and broken & {"shard_contents", "placements", "traffic"}:
        lines.append(("groups", "every group of the plan exists: a listing of process groups passes here"))
    if "golden" in broken and len(broken) > 1:
        lines.append(("golden", "the reference moved as well: model, data, recipe or torch changed"))
    return tuple(lines)
