"""Causes of wrong numbers that ranks report by name: they are of other ranks, steps or tokens, or a multiple.

Such numbers are judged by what ranks did, not by the reference. No other mistake makes them wrong. All are explained at
once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, fact_of_first_finding
from harness.core.causes.reported import NumberOfStep as ByStep
from harness.core.causes.reported import Reports, details_text, norm_sources, recorded_number
from harness.core.causes.words import finding_line, on_ranks_text
from harness.core.checks.reported_numbers import (
    HELD_OUT_QUANTITY,
    REPEATED_ROWS_QUANTITY,
    assumption_key,
    bound_of_number,
    error_of_number,
    expected_value,
)
from harness.core.evidence.numbers import AXES, COUNTS, MEAN, NORM, SPLIT, VALIDATION, Number
from harness.core.judge.norms import PARAMETERS
from harness.core.judge.numbers import ExpectedNumbers, NotOnRecord, share_coordinate
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial

Details = tuple[tuple[str, object], ...]
NUMBERS_CHECK = "reported_numbers"
MOST_MEANINGS = 3
"""Meanings that give the same numbers, of which a sentence names so many."""


@dataclass(frozen=True)
class NamedReport:
    """Numbers that ranks report by one name, some of them wrong, and their requested meaning."""

    name: str
    reported: Reports
    requested_numbers: dict[tuple[int, int], Number]
    """(rank, step) -> the number as it was reported, with its meaning."""


def wrong_numbers(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield one hypothesis on all wrong numbers together, each explained by the first meaning that gives it on all
    ranks and steps.

    Nothing if the check passes, or if some wrong number has no such meaning.
    """
    wrong_reports = list(_wrong_named_reports(trial)) if NUMBERS_CHECK in broken else []
    explained = []
    for report in wrong_reports:
        if meanings := list(itertools.islice(_matching_meanings(trial, report), MOST_MEANINGS)):
            explained.append((report, meanings))
    if not wrong_reports or len(explained) < len(wrong_reports):
        return
    names_by_text: dict[str, list[str]] = {}
    details: list[tuple[str, object]] = []
    assumed = {}
    for report, meanings in explained:
        first_details, first_number = meanings[0]
        meaning_text = details_text(first_details) + _alternatives_text([other for other, _ in meanings[1:]])
        names_by_text.setdefault(meaning_text, []).append(report.name)
        details += [("report", report.name), *first_details]
        assumed[assumption_key(report.name)] = _number_with_meaning(report, first_number)
    texts = [
        f"{' and '.join(names)} {'are' if names[1:] else 'is'} reported {text}" for text, names in names_by_text.items()
    ]
    wrong_keys = itertools.chain.from_iterable(report.reported.wrong_keys for report in wrong_reports)
    wrong_ranks = {rank for rank, _ in wrong_keys}
    where = on_ranks_text(trial, wrong_ranks)
    cause = Cause("wrong report", "; ".join(texts), where.strip(), details=tuple(details))
    yield Hypothesis(
        cause, lambda trial: trial.with_assumption(reports=assumed), lines=(finding_line(broken[NUMBERS_CHECK]),)
    )


