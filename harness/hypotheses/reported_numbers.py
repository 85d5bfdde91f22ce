"""Numbers that ranks report by name and that have another meaning: of other ranks, steps or tokens, or a multiple.

Such numbers are judged by what ranks did, not by the reference. No other mistake makes them wrong. All are explained at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, seen
from harness.core.causes.reported import Number as ByStep
from harness.core.causes.reported import Reported, norms, on_record, phrase
from harness.core.causes.words import finding_line, on_ranks
from harness.core.checks.reported_numbers import REPEATED, VALIDATED, bound_of, distance, key, wanted
from harness.core.evidence.numbers import AXES, COUNTS, MEAN, NORM, SPLIT, VALIDATION, Number
from harness.core.judge.norms import PARAMETERS
from harness.core.judge.numbers import Book, NotOnRecord, place_of
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial

Details = tuple[tuple[str, object], ...]
CHECK = "reported_numbers"
MOST = 3
"""Meanings that give the same numbers, of which a sentence names so many."""


@dataclass(frozen=True)
class Named:
    """Numbers that ranks report by one name, and their requested meaning."""

    name: str
    reported: Reported
    meant: dict[tuple[int, int], Number]
    """(rank, step) -> the number as it was reported, with its meaning."""


def wrong_numbers(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Explain all wrong numbers together, each by the first meaning that gives it on all ranks and in all steps."""
    wrong_reports = list(_odd(trial)) if CHECK in broken else []
    explained = []
    for report in wrong_reports:
        if meanings := list(itertools.islice(_meanings(trial, report), MOST)):
            explained.append((report, meanings))
    if not wrong_reports or len(explained) < len(wrong_reports):
        return
    names_by_text: dict[str, list[str]] = {}
    details: list[tuple[str, object]] = []
    assumed = {}
    for report, meanings in explained:
        first_details, first_number = meanings[0]
        meaning_text = phrase(first_details) + _or([other for other, _ in meanings[1:]])
        names_by_text.setdefault(meaning_text, []).append(report.name)
        details += [("report", report.name), *first_details]
        assumed[key(report.name)] = _instead(report, first_number)
    texts = [
        f"{' and '.join(names)} {'are' if names[1:] else 'is'} reported {text}" for text, names in names_by_text.items()
    ]
    wrong_keys = itertools.chain.from_iterable(report.reported.odd for report in wrong_reports)
    wrong_ranks = {rank for rank, _ in wrong_keys}
    where = on_ranks(trial, wrong_ranks)
    cause = Cause("wrong report", "; ".join(texts), where.strip(), details=tuple(details))
    yield Hypothesis(cause, lambda trial: trial.assuming(reports=assumed), lines=(finding_line(broken[CHECK]),))


