"""Every other number that a rank reports is what its meaning says: a count, rate, epoch or mean of what ranks really did.

Tokens and samples are those that ranks received, steps those on record. A rate is a count over seconds that are handed over,
too. A validation loss is that of the reference's model, by the weights that ranks held, of the batch that they validated on. A
norm of parameters is that of what they held. Each rank hands over its own part of a mean. The check judges how ranks put the
parts together, and by how many samples or tokens they divided. Samples that are validated on were not trained on before, and no
share of a validation has a row twice.
"""

from __future__ import annotations

import math
from typing import Any

from harness.core.evidence.numbers import COUNTS, MEAN, NORM, VALIDATION, Number
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.numbers import Book, NotOnRecord, place_of, requested, trained_on_before, validated_twice
from harness.core.judge.reporting import relative
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.tolerance import UNIT_ROUNDOFF
from harness.core.judge.trial import Trial

NAME = "reported_numbers"
STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
VALIDATED = "validation"
"""What a finding on its samples is about."""
REPEATED = "repeated rows of the validation"
"""What a finding on a row that is validated twice is about."""
CLOSE = 2 * UNIT_ROUNDOFF["float32"]
"""A number may be shown in float32."""


def check(trial: Trial) -> Result:
    reported = [(r, s.step, name, number) for r, s in trial.own_steps() for name, number in s.numbers.items()]
    findings = [*_not_validated(trial), *_not_held_out(trial), *_repeated(trial)]
    if not reported and not findings:
        return not_applicable(NAME, "this trainer reports no others")
    book, unjudged, worst = Book(trial), dict[str, str](), 0.0
    for rank, step, name, number in reported:
        try:
            expected = wanted(book, rank, step, name, number)
        except NotOnRecord as reason:
            unjudged.setdefault(name, f"{name}: {reason}")
            continue
        bound, difference = bound_of(trial, step, number), distance(number, expected)
        worst = max(worst, difference)
        if not difference <= bound.number:
            what: dict[str, Any] = {
                "step": step,
                "quantity": quantity(name),
                "bound": bound,
                "note": _note(number, expected),
            }
            findings.append(Finding.at(rank, expected, number.value, **what))
    result = verdict_of(NAME, findings, len(reported), "; ".join(unjudged.values()), largest=worst)
    unknown = unjudged and not findings
    return Result(NAME, Verdict.UNKNOWN, result.examined, note=result.note) if unknown else result


def wanted(book: Book, rank: int, step: int, name: str, number: Number) -> float:
    """Return what is expected, or assumed by a hypothesis. Raises NotOnRecord.

    A count that is the recipe's is right, too: whether ranks received that is what the check `samples` judges.
    """
    assumed = book.trial.assumption.reports.get(key(name))
    if assumed:
        return assumed(rank, step)
    received = book.expected(rank, step, name, number)
    if number.of not in (*COUNTS, MEAN) or relative(number.value, received) <= CLOSE:
        return received
    try:
        recipes = book.expected(rank, step, name, number, requested)
    except NotOnRecord:
        return received
    return recipes if relative(number.value, recipes) <= CLOSE else received


def distance(number: Number, expected: float) -> float:
    """Return how far off it is, relative to what is expected. The norm of parameters that are not finite is not finite."""
    both = number.of == NORM and math.isnan(number.value) and math.isnan(expected)
    return 0.0 if both else relative(number.value, expected)


def key(name: str) -> str:
    """Return the key of an assumption on a number."""
    return f"{NAME} {name}"


def quantity(name: str) -> str:
    """Return the quantity of a finding on a number."""
    return f"reported {name}"


def bound_of(trial: Trial, step: int, number: Number) -> Bound:
    if number.of == VALIDATION:
        return trial.bounds.of(trial.bounds.loss[step])
    return Bound(CLOSE + _rounding(trial) * (number.of == NORM))


def _rounding(trial: Trial) -> float:
    """Relative to a norm, what a sum of all its squares in float32 loses: as if each addition were rounded at random."""
    wide = trial.case.training.dtype == "float64"
    return 0.0 if wide else UNIT_ROUNDOFF["float32"] * math.sqrt(sum(map(math.prod, trial.plan.shapes.values())))


def _note(number: Number, expected: float) -> str:
    """Say how many times the right one it is, and what it means, in the words of Number."""
    ratio = f"ratio {number.value / expected:.6g}" if expected else ""
    over = f" over {', '.join(number.over)}" if number.over else " of this rank"
    over = "" if number.of == NORM else over
    steps = "since step 1" if number.steps is None else f"of {number.steps} steps" if number.steps > 1 else ""
    divided = f"divided by {', '.join(number.divided_by)}" if number.divided_by else ""
    rate = f"in {number.seconds!r} s" if number.rate else ""
    return ", ".join(filter(None, [ratio, number.of + over, steps, divided, rate]))


def _not_held_out(trial: Trial) -> list[Finding]:
    """Validations whose samples were trained on."""
    findings = []
    for step in _validated_steps(trial):
        try:
            again, of = trained_on_before(trial, step)
        except NotOnRecord:
            continue  # which the loss says, if it is reported
        if again:
            unit = f"of {of} samples that were trained on"
            findings.append(Finding(step=step, quantity=VALIDATED, expected=0, observed=again, unit=unit))
    return findings


def _repeated(trial: Trial) -> list[Finding]:
    """Shares of a validation in which a row counts more than once."""
    findings: list[Finding] = []
    for step in _validated_steps(trial):
        try:
            by_share = validated_twice(trial, step)
        except NotOnRecord:
            continue  # which the loss says, if it is reported
        for share, (again, rows) in by_share.items():
            ranks = tuple(rank for rank in sorted(trial.ranks) if place_of(trial, rank)[:2] == share)
            unit = f"of {rows}"
            findings.append(Finding(ranks=ranks, step=step, quantity=REPEATED, expected=0, observed=again, unit=unit))
    return findings


def _validated_steps(trial: Trial) -> list[int]:
    """Return the steps after which a validation is requested."""
    every = trial.case.features.validate_every
    return [step for step in trial.case.steps if every and step % every == 0]


def _not_validated(trial: Trial) -> list[Finding]:
    """Steps after which a validation is requested, and its loss is not reported by any rank."""
    every = trial.case.features.validate_every
    shown = {s.step for _, s in trial.own_steps() for number in s.numbers.values() if number.of == VALIDATION}
    missing = [step for step in _validated_steps(trial) if step not in shown]
    return [
        Finding(
            step=step, quantity=quantity(VALIDATION), expected="a number", note=f"validate_every {every} is requested"
        )
        for step in missing
    ]
