"""What ranks received contributes unequally to gradients: microbatches lost, means taken in the wrong place, no reduction.

How often each piece counts is fitted in the first wrong step; what is proposed is a rule for it, which the laws judge in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis.assume import apart
from harness.diagnosis.differences import factor_of, first_wrong_step, spans, wrong_pairs
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import DATA_AXES, Mixture, Piece, Pieces, Weights, assuming, mixture_of
from harness.diagnosis.reductions import of_each_rank
from harness.diagnosis.reports import Number, assuming_reports, reported_of
from harness.diagnosis.words import Arrays
from harness.judge.losses import losses
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Key = Callable[[Piece], object]
Rule = Callable[[int], np.ndarray]  # by step, how often each piece counts on all ranks


def unequal_contributions(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or trial.references or _all_scaled(trial, step):
        return
    pieces = Pieces(trial)
    if not pieces.known or (mixture := mixture_of(trial, pieces, step)) is None:
        return
    first = next(iter(mixture.weights.values()))
    if all(mixture.same(own, first) for own in mixture.weights.values()):
        yield from _of_all_ranks(trial, pieces, mixture, np.mean(list(mixture.weights.values()), axis=0), broken)
    else:
        yield from of_each_rank(trial, pieces, mixture, broken)


def _all_scaled(trial: Trial, step: int) -> bool:
    """Then scales are what is tried."""
    wrong = wrong_pairs(trial, step)
    return trial.case.exact and bool(wrong) and all(factor_of(trial, *at, step) is not None for at in wrong)


# ---- the same on all ranks


@dataclass(frozen=True)
class Counting:
    """weights: of the pieces, on all ranks. fitted: of how many numbers or choices. mean: what each rank may then report."""

    cause: Cause
    weights: Rule
    fitted: int
    mean: Number | None = None


def _of_all_ranks(
    trial: Trial, pieces: Pieces, mixture: Mixture, seen: np.ndarray, broken: Broken
) -> Iterator[Hypothesis]:
    rules = [*_by_microbatch(trial, pieces, mixture, seen), *_averaged_locally(trial, pieces, mixture, seen)]
    rules += _averaged_and_lost(trial, pieces, mixture, seen)
    if not rules and trial.case.exact:
        cause = Cause("unequal contributions", _unequal_text(trial, pieces, seen))
        rules = [Counting(cause, lambda step: seen, len(np.unique(seen.round(6))))]
    reported = reported_of(trial, "reported_loss") if "reported_loss" in broken else None
    for rule in rules:
        for when, steps, more in spans(trial, mixture.step):
            of_all: Weights = lambda step, rank, rule=rule: rule.weights(step)  # type: ignore[misc]  # noqa: E731
            cause = replace(rule.cause, observed=rule.cause.observed + mixture.where(trial) + when)
            assume = partial(assuming, pieces=pieces, fqns=mixture.fqns, weights=of_all, steps=steps)
            one = Hypothesis(cause, assume, rule.fitted + more)
            if reported and rule.mean and not when and reported.is_all(rule.mean):
                one = one.and_then(partial(assuming_reports, reported=reported, number=rule.mean))
            yield one
    if mixture.step == trial.first_step and len(mixture.fqns) == len(trial.plan.shapes):
        yield from _one_step_late(trial, pieces, mixture, seen)


def _one_step_late(trial: Trial, pieces: Pieces, mixture: Mixture, seen: np.ndarray) -> Iterator[Hypothesis]:
    """Microbatches whose gradients are not in the first step: they stay on the ranks and are reduced with the next step's."""
    numbers, passes = np.array([piece.row // trial.case.local_batch for piece in pieces.all]), trial.case.passes
    counted = pieces.tokens(trial.first_step) > 0
    lost = [
        n
        for n in range(passes)
        if np.any(counted & (numbers == n)) and np.allclose(seen[counted & (numbers == n)], 0, atol=mixture.close)
    ]
    if not lost or len(lost) == passes:
        return
    late = np.isin(numbers, lost)

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.asarray(sum(pieces.mask(pieces.all[i], step) for i in np.flatnonzero(of))) for of in (~late, late)]

    def assume(trial: Trial) -> Trial:
        before: dict[int, Arrays] = {}

        def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
            own, before[step] = gradients
            return [own if step - 1 not in before else {fqn: own[fqn] + before[step - 1][fqn] for fqn in own}]

        return apart(trial, dict.fromkeys(trial.ranks, 0), [{}], owners=(0, 0), shares=shares, reduce=reduce)

    which, come = ("microbatch", "comes") if len(lost) == 1 else ("microbatches", "come")
    text = f"the gradient of {which} {', '.join(str(n + 1) for n in lost)} of {passes} {come} one step late"
    told = f"{text}: it is added to the next step's gradient"
    yield Hypothesis(Cause("unequal contributions", told), assume, 2)


def _by_microbatch(trial: Trial, pieces: Pieces, mixture: Mixture, seen: np.ndarray) -> Iterator[Counting]:
    """All samples of the n-th microbatches of all ranks have the same weight."""
    passes, numbers = trial.case.passes, np.array([piece.row // trial.case.local_batch for piece in pieces.all])
    counted = pieces.tokens(mixture.step) > 0
    if passes == 1 or not all(np.any(counted & (numbers == number)) for number in range(passes)):
        return
    each = np.array([np.mean(seen[counted & (numbers == number)]) for number in range(passes)])
    if not mixture.same(seen[counted], each[numbers][counted]):
        return
    each = np.where(np.abs(each - each.round()) <= mixture.close, each.round() + 0.0, each)
    shown, lost = ", ".join(f"{weight:.4g}" for weight in each), [n + 1 for n in range(passes) if each[n] == 0]
    text = f"microbatches contribute to the gradient with weights {shown}, requested 1 each"
    if lost:
        text = f"{_lost_text(lost, passes)} (weights {shown})"
    fitted = len(set(each.tolist()) - {0.0, 1.0}) + 1
    yield Counting(Cause("unequal contributions", text), lambda step: each[numbers], fitted)


def _lost_text(lost: Sequence[int], passes: int) -> str:
    which, do = ("microbatch", "does") if len(lost) == 1 else ("microbatches", "do")
    return f"{which} {', '.join(map(str, lost))} of {passes} {do} not contribute to the gradient"


def _averaged_and_lost(trial: Trial, pieces: Pieces, mixture: Mixture, seen: np.ndarray) -> Iterator[Counting]:
    """Two mistakes in one weight: the microbatches that are left have that of a local mean."""
    numbers = np.array([piece.row // trial.case.local_batch for piece in pieces.all])
    counted, some = pieces.tokens(mixture.step) > 0, np.abs(seen) > mixture.close
    left = set(numbers[counted & some].tolist())
    lost = [number for number in range(trial.case.passes) if number not in left]
    kept = np.isin(numbers, sorted(left))
    if not lost or not left or not np.array_equal(some[counted], kept[counted]):
        return
    found: dict[bytes, tuple[list[str], Rule]] = {}
    for unit, key in _units(trial).items():
        rule: Rule = partial(_times, kept.astype(float), partial(_if_averaged, pieces=pieces, key=key))
        table = np.stack([rule(step) for step in trial.case.steps])
        if mixture.same(seen[counted], rule(mixture.step)[counted]) and not mixture.same(table, kept.astype(float)):
            found.setdefault(table.tobytes(), ([], rule))[0].append(unit)
    which = _lost_text([number + 1 for number in lost], trial.case.passes)
    for alike, rule in found.values():
        both = ", ".join(("unequal contributions", "averaged locally"))
        yield Counting(Cause(both, f"{which}; {_local_text(' or '.join(alike))}"), rule, 2)


def _local_text(unit: str) -> str:
    return f"the loss is averaged per {unit}: each divides by its own number of valid tokens"


def _averaged_locally(trial: Trial, pieces: Pieces, mixture: Mixture, seen: np.ndarray) -> Iterator[Counting]:
    """Each divides by its own number of valid tokens, and these means are averaged."""
    found: dict[bytes, tuple[float, Rule, list[str]]] = {}
    units, counted = _units(trial), pieces.tokens(mixture.step) > 0
    for unit, key in units.items():
        usual: Rule = partial(_if_averaged, pieces=pieces, key=key)
        ratios = seen[counted] / usual(mixture.step)[counted]
        factor = float(np.median(ratios))
        if factor > 0 and mixture.same(ratios, factor):
            table = b"".join(usual(step).tobytes() for step in trial.case.steps)
            found.setdefault(table, (factor, usual, []))[2].append(unit)
    for factor, rule, alike in found.values():
        text, own = _local_text(" or ".join(alike)), units[alike[0]]
        close, count = max(1e-6, mixture.close), len({own(piece) for piece in pieces.all})
        simple, times = True, 1.0
        if math.isclose(factor, 1.0, rel_tol=close):
            text += ", not by the global one"
        elif math.isclose(factor, count, rel_tol=close):
            number = f"the number of valid tokens is not summed over {_summed_over(trial, alike[0])}"
            text, times = f"{number}: each {' or '.join(alike)} divides by its own", factor
        else:
            text, simple = f"{text}, and gradients are {times_text(factor)} that{factor_text(trial, factor)}", False
        mean = partial(_divided_by_own, trial, own, times) if alike[0].endswith("rank") else None
        yield Counting(Cause("averaged locally", text), partial(_times, factor, rule), 1 if simple else 2, mean)


def _summed_over(trial: Trial, unit: str) -> str:
    """What the valid tokens of all such units are summed over."""
    ranks = [axis for axis in DATA_AXES if getattr(trial.case.dims, axis) > 1]
    axes = {"replica": ["dp_replicate"], "place in a replica": ["dp_shard"], "cp rank": ["cp"]}
    axes |= {"rank": ranks, "dp rank": ranks, "dp and cp rank": [*ranks, "cp"], "sample": ["samples"]}
    return " and ".join(axes.get(unit, ["microbatches"]))


def _times(factor: float | np.ndarray, weights: Rule, step: int) -> np.ndarray:
    return np.asarray(factor * weights(step))


def _units(trial: Trial) -> dict[str, Key]:
    """Who may divide by tokens of its own; those of one piece are a unit."""
    size, dims = trial.case.local_batch, trial.case.dims
    found: dict[str, Key] = {}
    if dims.dp > 1:
        found["dp rank" if dims.cp > 1 else "rank"] = lambda piece: piece.rank
    if dims.dp_replicate > 1 and dims.dp_shard > 1:
        found["replica"] = lambda piece: coordinate(dims, piece.rank)["dp_replicate"]
        found["place in a replica"] = lambda piece: coordinate(dims, piece.rank)["dp_shard"]
    if dims.cp > 1:
        found["cp rank"] = lambda piece: piece.place
    if dims.dp > 1 and dims.cp > 1:
        found["dp and cp rank"] = lambda piece: (piece.rank, piece.place)
    if trial.case.passes > 1:
        if dims.dp * dims.cp > 1:
            found["microbatch of each rank"] = lambda piece: (piece.rank, piece.place, piece.row // size)
        found["microbatch"] = lambda piece: piece.row // size
    found["sample"] = lambda piece: (piece.rank, piece.row)
    return found


def _if_averaged(step: int, *, pieces: Pieces, key: Key) -> np.ndarray:
    tokens = pieces.tokens(step)
    units = [key(piece) for piece in pieces.all]
    own = {unit: sum(count for count, other in zip(tokens, units, strict=True) if other == unit) for unit in units}
    total = tokens.sum()
    return np.array([total / (len(own) * own[unit]) if own[unit] else 0.0 for unit in units])


def _divided_by_own(trial: Trial, key: Key, times: float, rank: int, step: int) -> float | None:
    shares = {_data_place(trial, share): share for share in trial.one_rank_per_share()}

    def unit(other: int) -> object:
        return key(Piece(shares[_data_place(trial, other)], 0, coordinate(trial.case.dims, other)["cp"]))

    firsts = [other for other in trial.last_stages() if coordinate(trial.case.dims, other)["tp"] == 0]
    seen = {other: losses(trial, other, step) for other in firsts}
    own = sum(tokens for other in firsts if unit(other) == unit(rank) for _, tokens in seen[other])
    total = math.fsum(loss for of_rank in seen.values() for loss, _ in of_rank)
    return times * total / max(len({unit(other) for other in firsts}) * own, 1)


def _data_place(trial: Trial, rank: int) -> tuple[int, ...]:
    at = coordinate(trial.case.dims, rank)
    return tuple(at[axis] for axis in DATA_AXES)


def _unequal_text(trial: Trial, pieces: Pieces, seen: np.ndarray) -> str:
    places = {piece.place: seen[number] for number, piece in enumerate(pieces.all)}
    if len(places) > 1 and np.allclose(seen, [places[piece.place] for piece in pieces.all], rtol=1e-6):
        shown = ", ".join(f"{places[place]:.4g}" for place in sorted(places))
        return f"tokens count unequally in the gradient: weights {shown} by cp rank, requested 1 each"
    counted = seen[pieces.tokens(trial.first_step) > 0].round(9)
    none = int(np.sum(np.abs(counted) < 1e-9))
    more = f", {none} of {len(counted)} do not count at all" if none else ""
    span = f"{counted.min():.4g} to {counted.max():.4g}"
    return f"samples count unequally in the gradient: weights {span}{more}, requested 1 each"
