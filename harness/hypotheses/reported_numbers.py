"""A number that ranks report by name is one with another meaning: of other ranks, steps or tokens, or a multiple.

They are judged by what ranks did, not by the reference: no other mistake makes them wrong, and all are explained at once.
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
    """One name's numbers, and what they mean where they are right."""

    name: str
    reported: Reported
    meant: dict[tuple[int, int], Number]


def wrong_numbers(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Explain all wrong numbers together, each by the first meaning that gives it on all ranks and in all steps."""
    odd = list(_odd(trial)) if CHECK in broken else []
    explained = [(one, found) for one in odd if (found := list(itertools.islice(_meanings(trial, one), MOST)))]
    if not odd or len(explained) < len(odd):
        return
    alike: dict[str, list[str]] = {}
    for one, found in explained:
        alike.setdefault(phrase(found[0][0]) + _or([other for other, _ in found[1:]]), []).append(one.name)
    texts = [f"{' and '.join(names)} {'are' if names[1:] else 'is'} reported {how}" for how, names in alike.items()]
    details = tuple(pair for one, found in explained for pair in (("report", one.name), *found[0][0]))
    assumed = {key(one.name): _instead(one, found[0][1]) for one, found in explained}
    where = on_ranks(trial, {rank for one in odd for rank, _ in one.reported.odd})
    cause = Cause("wrong report", "; ".join(texts), where.strip(), details=details)
    yield Hypothesis(cause, lambda trial: trial.assuming(reports=assumed), lines=(finding_line(broken[CHECK]),))


def odd_numbers(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """State that a number is wrong where no meaning gives it."""
    about = broken[CHECK].findings[0].quantity if CHECK in broken else ""
    if about == VALIDATED:
        yield seen(broken, CHECK, "samples not held out", "the validation is of samples that were trained on")
    elif about == REPEATED:
        yield seen(broken, CHECK, "rows validated twice", "some rows of the validation count more than once")
    elif CHECK in broken:
        lacking = broken[CHECK].findings[0].observed is None
        fact = seen(broken, CHECK, "report lacking" if lacking else "wrong report", "a reported number is wrong")
        yield replace(fact, symptom=not lacking)  # it may follow from what else is wrong


def _odd(trial: Trial) -> Iterator[Named]:
    book = Book(trial)
    meant: dict[str, dict[tuple[int, int], Number]] = {}
    for rank, step in trial.own_steps():
        for name, number in step.numbers.items():
            meant.setdefault(name, {})[rank, step.step] = number
    for name, numbers in meant.items():
        right = {}
        for at, number in numbers.items():
            try:
                right[at] = wanted(book, *at, name, number)
            except NotOnRecord:
                continue
        shown = {at: numbers[at].value for at in right}
        odd = [
            at
            for at, value in right.items()
            if not distance(numbers[at], value) <= bound_of(trial, at[1], numbers[at]).number
        ]
        if odd:
            yield Named(name, Reported(key(name), shown, right, tuple(odd)), numbers)


def _instead(one: Named, number: ByStep) -> ByStep:
    def value(rank: int, step: int) -> float:
        known = number(rank, step) if (rank, step) in one.reported.odd else None
        return one.reported.right[rank, step] if known is None else known

    return value


def _meanings(trial: Trial, one: Named) -> Iterator[tuple[Details, ByStep]]:
    """Yield the meanings that give all that is wrong, likely ones first."""
    for details, number in itertools.chain(_other_meanings(trial, one), _others(trial, one), _multiples(trial, one)):
        if one.reported.is_all(number):
            yield details, number


def _other_meanings(trial: Trial, one: Named) -> Iterator[tuple[Details, ByStep]]:
    """The same number, had its meaning another field."""
    book, first = Book(trial), next(iter(one.meant.values()))
    if first.of == NORM:
        return
    present = [axis for axis in SPLIT if getattr(trial.case.dims, axis) > 1]

    def meaning(**fields: object) -> ByStep:
        def number(rank: int, step: int) -> float | None:
            try:
                meant = dataclasses.replace(one.meant[rank, step], **fields)  # type: ignore[arg-type]
                return book.expected(rank, step, one.name, meant)
            except NotOnRecord:
                return None

        return number

    for count in range(1, len(present) + 1):
        for missing in itertools.combinations([axis for axis in present if axis in first.over], count):
            over = tuple(axis for axis in first.over if axis not in missing)
            yield (("not added up over", missing),), meaning(over=over)
        for more in itertools.combinations([axis for axis in present if axis not in first.over], count):
            yield (("added up over", more),), meaning(over=(*first.over, *more))
    for other in COUNTS if first.of in COUNTS[:3] else ():
        if other != first.of:
            yield (("as a number of", other),), meaning(of=other)
    for steps, text in ((1, "this step alone"), (None, "all steps so far")):
        if steps != first.steps and first.of != VALIDATION:
            yield (("of", text),), meaning(steps=steps)
    for per in (*COUNTS[:3], "") if first.of == MEAN else ():
        if per != first.per:
            yield (("as a mean over", per or "what ranks say that they count"),), meaning(per=per)


def _others(trial: Trial, one: Named) -> Iterator[tuple[Details, ByStep]]:
    """The number of another step; of a validation another loss."""
    right, first = one.reported.right, next(iter(one.meant.values()))
    for by in (-1, 1):
        yield (
            (("as that of 1 step", "before" if by < 0 else "later"),),
            lambda rank, step, by=by: right.get((rank, step + by)),  # type: ignore[misc]
        )
    book = Book(trial)
    if first.of == NORM:
        yield (("as that of 1 step", "before"),), lambda rank, step: _norm(book, rank, step - 1)
        yield from norms(trial, PARAMETERS)
    if first.of in (VALIDATION, MEAN):
        yield (("as a mean of means of", "ranks"),), lambda rank, step: _mean_of_means(book, step, one)
        for only in (rank for rank, step in one.meant if step == one.reported.odd[0][1]):
            yield (("as that of rank", only),), lambda _, step, only=only: _mean_of(book, only, step, one)  # type: ignore[misc]
    if first.of == VALIDATION:
        yield (("as the", "loss"),), lambda rank, step: on_record(trial, "reported_loss", rank, step)


def _mean_of_means(book: Book, step: int, one: Named) -> float | None:
    """Return the mean of the means of all ranks that have a part, each over its own; ranks along tp share one."""
    means = {place_of(book.trial, rank): _mean_of(book, rank, step, one) for rank in sorted(book.trial.ranks)}
    known = [mean for mean in means.values() if mean is not None and math.isfinite(mean)]
    return math.fsum(known) / len(known) if known else None


def _mean_of(book: Book, rank: int, step: int, one: Named) -> float | None:
    """Return the mean of a rank's own part."""
    try:
        return book.expected(rank, step, one.name, dataclasses.replace(one.meant[rank, step], over=()))
    except (NotOnRecord, KeyError):
        return None


def _norm(book: Book, rank: int, step: int) -> float | None:
    try:
        return book.norm(rank, step)
    except NotOnRecord:
        return None


def _multiples(trial: Trial, one: Named) -> Iterator[tuple[Details, ByStep]]:
    """A degree, or a product of some, times the right number or below it; then any other factor."""
    right = one.reported.right
    degrees = {axis: getattr(trial.case.dims, axis) for axis in AXES} | {
        "accumulation": trial.case.features.accumulation
    }
    over = next(iter(one.meant.values())).over
    names = sorted((name for name, degree in degrees.items() if degree > 1), key=lambda name: name in over)
    for count in range(1, len(names) + 1):
        for some in itertools.combinations(names, count):
            factor = math.prod(degrees[name] for name in some)
            yield (("counted once for each place along", some),), lambda r, s, by=factor: by * right[r, s]  # type: ignore[misc]
            yield (("divided by the degree of", some),), lambda r, s, by=factor: right[r, s] / by  # type: ignore[misc]
    ratio = one.reported.ratio(one.reported.odd[0])
    if len({step for _, step in one.reported.odd}) > 1 and math.isfinite(ratio):
        yield (("times", ratio),), lambda r, s: ratio * right[r, s]


def _or(others: list[Details]) -> str:
    """Other meanings that give the same numbers; a bare factor says nothing more."""
    texts = [phrase(details) for details in others if details[0][0] != "times"]
    return f", or {', or '.join(texts)}" if texts else ""