def odd_numbers(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """State that a number is wrong. It is asked where no meaning gives it."""
    quantity = broken[CHECK].findings[0].quantity if CHECK in broken else ""
    if quantity == VALIDATED:
        yield seen(broken, CHECK, "samples not held out", "the validation is of samples that were trained on")
    elif quantity == REPEATED:
        yield seen(broken, CHECK, "rows validated twice", "some rows of the validation count more than once")
    elif CHECK in broken:
        is_lacking = broken[CHECK].findings[0].observed is None
        fact = seen(broken, CHECK, "report lacking" if is_lacking else "wrong report", "a reported number is wrong")
        yield replace(fact, symptom=not is_lacking)  # it may follow from what else is wrong


def _odd(trial: Trial) -> Iterator[Named]:
    """Yield the names by which some rank reports a wrong number in some step."""
    book = Book(trial)
    meant: dict[str, dict[tuple[int, int], Number]] = {}
    for rank, step in trial.own_steps():
        for name, number in step.numbers.items():
            meant.setdefault(name, {})[rank, step.step] = number
    for name, numbers in meant.items():
        expected = {}
        for rank_and_step, number in numbers.items():
            try:
                expected[rank_and_step] = wanted(book, *rank_and_step, name, number)
            except NotOnRecord:
                continue
        reported = {rank_and_step: numbers[rank_and_step].value for rank_and_step in expected}
        wrong_keys = []
        for (rank, step_number), value in expected.items():
            number = numbers[rank, step_number]
            if not distance(number, value) <= bound_of(trial, step_number, number).number:
                wrong_keys.append((rank, step_number))
        if wrong_keys:
            yield Named(name, Reported(key(name), reported, expected, tuple(wrong_keys)), numbers)


def _instead(report: Named, number: ByStep) -> ByStep:
    """Return what a rank would report with this meaning where its number is wrong; the right number elsewhere."""

    def value(rank: int, step: int) -> float:
        assumed = number(rank, step) if (rank, step) in report.reported.odd else None
        return report.reported.right[rank, step] if assumed is None else assumed

    return value


def _meanings(trial: Trial, report: Named) -> Iterator[tuple[Details, ByStep]]:
    """Yield (details, number by rank and step) of the meanings that give all wrong numbers, likely ones first."""
    candidates = itertools.chain(_other_meanings(trial, report), _others(trial, report), _multiples(trial, report))
    for details, number in candidates:
        if report.reported.is_all(number):
            yield details, number


def _other_meanings(trial: Trial, report: Named) -> Iterator[tuple[Details, ByStep]]:
    """Yield the number with one field of its meaning changed: axes, tokens, steps or the divisor of a mean."""
    book = Book(trial)
    first = next(iter(report.meant.values()))
    if first.of == NORM:
        return
    present = [axis for axis in SPLIT if getattr(trial.case.dims, axis) > 1]

    def meaning(**fields: object) -> ByStep:
        def number(rank: int, step: int) -> float | None:
            try:
                meant = dataclasses.replace(report.meant[rank, step], **fields)  # type: ignore[arg-type]
                return book.expected(rank, step, report.name, meant)
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


def _others(trial: Trial, report: Named) -> Iterator[tuple[Details, ByStep]]:
    """Yield the numbers of the steps before and after, for a norm other norms, for a mean those of some ranks.

    For a validation the loss of training is yielded as well.
    """
    expected = report.reported.right
    first = next(iter(report.meant.values()))
    for offset in (-1, 1):
        yield (
            (("as that of 1 step", "before" if offset < 0 else "later"),),
            lambda rank, step, offset=offset: expected.get((rank, step + offset)),  # type: ignore[misc]
        )
    book = Book(trial)
    if first.of == NORM:
        yield (("as that of 1 step", "before"),), lambda rank, step: _norm(book, rank, step - 1)
        yield from norms(trial, PARAMETERS)
    if first.of in (VALIDATION, MEAN):
        yield (("as a mean of means of", "ranks"),), lambda rank, step: _mean_of_means(book, step, report)
        for only in (rank for rank, step in report.meant if step == report.reported.odd[0][1]):
            yield (("as that of rank", only),), lambda _, step, only=only: _mean_of(book, only, step, report)  # type: ignore[misc]
    if first.of == VALIDATION:
        yield (("as the", "loss"),), lambda rank, step: on_record(trial, "reported_loss", rank, step)


def _mean_of_means(book: Book, step: int, report: Named) -> float | None:
    """Return the mean over all ranks of their own means. None if no rank has a finite one. Ranks along tp count once."""
    means = {place_of(book.trial, rank): _mean_of(book, rank, step, report) for rank in sorted(book.trial.ranks)}
    known = [mean for mean in means.values() if mean is not None and math.isfinite(mean)]
    return math.fsum(known) / len(known) if known else None


def _mean_of(book: Book, rank: int, step: int, report: Named) -> float | None:
    """Return the mean over a rank's own part. None if it is not on record."""
    try:
        return book.expected(rank, step, report.name, dataclasses.replace(report.meant[rank, step], over=()))
    except (NotOnRecord, KeyError):
        return None


def _norm(book: Book, rank: int, step: int) -> float | None:
    """Return the norm of gradients of a step. None if it is not on record."""
    try:
        return book.norm(rank, step)
    except NotOnRecord:
        return None


def _multiples(trial: Trial, report: Named) -> Iterator[tuple[Details, ByStep]]:
    """Yield the right number times a product of degrees, or divided by it; then times any other factor."""
    expected = report.reported.right
    degrees = {axis: getattr(trial.case.dims, axis) for axis in AXES}
    degrees["accumulation"] = trial.case.features.accumulation
    over = next(iter(report.meant.values())).over
    names = sorted((name for name, degree in degrees.items() if degree > 1), key=lambda name: name in over)
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            factor = math.prod(degrees[name] for name in axes)
            multiplied = lambda rank, step, factor=factor: factor * expected[rank, step]  # noqa: E731
            divided = lambda rank, step, factor=factor: expected[rank, step] / factor  # noqa: E731
            yield (("counted once for each place along", axes),), multiplied
            yield (("divided by the degree of", axes),), divided
    ratio = report.reported.ratio(report.reported.odd[0])
    if len({step for _, step in report.reported.odd}) > 1 and math.isfinite(ratio):
        yield (("times", ratio),), lambda rank, step: ratio * expected[rank, step]


def _or(others: list[Details]) -> str:
    """Return other meanings that give the same numbers, in words. A bare factor adds nothing and is left out."""
    texts = [phrase(details) for details in others if details[0][0] != "times"]
    return f", or {', or '.join(texts)}" if texts else ""