def odd_numbers(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield the fact that a reported number is wrong or lacking, with the first finding.

    It is asked where no meaning gives it. Nothing if the check passes. A number that is merely wrong is a symptom: it
    may follow from something else.
    """
    quantity = broken[NUMBERS_CHECK].findings[0].quantity if NUMBERS_CHECK in broken else ""
    if quantity == HELD_OUT_QUANTITY:
        yield fact_of_first_finding(
            broken, NUMBERS_CHECK, "samples not held out", "the validation is of samples that were trained on"
        )
    elif quantity == REPEATED_ROWS_QUANTITY:
        yield fact_of_first_finding(
            broken, NUMBERS_CHECK, "rows validated twice", "some rows of the validation count more than once"
        )
    elif NUMBERS_CHECK in broken:
        is_lacking = broken[NUMBERS_CHECK].findings[0].observed is None
        fact = fact_of_first_finding(
            broken, NUMBERS_CHECK, "report lacking" if is_lacking else "wrong report", "a reported number is wrong"
        )
        yield replace(fact, is_symptom=not is_lacking)  # it may follow from what else is wrong


def _wrong_named_reports(trial: Trial) -> Iterator[NamedReport]:
    """Yield a report for each name by which some rank reports a wrong number in some step.

    Numbers whose right value is not on record are left out.
    """
    book = ExpectedNumbers(trial)
    meant: dict[str, dict[tuple[int, int], Number]] = {}
    for rank, step in trial.own_steps():
        for name, number in step.numbers.items():
            meant.setdefault(name, {})[rank, step.step] = number
    for name, numbers in meant.items():
        expected = {}
        for rank_and_step, number in numbers.items():
            try:
                expected[rank_and_step] = expected_value(book, *rank_and_step, name, number)
            except NotOnRecord:
                continue
        reported = {rank_and_step: numbers[rank_and_step].value for rank_and_step in expected}
        wrong_keys = []
        for (rank, step_number), value in expected.items():
            number = numbers[rank, step_number]
            if not error_of_number(number, value) <= bound_of_number(trial, step_number, number).number:
                wrong_keys.append((rank, step_number))
        if wrong_keys:
            yield NamedReport(name, Reports(assumption_key(name), reported, expected, tuple(wrong_keys)), numbers)


def _number_with_meaning(report: NamedReport, number: ByStep) -> ByStep:
    """Return (rank, step) -> what a rank would report with this meaning where its number is wrong; the right number
    elsewhere."""

    def value(rank: int, step: int) -> float:
        assumed = number(rank, step) if (rank, step) in report.reported.wrong_keys else None
        return report.reported.right_numbers[rank, step] if assumed is None else assumed

    return value


def _matching_meanings(trial: Trial, report: NamedReport) -> Iterator[tuple[Details, ByStep]]:
    """Yield (details, number by rank and step) of the meanings that give all wrong numbers, likely ones first.

    Nothing if none does.
    """
    candidates = itertools.chain(
        _changed_meanings(trial, report), _other_numbers(trial, report), _multiples_of_right(trial, report)
    )
    for details, number in candidates:
        if report.reported.matches_all(number):
            yield details, number


def _changed_meanings(trial: Trial, report: NamedReport) -> Iterator[tuple[Details, ByStep]]:
    """Yield (details, number by rank and step) with one field of the meaning changed: axes, tokens, steps or divisor of
    a mean.

    Nothing for norms. A number is None where it is not on record.
    """
    book = ExpectedNumbers(trial)
    first = next(iter(report.requested_numbers.values()))
    if first.of == NORM:
        return
    present = [axis for axis in SPLIT if getattr(trial.case.dims, axis) > 1]

    def meaning(**fields: object) -> ByStep:
        """Return (rank, step) -> the right number of the meaning with these fields changed; None where it is not on record."""

        def number(rank: int, step: int) -> float | None:
            try:
                meant = dataclasses.replace(report.requested_numbers[rank, step], **fields)  # type: ignore[arg-type]
                return book.expected_value(rank, step, report.name, meant)
            except NotOnRecord:
                return None

        return number

    for count in range(1, len(present) + 1):
        for missing in itertools.combinations([axis for axis in present if axis in first.over], count):
            over = tuple(axis for axis in first.over if axis not in missing)
            yield (("not added up over", missing),), meaning(over=over)
        for added in itertools.combinations([axis for axis in present if axis not in first.over], count):
            yield (("added up over", added),), meaning(over=(*first.over, *added))
    if first.of in COUNTS[:3]:
        for other in COUNTS:
            if other != first.of:
                yield (("as a number of", other),), meaning(of=other)
    for steps, text in ((1, "this step alone"), (None, "all steps so far")):
        if steps != first.steps and first.of != VALIDATION:
            yield (("of", text),), meaning(steps=steps)
    if first.of == MEAN:
        for per in (*COUNTS[:3], ""):
            if per != first.per:
                yield (("as a mean over", per or "what ranks say that they count"),), meaning(per=per)


def _other_numbers(trial: Trial, report: NamedReport) -> Iterator[tuple[Details, ByStep]]:
    """Yield (details, number by rank and step) of other numbers: of the steps before and after, and others by what is
    reported.

    These are other norms for a norm, means of some ranks for a mean or validation, and the training loss for a
    validation.
    """
    expected = report.reported.right_numbers
    first = next(iter(report.requested_numbers.values()))
    for offset in (-1, 1):
        yield (
            (("as that of 1 step", "before" if offset < 0 else "later"),),
            lambda rank, step, offset=offset: expected.get((rank, step + offset)),  # type: ignore[misc]
        )
    book = ExpectedNumbers(trial)
    if first.of == NORM:
        yield (("as that of 1 step", "before"),), lambda rank, step: _gradient_norm(book, rank, step - 1)
        yield from norm_sources(trial, PARAMETERS)
    if first.of in (VALIDATION, MEAN):
        yield (("as a mean of means of", "ranks"),), lambda rank, step: _mean_of_means(book, step, report)
        for only in (rank for rank, step in report.requested_numbers if step == report.reported.wrong_keys[0][1]):
            yield (("as that of rank", only),), lambda _, step, only=only: _mean_of_rank(book, only, step, report)  # type: ignore[misc]
    if first.of == VALIDATION:
        yield (("as the", "loss"),), lambda rank, step: recorded_number(trial, "reported_loss", rank, step)


def _mean_of_means(book: ExpectedNumbers, step: int, report: NamedReport) -> float | None:
    """Return the mean over all ranks of their own means. None if no rank has a finite one. Ranks along tp count once."""
    means = {
        share_coordinate(book.trial, rank): _mean_of_rank(book, rank, step, report) for rank in sorted(book.trial.ranks)
    }
    known = [mean for mean in means.values() if mean is not None and math.isfinite(mean)]
    return math.fsum(known) / len(known) if known else None


def _mean_of_rank(book: ExpectedNumbers, rank: int, step: int, report: NamedReport) -> float | None:
    """Return the mean over a rank's own share of a step's samples. None if it is not on record."""
    try:
        return book.expected_value(
            rank, step, report.name, dataclasses.replace(report.requested_numbers[rank, step], over=())
        )
    except (NotOnRecord, KeyError):
        return None


def _gradient_norm(book: ExpectedNumbers, rank: int, step: int) -> float | None:
    """Return the norm of all gradients of a step as a rank may report it. None if it is not on record."""
    try:
        return book.parameter_norm(rank, step)
    except NotOnRecord:
        return None


def _multiples_of_right(trial: Trial, report: NamedReport) -> Iterator[tuple[Details, ByStep]]:
    """Yield (details, number by rank and step) of multiples: the right number times a product of degrees, or divided by
    it.

    Last comes the factor of the first wrong number, if several steps are wrong.
    """
    expected = report.reported.right_numbers
    degrees = {axis: getattr(trial.case.dims, axis) for axis in AXES}
    degrees["accumulation"] = trial.case.features.accumulation
    over = next(iter(report.requested_numbers.values())).over
    names = sorted((name for name, degree in degrees.items() if degree > 1), key=lambda name: name in over)
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            factor = math.prod(degrees[name] for name in axes)
            multiplied = lambda rank, step, factor=factor: factor * expected[rank, step]  # noqa: E731
            divided = lambda rank, step, factor=factor: expected[rank, step] / factor  # noqa: E731
            yield (("counted once for each place along", axes),), multiplied
            yield (("divided by the degree of", axes),), divided
    ratio = report.reported.ratio_to_right(report.reported.wrong_keys[0])
    if len({step for _, step in report.reported.wrong_keys}) > 1 and math.isfinite(ratio):
        yield (("times", ratio),), lambda rank, step: ratio * expected[rank, step]


def _alternatives_text(others: list[Details]) -> str:
    """Return other meanings that give the same numbers, in words. A bare factor adds nothing and is left out."""
    texts = [details_text(details) for details in others if details[0][0] != "times"]
    return f", or {', or '.join(texts)}" if texts else ""
