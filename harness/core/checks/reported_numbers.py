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
from harness.core.judge.numbers import (
    ExpectedNumbers,
    NotOnRecord,
    count_trained_validation_rows,
    repeated_validation_rows,
    requested_count,
    share_coordinate,
)
from harness.core.judge.reporting import relative_error
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.tolerance import UNIT_ROUNDOFF
from harness.core.judge.trial import Trial

NAME = "reported_numbers"
STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
HELD_OUT_QUANTITY = "validation"
"""What a finding on its samples is about."""
REPEATED_ROWS_QUANTITY = "repeated rows of the validation"
"""What a finding on a row that is validated twice is about."""
FLOAT32_TOLERANCE = 2 * UNIT_ROUNDOFF["float32"]
"""A number may be shown in float32."""


def check(trial: Trial) -> Result:
    """Compare each number that a rank reports by name with what its meaning says, and judge what was validated on.

    NOT APPLICABLE without such numbers. UNKNOWN if the evidence lacks what a number is about and nothing is wrong; the
    note says what. Raises NoBound for a validation loss.
    """
    reported: list[tuple[int, int, str, Number]] = []
    for rank, record in trial.own_steps():
        reported += [(rank, record.step, name, number) for name, number in record.numbers.items()]
    findings = [*_missing_validation_findings(trial), *_trained_on_findings(trial), *_repeated_row_findings(trial)]
    if not reported and not findings:
        return not_applicable(NAME, "this trainer reports no others")
    book = ExpectedNumbers(trial)
    unjudged: dict[str, str] = {}
    worst = 0.0
    for rank, step, name, number in reported:
        try:
            expected = expected_value(book, rank, step, name, number)
        except NotOnRecord as reason:
            unjudged.setdefault(name, f"{name}: {reason}")
            continue
        bound = bound_of_number(trial, step, number)
        difference = error_of_number(number, expected)
        worst = max(worst, difference)
        if not difference <= bound.number:
            subject: dict[str, Any] = {
                "step": step,
                "quantity": finding_quantity(name),
                "bound": bound,
                "note": _note_text(number, expected),
            }
            findings.append(Finding.at(rank, expected, number.value, **subject))
    result = verdict_of(NAME, findings, len(reported), "; ".join(unjudged.values()), largest=worst)
    unknown = unjudged and not findings
    return Result(NAME, Verdict.UNKNOWN, result.examined, note=result.note) if unknown else result


def expected_value(book: ExpectedNumbers, rank: int, step: int, name: str, number: Number) -> float:
    """Return the value that a rank should report, or that a hypothesis assumes. Raises NotOnRecord.

    For a count or mean that is right by the recipe, but not by what ranks received, it is the recipe's: the check
    `samples` judges what they received.
    """
    assumed = book.trial.assumption.reports.get(assumption_key(name))
    if assumed:
        return assumed(rank, step)
    received = book.expected_value(rank, step, name, number)
    if number.of not in (*COUNTS, MEAN) or relative_error(number.value, received) <= FLOAT32_TOLERANCE:
        return received
    try:
        recipes = book.expected_value(rank, step, name, number, requested_count)
    except NotOnRecord:
        return received
    return recipes if relative_error(number.value, recipes) <= FLOAT32_TOLERANCE else received


def error_of_number(number: Number, expected: float) -> float:
    """Return |reported - expected| / |expected|. 0 for a norm where both are NaN: parameters are not finite then."""
    both_are_nan = number.of == NORM and math.isnan(number.value) and math.isnan(expected)
    return 0.0 if both_are_nan else relative_error(number.value, expected)


def assumption_key(name: str) -> str:
    """Return the key under which Assumption.reports has a hypothesis on this number."""
    return f"{NAME} {name}"


def finding_quantity(name: str) -> str:
    """Return the quantity that findings on a reported number have: "reported" and its name."""
    return f"reported {name}"


def bound_of_number(trial: Trial, step: int, number: Number) -> Bound:
    """Return the largest relative difference of a number from what is expected. Raises NoBound for a validation loss.

    A norm has the rounding of a long sum in addition to that of float32.
    """
    if number.of == VALIDATION:
        return trial.bounds.finding_bound(trial.bounds.loss[step])
    return Bound(FLOAT32_TOLERANCE + _norm_rounding(trial) * (number.of == NORM))


def _norm_rounding(trial: Trial) -> float:
    """Return the relative rounding of the norm of all parameters, summed in float32. 0 in float64 recipes.

    Each addition is taken to be rounded at random.
    """
    if trial.case.training.dtype == "float64":
        return 0.0
    elements = sum(map(math.prod, trial.plan.shapes.values()))
    return UNIT_ROUNDOFF["float32"] * math.sqrt(elements)


def _note_text(number: Number, expected: float) -> str:
    """Return a note of a reported number's ratio to the expected one, and of its meaning in the words of Number."""
    ratio = f"ratio {number.value / expected:.6g}" if expected else ""
    over = f" over {', '.join(number.over)}" if number.over else " of this rank"
    over = "" if number.of == NORM else over
    steps = ""
    if number.steps is None:
        steps = "since step 1"
    elif number.steps > 1:
        steps = f"of {number.steps} steps"
    divided = f"divided by {', '.join(number.divided_by)}" if number.divided_by else ""
    rate = f"in {number.seconds!r} s" if number.rate else ""
    return ", ".join(filter(None, [ratio, number.of + over, steps, divided, rate]))


def _trained_on_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each requested validation with samples that training had used.

    A validation not on record has none.
    """
    findings = []
    for step in _validation_steps(trial):
        try:
            trained_on, evaluated = count_trained_validation_rows(trial, step)
        except NotOnRecord:
            continue  # which the loss says, if it is reported
        if trained_on:
            unit = f"of {evaluated} samples that were trained on"
            findings.append(Finding(step=step, quantity=HELD_OUT_QUANTITY, expected=0, observed=trained_on, unit=unit))
    return findings


def _repeated_row_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each share of a requested validation that has rows more than once.

    A validation not on record has none.
    """
    findings: list[Finding] = []
    for step in _validation_steps(trial):
        try:
            by_share = repeated_validation_rows(trial, step)
        except NotOnRecord:
            continue  # which the loss says, if it is reported
        for share, (repeated, rows) in by_share.items():
            ranks = tuple(rank for rank in sorted(trial.ranks) if share_coordinate(trial, rank)[:2] == share)
            unit = f"of {rows}"
            findings.append(
                Finding(
                    ranks=ranks, step=step, quantity=REPEATED_ROWS_QUANTITY, expected=0, observed=repeated, unit=unit
                )
            )
    return findings


def _validation_steps(trial: Trial) -> list[int]:
    """Return the steps after which a validation is requested. Empty if none is."""
    every = trial.case.features.validate_every
    return [step for step in trial.case.steps if every and step % every == 0]


def _missing_validation_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each step after which a validation is requested and no rank reports its loss."""
    every = trial.case.features.validate_every
    shown: set[int] = set()
    for _, record in trial.own_steps():
        if any(number.of == VALIDATION for number in record.numbers.values()):
            shown.add(record.step)
    missing = [step for step in _validation_steps(trial) if step not in shown]
    return [
        Finding(
            step=step,
            quantity=finding_quantity(VALIDATION),
            expected="a number",
            note=f"validate_every {every} is requested",
        )
        for step in missing
    ]
