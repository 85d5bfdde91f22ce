"""What ranks received contributes unequally to gradients: microbatches lost, means taken in the wrong place, no reduction.

How often each piece counts is fitted in the first wrong step; what is proposed is a rule for it, which the checks judge in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis.assume import apart
from harness.diagnosis.differences import factor_of, first_wrong_step, spans, wrong_pairs
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import DATA_AXES, Mixture, Piece, Pieces, assuming, mixture_of
from harness.diagnosis.reductions import of_each_rank
from harness.diagnosis.reported import Number, assuming_reports, reported_of
from harness.diagnosis.words import Arrays
from harness.evidence.text import number_text
from harness.judge.losses import losses
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Place = tuple[int, ...]
Rule = Callable[[int], np.ndarray]  # by step, how often each piece counts on all ranks


def unequal_contributions(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or trial.assumption.references or _all_scaled(trial, step):
        return
    pieces = Pieces(trial)
    if not pieces.known or (mixture := mixture_of(trial, pieces, step)) is None:
        return
    first = next(iter(mixture.weights.values()))
    if all(mixture.same(own, first) for own in mixture.weights.values()):
        yield from _of_all_ranks(_fit_of(trial, pieces, mixture))
    else:
        yield from of_each_rank(trial, pieces, mixture, broken)


def _all_scaled(trial: Trial, step: int) -> bool:
    """Then scales are what is tried."""
    return trial.case.exact and all(factor_of(trial, *at, step) is not None for at in wrong_pairs(trial, step))


# ---- the same on all ranks


@dataclass(frozen=True)
class Fit:
    """By piece: seen, how often it counts on all ranks in the first wrong step; numbers, of which microbatch it is; counted,
    whether it has valid tokens. lost: microbatches with valid tokens, of which none counts."""

    trial: Trial
    pieces: Pieces
    mixture: Mixture
    seen: np.ndarray
    numbers: np.ndarray
    counted: np.ndarray
    lost: list[int]


def _fit_of(trial: Trial, pieces: Pieces, mixture: Mixture) -> Fit:
    seen = np.mean(list(mixture.weights.values()), axis=0)
    numbers = np.array([piece.row // trial.case.local_batch for piece in pieces.all])
    counted = pieces.tokens(mixture.step) > 0
    held = set(numbers[counted & (np.abs(seen) > mixture.close)].tolist())
    lost = sorted(set(numbers[counted].tolist()) - held)
    return Fit(trial, pieces, mixture, seen, numbers, counted, lost)


@dataclass(frozen=True)
class Counting:
    """weights: of the pieces, on all ranks. fitted: of how many numbers or choices. mean: what each rank may then report."""

    cause: Cause
    weights: Rule
    fitted: int
    mean: Number | None = None


def _of_all_ranks(fit: Fit) -> Iterator[Hypothesis]:
    trial, mixture = fit.trial, fit.mixture
    rules = [*_by_microbatch(fit), *_averaged_locally(fit)]
    if not rules and trial.case.exact:
        cause = Cause("unequal contributions", _unequal_text(fit))
        rules = [Counting(cause, lambda step: fit.seen, len(np.unique(fit.seen.round(6))))]
    reported = reported_of(trial, "reported_loss")
    for rule in rules:
        for when, steps, more in spans(trial, mixture.step):
            cause = replace(rule.cause, observed=rule.cause.observed + mixture.where(trial) + when)
            weights = partial(_of_any_rank, rule.weights)
            assume = partial(assuming, pieces=fit.pieces, fqns=mixture.fqns, weights=weights, steps=steps)
            one = Hypothesis(cause, assume, rule.fitted + more)
            if reported and rule.mean and {step for _, step in reported.odd} <= {*steps} and reported.is_all(rule.mean):
                one = one.and_then(partial(assuming_reports, reported=reported, number=rule.mean))
            yield one
    if mixture.step == trial.first_step and len(mixture.fqns) == len(trial.plan.shapes):
        yield from _one_step_late(fit)


def _of_any_rank(weights: Rule, step: int, rank: int) -> np.ndarray:
    return weights(step)


def _one_step_late(fit: Fit) -> Iterator[Hypothesis]:
    """Microbatches whose gradients are not in the first step: they stay on the ranks and are reduced with the next step's."""
    pieces, passes, lost = fit.pieces, fit.trial.case.passes, fit.lost
    if not 0 < len(lost) < passes:
        return
    late = np.isin(fit.numbers, lost)

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.asarray(sum(pieces.mask(pieces.all[i], step) for i in np.flatnonzero(of))) for of in (~late, late)]

    def assume(trial: Trial) -> Trial:
        before: dict[int, Arrays] = {}

        def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
            own, before[step] = gradients
            return [own if step - 1 not in before else {fqn: own[fqn] + before[step - 1][fqn] for fqn in own}]

        return apart(trial, {}, [{}], owners=(0, 0), shares=shares, reduce=reduce)

    which, come = ("gradient of microbatch", "comes") if len(lost) == 1 else ("gradients of microbatches", "come")
    added = "it is" if len(lost) == 1 else "they are"
    text = f"the {which} {', '.join(str(n + 1) for n in lost)} of {passes} {come} one step late"
    yield Hypothesis(Cause("unequal contributions", f"{text}: {added} added to the next step's gradient"), assume, 2)


