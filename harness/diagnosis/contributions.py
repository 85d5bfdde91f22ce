"""What ranks received contributes unequally to gradients: microbatches lost, means taken in the wrong place, no reduction.

How often each piece counts is fitted in the first wrong step; what is proposed is a rule for it, which the laws judge in all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis.assume import apart
from harness.diagnosis.backward import silent_axes
from harness.diagnosis.differences import factor_of, first_wrong_step, spans, wrong_pairs
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import Mixture, Piece, Pieces, Weights, assuming, mixture_of
from harness.diagnosis.reports import Number, assuming_reports, reported_of
from harness.diagnosis.words import Arrays, groups_text, in_parameters, rank_words, traffic_lines
from harness.evidence.text import ranks_text
from harness.judge.losses import losses
from harness.judge.result import Cause, Lines
from harness.judge.trial import Trial
from harness.plan.grid import coordinate, groups
from harness.plan.slices import numel
from harness.plan.traffic.flow import Flow
from harness.spec.dims import AXES

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

DATA_AXES = ("dp_shard", "dp_replicate")
Key = Callable[[Piece], object]
Flows = Mapping[int, tuple[Flow, ...]]
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
        yield from _of_each_rank(trial, pieces, mixture, broken)


def _all_scaled(trial: Trial, step: int) -> bool:
    """Then scales are what is tried."""
    wrong = wrong_pairs(trial, step)
    return trial.case.exact and bool(wrong) and all(factor_of(trial, *at, step) is not None for at in wrong)


def _where(trial: Trial, mixture: Mixture) -> str:
    """Nothing where it is every parameter."""
    return "" if len(mixture.fqns) == len(trial.plan.shapes) else " " + in_parameters(trial, mixture.fqns)


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
            cause = replace(rule.cause, observed=rule.cause.observed + _where(trial, mixture) + when)
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
        text = _local_text(" or ".join(alike))
        alone = math.isclose(factor, 1.0, rel_tol=max(1e-6, mixture.close))
        more = f", and gradients are {times_text(factor)} that{factor_text(trial, factor)}"
        text += ", not by the global one" if alone else more
        mean = partial(_divided_by_own, trial, units[alike[0]]) if alike[0].endswith("rank") else None
        cause = Cause("averaged locally", text)
        yield Counting(cause, partial(_times, factor, rule), 1 if alone else 2, mean)


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


def _divided_by_own(trial: Trial, key: Key, rank: int, step: int) -> float | None:
    shares = {_data_place(trial, share): share for share in trial.one_rank_per_share()}

    def unit(other: int) -> object:
        return key(Piece(shares[_data_place(trial, other)], 0, coordinate(trial.case.dims, other)["cp"]))

    firsts = [other for other in trial.last_stages() if coordinate(trial.case.dims, other)["tp"] == 0]
    seen = {other: losses(trial, other, step) for other in firsts}
    own = sum(tokens for other in firsts if unit(other) == unit(rank) for _, tokens in seen[other])
    total = math.fsum(loss for of_rank in seen.values() for loss, _ in of_rank)
    return total / max(len({unit(other) for other in firsts}) * own, 1)


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


# ---- another one on each rank


def _of_each_rank(trial: Trial, pieces: Pieces, mixture: Mixture, broken: Broken) -> Iterator[Hypothesis]:
    """Of all microbatches or of some, only those that ranks with the same place along some axes received."""
    axes = [axis for axis in (*DATA_AXES, "cp") if getattr(trial.case.dims, axis) > 1]
    passes = trial.case.passes
    choices = [m for count in range(1, passes + 1) for m in itertools.combinations(range(passes), count)]
    left_out = [some for count in range(1, len(axes) + 1) for some in itertools.combinations(axes, count)]
    for missing, chosen in itertools.product(left_out, choices):
        table = _own_only(trial, pieces, missing, chosen)
        if (factor := _factor(mixture, table, pieces)) is not None:
            found = list(_not_reduced(trial, pieces, mixture, missing, chosen, factor, table))
            yield from found
            if "traffic" in broken and len(mixture.fqns) < len(trial.plan.shapes):
                yield from (one.and_then(partial(_moving_less, mixture.fqns)) for one in found)


Table = dict[int, tuple[np.ndarray, np.ndarray]]
"""By rank, the pieces that are not reduced and count there, and those that are not reduced and do not."""


def _own_only(trial: Trial, pieces: Pieces, missing: tuple[str, ...], chosen: tuple[int, ...]) -> Table:
    def place(rank: int, **cp: int) -> tuple[int, ...]:
        at = coordinate(trial.case.dims, rank) | cp
        return tuple(at[axis] for axis in missing)

    of_chosen = np.array([piece.row // trial.case.local_batch in chosen for piece in pieces.all])
    found = {}
    for rank in trial.ranks:
        own = np.array([place(piece.rank, cp=piece.place) == place(rank) for piece in pieces.all])
        found[rank] = (of_chosen & own, of_chosen & ~own)
    return found


def _factor(mixture: Mixture, table: Table, pieces: Pieces) -> float | None:
    """How often what a rank adds of its own counts; None if weights are not so."""
    counted = pieces.tokens(mixture.step) > 0
    values = np.concatenate([seen[table[rank][0] & counted] for rank, seen in mixture.weights.items()])
    factor = float(np.median(values)) if values.size else 0.0
    if abs(factor - round(factor)) <= mixture.close:
        factor = float(round(factor))
    expected = {rank: _weights(table[rank], factor) for rank in mixture.weights}
    alike = all(mixture.same(seen[counted], expected[rank][counted]) for rank, seen in mixture.weights.items())
    return factor if alike and factor else None


def _weights(sets: tuple[np.ndarray, np.ndarray], factor: float) -> np.ndarray:
    own, others = sets
    return np.where(own, factor, np.where(others, 0.0, 1.0))


def _not_reduced(
    trial: Trial,
    pieces: Pieces,
    mixture: Mixture,
    missing: tuple[str, ...],
    chosen: tuple[int, ...],
    factor: float,
    table: Table,
) -> Iterator[Hypothesis]:
    passes, over, held = trial.case.passes, " and ".join(missing), _holds(trial, missing)
    silent = silent_axes(trial, mixture.step)
    alone = {axis: op for axis, op in silent.items() if axis.split("_cp")[0] in missing}
    which = f"microbatch{'es' * (len(chosen) > 1)} {', '.join(str(m + 1) for m in chosen)}" * (len(chosen) < passes)
    if which:
        text = f"gradients of {which} of {passes} are not reduced over {over}{{when}}: each rank adds only its own"
    elif alone:
        texts = [f"no {op} ran over {groups_text(trial.plan.groups[axis])}" for axis, op in alone.items()]
        text = f"gradient reduction missing over {over}{{when}}: {', '.join(texts)}"
    else:
        text = f"gradient reduction over {over} has no effect{{when}}: {held}, though collectives ran"
    if where := _where(trial, mixture):
        text = f"gradients are not reduced over {over}{{when}}{where}: {held}"
    if factor == math.prod(getattr(trial.case.dims, axis) for axis in missing):
        text += f"; each rank's own share counts {times_text(factor)}, as if not divided either"
    elif factor != 1:
        text += f"; each rank's own share counts {times_text(factor)}{factor_text(trial, factor, everywhere=False)}"
    weights: Weights = lambda step, rank: _weights(table[rank], factor)  # noqa: E731
    kind = "gradients not reduced"
    for when, steps, more in spans(trial, mixture.step):
        cause = Cause(kind, text.format(when=when))
        assume = partial(assuming, pieces=pieces, fqns=mixture.fqns, weights=weights, steps=steps)
        hypothesis = Hypothesis(cause, assume, 1 + more, _lines(trial, missing, f" of {which}" if which else ""))
        if alone:
            hypothesis = _without_traffic(hypothesis, tuple(alone), steps)
        yield hypothesis


def _without_traffic(hypothesis: Hypothesis, axes: tuple[str, ...], steps: Sequence[int]) -> Hypothesis:
    """What is not reduced does not move."""
    left_out = frozenset(itertools.product(axes, steps))
    return hypothesis.and_then(lambda t: replace(t, plan=replace(t.plan, unreduced=t.plan.unreduced | left_out)))


def _moving_less(fqns: Sequence[str], trial: Trial) -> Trial:
    """Gradients of these parameters do not move."""
    plan = trial.plan

    def of(flows: Flows) -> Flows:
        found = {}
        for rank, own in flows.items():
            sizes = {fqn: numel(part) for fqn, part in plan.slices[rank].items()}
            whole, left = sum(sizes.values()), sum(size for fqn, size in sizes.items() if fqn not in fqns)
            less = (replace(f, bytes=f.bytes * left // whole) if f.role == "gradients" else f for f in own)
            found[rank] = tuple(less)
        return found

    return replace(trial, plan=replace(plan, flows=of(plan.flows), even_flows=of(plan.even_flows)))


def _reached(trial: Trial, rank: int, missing: tuple[str, ...]) -> list[int]:
    """The ranks whose samples its gradient holds."""
    along = [axis for axis in AXES if axis not in missing]
    peers = next(group for group in groups(trial.case.dims, *along) if rank in group)
    return [other for other in trial.one_rank_per_share() if other in peers]


def _holds(trial: Trial, missing: tuple[str, ...]) -> str:
    rank = min(trial.ranks)
    if missing == ("cp",):
        own = coordinate(trial.case.dims, rank)["cp"]
        return f"rank {rank}'s gradient holds only the tokens of cp rank {own} of {trial.case.dims.cp}"
    return f"rank {rank}'s gradient holds only the samples of {rank_words(_reached(trial, rank, missing))}"


def _lines(trial: Trial, missing: tuple[str, ...], which: str) -> Lines:
    held = {rank: ranks_text(_reached(trial, rank, missing)) for rank in sorted(trial.ranks)[:2]}
    wanted = f"expected {ranks_text(trial.one_rank_per_share())}"
    texts = (f"rank {r}'s gradient{which} holds the samples of ranks {ranks}, {wanted}" for r, ranks in held.items())
    return (*(("samples", text) for text in texts), *traffic_lines(trial))