def _by_microbatch(fit: Fit) -> Iterator[Counting]:
    """All samples of the n-th microbatches of all ranks have the same weight."""
    passes, close, numbers, counted = fit.trial.case.passes, fit.mixture.close, fit.numbers, fit.counted
    if passes == 1 or len(set(numbers[counted].tolist())) < passes:
        return
    each = np.array([np.mean(fit.seen[counted & (numbers == number)]) for number in range(passes)])
    if not fit.mixture.same(fit.seen[counted], each[numbers][counted]):
        return
    each = np.where(np.abs(each - each.round()) <= close, each.round() + 0.0, each)
    shown, lost = ", ".join(number_text(weight, 4) for weight in each), np.flatnonzero(each == 0).tolist()
    text = f"microbatches contribute to the gradient with weights {shown}, requested 1 each"
    if lost:
        text = f"{_lost_text(lost, passes)} (weights {shown})"
    fitted = len(set(each.tolist()) - {0.0, 1.0}) + 1
    yield Counting(Cause("unequal contributions", text), lambda step: each[numbers], fitted)


def _lost_text(lost: Sequence[int], passes: int) -> str:
    which, do = ("microbatch", "does") if len(lost) == 1 else ("microbatches", "do")
    return f"{which} {', '.join(str(n + 1) for n in lost)} of {passes} {do} not contribute to the gradient"


# ---- means that are taken in the wrong place


@dataclass(frozen=True)
class Unit:
    """Who may divide by tokens of its own: ranks at one place along these axes, each so many samples at a time. summed: what
    the numbers of all of them are summed over."""

    name: str
    axes: tuple[str, ...]
    samples: int
    summed: str

    def of(self, trial: Trial, piece: Piece) -> Place:
        return (*_place(trial, piece.rank, self.axes, cp=piece.place), piece.row // self.samples)


def _place(trial: Trial, rank: int, axes: tuple[str, ...], **known: int) -> Place:
    at = coordinate(trial.case.dims, rank) | known
    return tuple(at[axis] for axis in axes)


def _units(trial: Trial) -> Iterator[Unit]:
    size, passes = trial.case.local_batch, trial.case.passes
    data, cp = (tuple(axis for axis in axes if getattr(trial.case.dims, axis) > 1) for axes in (DATA_AXES, ("cp",)))
    of_ranks = {"dp rank" if cp else "rank": data}
    if len(data) > 1:
        of_ranks |= {"replica": ("dp_replicate",), "place in a replica": ("dp_shard",)}
    of_ranks |= {"cp rank": cp}
    if data and cp:
        of_ranks |= {"dp and cp rank": (*data, *cp)}
    yield from (Unit(name, axes, size * passes, " and ".join(axes)) for name, axes in of_ranks.items() if axes)
    if passes > 1:
        if data or cp:
            yield Unit("microbatch of each rank", (*data, *cp), size, "microbatches")
        yield Unit("microbatch", (), size, "microbatches")
    yield Unit("sample", data, 1, "samples")


def _averaged_locally(fit: Fit) -> Iterator[Counting]:
    """Each divides by its own number of valid tokens, and these means are averaged; microbatches that are lost beside it are
    a second mistake in the same weights."""
    trial, kept = fit.trial, ~np.isin(fit.numbers, fit.lost)
    at, whole = fit.counted & kept, trial.case.local_batch * trial.case.passes
    for alike, units in _averages(fit, kept):
        usual: Rule = partial(_if_averaged, pieces=fit.pieces, units=units)
        ratios, count = fit.seen[at] / usual(fit.mixture.step)[at], len(set(units.tolist()))
        factor = np.asarray(np.median(ratios))
        times = next((number for number in (1, count) if fit.mixture.same(factor, number)), float(factor))
        if not fit.mixture.same(ratios, factor) or (fit.lost and times != 1):
            continue
        cause = Cause("averaged locally", _averaged_text(trial, alike, times, count))
        if fit.lost:
            both = ", ".join(("unequal contributions", "averaged locally"))
            cause = Cause(both, f"{_lost_text(fit.lost, trial.case.passes)}; {_local_text(alike)}")
        mean = partial(_divided_by_own, trial, alike[0].axes, 1 if times == count else count)
        fitted = 2 if fit.lost or times not in (1, count) else 1
        known = alike[0].samples == whole
        yield Counting(cause, partial(_times, times * kept, usual), fitted, mean if known else None)


def _averaged_text(trial: Trial, alike: Sequence[Unit], times: float, count: int) -> str:
    """count: of units."""
    if times == 1:
        return f"{_local_text(alike)}, not by the global one"
    if times == count:
        number = f"the number of valid tokens is not summed over {alike[0].summed}"
        return f"{number}: each {_names(alike)} divides by its own"
    return f"{_local_text(alike)}, and gradients are {times_text(times)} that{factor_text(trial, times)}"


def _local_text(alike: Sequence[Unit]) -> str:
    return f"the loss is averaged per {_names(alike)}: each divides by its own number of valid tokens"


def _names(alike: Sequence[Unit]) -> str:
    return " or ".join(unit.name for unit in alike)


def _averages(fit: Fit, kept: np.ndarray) -> Iterator[tuple[list[Unit], np.ndarray]]:
    """Units whose means give the same weights in all steps, and of which one each piece is; without those that change none."""
    found: dict[bytes, tuple[list[Unit], np.ndarray]] = {}
    for unit in _units(fit.trial):
        places = [unit.of(fit.trial, piece) for piece in fit.pieces.all]
        units = np.unique(places, axis=0, return_inverse=True)[1].ravel()
        table = np.stack([kept * _if_averaged(step, fit.pieces, units) for step in fit.trial.case.steps])
        if not fit.mixture.same(table, kept):
            found.setdefault(table.tobytes(), ([], units))[0].append(unit)
    yield from found.values()


def _if_averaged(step: int, pieces: Pieces, units: np.ndarray) -> np.ndarray:
    """units: by piece, the number of its unit."""
    tokens = pieces.tokens(step)
    own = np.bincount(units, tokens)
    return (tokens.sum() / (len(own) * np.maximum(own, 1)))[units]


def _times(factor: np.ndarray, weights: Rule, step: int) -> np.ndarray:
    return np.asarray(factor * weights(step))


def _divided_by_own(trial: Trial, axes: tuple[str, ...], units: int, rank: int, step: int) -> float:
    """All losses, divided by so many times the valid tokens of ranks at one place with this one; by 1 where there are none."""
    place = _place(trial, rank, axes)
    seen = {other: losses(trial, other, step) for other in trial.ranks if coordinate(trial.case.dims, other)["tp"] == 0}
    own = sum(tokens for other in seen if _place(trial, other, axes) == place for _, tokens in seen[other])
    return sum(loss for of_rank in seen.values() for loss, _ in of_rank) / max(units * own, 1)


def _unequal_text(fit: Fit) -> str:
    seen = fit.seen[fit.counted].round(9)
    places = np.array([piece.place for piece in fit.pieces.all])[fit.counted]
    each = {place: seen[places == place].mean() for place in np.unique(places)}
    if len(each) > 1 and fit.mixture.same(seen, np.array([each[place] for place in places])):
        shown = ", ".join(number_text(weight, 4) for weight in each.values())
        return f"tokens count unequally in the gradient: weights {shown} by cp rank, requested 1 each"
    none = int(np.sum(seen == 0))
    more = f", {none} of {len(seen)} do not count at all" if none else ""
    least, most = number_text(seen.min(), 4), number_text(seen.max(), 4)
    return f"samples count unequally in the gradient: weights {least} to {most}{more}, requested 1 each"
