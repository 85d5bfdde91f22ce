"""What the weights of pieces in a gradient mean: each row of a table looks at them, and says the rule for every step.

A rule is read off the first wrong step, where parameters are still right; the checks judge all steps under it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.core.causes import assume
from harness.core.causes.assume import clipping_apart, summed, train_apart
from harness.core.causes.contributions import Number, Reading, norm_of_all, scaled_alike
from harness.core.causes.differences import first_wrong_step, seen_gradients, wrong_pairs
from harness.core.causes.factors import factor_text, times_text
from harness.core.causes.hypothesis import Broken, Hypothesis, verdict_of
from harness.core.causes.pieces import Fit, Pieces, Weights, assuming, chunks_of_the_loss, fit_of
from harness.core.causes.words import Arrays, Pair, where_text
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import take
from harness.core.judge.losses import losses
from harness.core.judge.norms import norm_of
from harness.core.judge.result import Cause, Verdict
from harness.core.judge.tolerance import clip_coefficient, relative_difference
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.hypotheses.backward import silent_axes, silent_text
from harness.hypotheses.other_groups import summed_over_others
from harness.reference.distance import best_fit

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch


def sums_of_pieces(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken and not trial.assumption.references else None
    if step is None or scaled_alike(trial, step) or not (pieces := Pieces(trial)).known:
        return
    gradients = pieces.gradients(step)
    fit = fit_of(trial, pieces, gradients, step) or _fit_of_chunks(trial, step)
    if fit is None:
        yield from _exchanged(trial, pieces, gradients, step)
        return
    rows = (_of_microbatches, _averaged_locally, _not_reduced, summed_over_others)
    found = [reading for row in rows for reading in row(fit)]
    for reading in found or _of_no_rule(fit):
        yield from reading.hypotheses(trial, step)
    yield from _clipped_while_adding_up(fit)


def _fit_of_chunks(trial: Trial, step: int) -> Fit | None:
    if (chunks := chunks_of_the_loss(trial, step)) == 1:
        return None
    pieces = Pieces(trial, chunks)
    return fit_of(trial, pieces, pieces.gradients(step), step)


def _reading(
    fit: Fit, cause: Cause, weights: Weights, fitted: int = 1, number: Number | None = None, *, free: bool = False
) -> Reading:
    """free: whether some weight may be any number."""
    under = partial(assuming, pieces=fit.pieces, fqns=fit.fqns, weights=weights)
    return Reading(cause, fit.fqns, lambda steps: partial(under, steps=steps), fitted, number, least=1 + free)


# ---- the same on all ranks


def _of_microbatches(fit: Fit) -> Iterator[Reading]:
    """Read one weight a microbatch: all pieces of the n-th microbatches of all ranks count alike. One that is not in the first
    step's gradient may come with the next step's."""
    seen, numbers, passes, at = fit.alike, fit.pieces.microbatch, fit.trial.case.passes, fit.counted
    if seen is None or passes == 1 or len({*numbers[at].tolist()}) < passes:
        return
    each = np.array([np.mean(seen[at & (numbers == number)]) for number in range(passes)])
    if not fit.same(seen[at], each[numbers][at]):
        return
    each = np.where(np.abs(each - each.round()) <= fit.close, each.round() + 0.0, each)
    lost = tuple((np.flatnonzero(each == 0) + 1).tolist())
    text = f"{_some(fit, lost)} not contribute to the gradient" if lost else ""
    hint = "weights " + ", ".join(number_text(weight, 4) for weight in each)
    cause = Cause("unequal contributions", text or "microbatches contribute unequally to the gradient", hint=hint)
    cause = replace(cause, details=(("microbatches", lost), ("weights", tuple(each.tolist()))))
    free = len({*each.tolist()} - {0.0, 1.0})
    yield _reading(fit, cause, lambda step, rank: each[numbers], free + 1, free=free > 0)
    first = fit.step == fit.trial.first_step and len(fit.fqns) == len(fit.trial.plan.shapes)
    if first and 0 < len(lost) < passes:
        late, text = np.isin(numbers + 1, lost), f"{_some(fit, lost)} not count until the next step's gradient"
        cause = Cause("unequal contributions", text, details=(("microbatches", lost), ("steps late", 1)))
        yield _reading(fit, cause, lambda step, rank: np.stack([~late, late]).astype(float), 2)


def _some(fit: Fit, numbers: Sequence[int]) -> str:
    """Return which: microbatches 1, 3 of 4 do."""
    one = len(numbers) == 1
    which = f"microbatch{'es' * (not one)} {', '.join(map(str, numbers))}"
    return f"{which} of {fit.trial.case.passes} {'does' if one else 'do'}"


def _of_no_rule(fit: Fit) -> Iterator[Reading]:
    """Read any weights, where no noise can have made them."""
    if fit.trial.case.exact:
        seen = np.stack([*fit.weights.values()]).round(9)[:, fit.counted] + 0.0
        least, most, once = float(seen.min()), float(seen.max()), np.ones(len(fit.counted))
        hint = f"weights {number_text(least, 4)} to {number_text(most, 4)}"
        details = (("least weight", least), ("largest weight", most))
        cause = Cause("unequal contributions", "samples count unequally in the gradient", hint=hint, details=details)
        weights = lambda step, rank: fit.weights.get(rank, once)  # noqa: E731
        yield _reading(fit, cause, weights, len(np.unique(seen.round(6))), free=True)


# ---- means that are taken in the wrong place


class Unit(NamedTuple):
    """What may divide by its own tokens."""

    name: str
    axes: tuple[str, ...]
    """It is at one place along these axes."""
    samples: int
    """How many of a rank's are one."""
    chunk: bool = False
    """Whether each chunk of the loss is one."""


def _units(trial: Trial, chunks: int) -> Iterator[Unit]:
    passes, size, axes = trial.case.passes, trial.case.local_batch, _axes(trial)
    for some in _choices(axes):
        yield Unit(f"{' and '.join(some)} rank", some, size * passes)
    for some in dict.fromkeys(((), axes)) if passes > 1 else ():
        yield Unit("microbatch" + " of each rank" * bool(some), some, size)
    yield Unit("sample", tuple(axis for axis in axes if axis != "cp"), 1)
    if chunks > 1:
        yield Unit("chunk of each microbatch", axes, size, chunk=True)


def _axes(trial: Trial) -> tuple[str, ...]:
    """Return the axes along which ranks receive other tokens."""
    return tuple(axis for axis in ("dp_shard", "dp_replicate", "cp") if getattr(trial.case.dims, axis) > 1)


def _numbers(pieces: Pieces, unit: Unit) -> np.ndarray:
    """Return the number of each piece's unit."""
    rows = np.column_stack([pieces.places(unit.axes), pieces.row // unit.samples, pieces.chunk * unit.chunk])
    return np.unique(rows, axis=0, return_inverse=True)[1].ravel()


def _averaged_locally(fit: Fit) -> Iterator[Reading]:
    """Read means per unit: each divides by its own number of valid tokens, and these means are averaged, or summed. They are
    those of all units, or of a microbatch, which then counts by its tokens."""
    trial, pieces, found = fit.trial, fit.pieces, dict[bytes, tuple[list[Unit], np.ndarray, np.ndarray]]()
    everything, size = np.zeros(len(pieces.all), dtype=int), trial.case.local_batch
    for unit in _units(trial, pieces.chunks):
        of = _numbers(pieces, unit)
        within = [everything, *[_numbers(pieces, Unit("", _axes(trial), size))] * unit.chunk]
        for whole in within:
            table = np.stack([_if_averaged(pieces, of, whole, 1, step, 0) for step in trial.case.steps])
            if not fit.same(table, 1.0):  # else it changes nothing
                found.setdefault(table.tobytes(), ([], of, whole))[0].append(unit)
    for alike, of, whole in found.values():
        names, axes, parts = tuple(unit.name for unit in alike), alike[0].axes, len({*whole.tolist()})
        none, usual = partial(_if_averaged, pieces, of, whole, 0), partial(_if_averaged, pieces, of, whole, 1)
        count = len({*of.tolist()}) // parts
        if (times := fit.factor(none, usual, (1, count))) is None:
            continue
        text = f"the loss is averaged per {' or '.join(names)}"
        hint = "each divides by its own number of valid tokens" + ", which is not summed" * (times == count)
        hint += ", and microbatches count by their tokens" * (parts > 1)
        hint += f"; gradients are {times_text(times)} that{factor_text(trial, times)}" * (times not in (1, count))
        cause = Cause(
            "averaged locally", text, hint=hint, details=(("units", names), ("axes", axes), ("factor", times))
        )
        of_rank = alike[0].samples == trial.case.local_batch * trial.case.passes and not alike[0].chunk
        number = partial(_divided_by_own, trial, axes, 1 if times == count else count) if of_rank else None
        weights = partial(_if_averaged, pieces, of, whole, times)
        free = times not in (1, count)
        yield _reading(fit, cause, weights, 1 + free, number, free=free)


def _if_averaged(
    pieces: Pieces, units: np.ndarray, whole: np.ndarray, times: float, step: int, rank: int
) -> np.ndarray:
    """Return how often pieces count then. units, whole: by piece, the number of its unit, and of what these are a part of."""
    tokens = pieces.tokens(step)
    own, of_whole = np.bincount(units, tokens), np.bincount(whole, tokens)
    count = np.array([len({*units[whole == one].tolist()}) for one in range(len(of_whole))])
    return np.asarray(times * (of_whole / count)[whole] / np.maximum(own, 1)[units])


def _divided_by_own(trial: Trial, axes: Sequence[str], units: int, rank: int, step: int, right: float) -> float:
    """Return all losses, divided by so many times the valid tokens of ranks at one place with this one."""
    seen = {one: losses(trial, one, step) for one in trial.ranks if coordinate(trial.case.dims, one)["tp"] == 0}
    place = _place(trial, rank, axes)
    own = sum(tokens for one in seen if _place(trial, one, axes) == place for _, tokens in seen[one])
    return sum(loss for of_rank in seen.values() for loss, _ in of_rank) / max(units * own, 1)


def _place(trial: Trial, rank: int, axes: Sequence[str]) -> list[int]:
    return [coordinate(trial.case.dims, rank)[axis] for axis in axes]


# ---- not the same on all ranks


def _not_reduced(fit: Fit) -> Iterator[Reading]:
    """Read shares that are not added: of all microbatches or some, only those that ranks at one place along axes received."""
    trial, pieces = fit.trial, fit.pieces
    microbatches = [*_choices(range(1, trial.case.passes + 1))] if fit.alike is None else []
    for missing, chosen in itertools.product(_choices(_axes(trial)), microbatches):
        others, at = ~np.isin(pieces.microbatch + 1, chosen), pieces.places(missing)
        own = {rank: (at == _place(trial, rank, missing)).all(axis=1) & ~others for rank in trial.ranks}
        known = (1, math.prod(getattr(trial.case.dims, axis) for axis in missing))  # not divided either
        times = fit.factor(partial(_counting, others, own, 0), partial(_counting, ~others & others, own, 1), known)
        if times is not None:
            cause, silent = _cause(fit, missing, chosen, times, known)
            found = _reading(fit, cause, partial(_counting, others, own, times), free=times not in known)
            yield replace(found, assume=partial(_not_moved, found, silent))


def _counting(others: np.ndarray, own: Mapping[int, np.ndarray], times: float, step: int, rank: int) -> np.ndarray:
    return np.asarray(others + times * own[rank])


def _choices(of: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every choice of one or more of these, the smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(of, count + 1) for count in range(len(of)))


def _cause(
    fit: Fit, missing: tuple[str, ...], chosen: tuple[int, ...], times: float, known: Sequence[float]
) -> tuple[Cause, list[str]]:
    """Return the cause, and the axes over which nothing ran."""
    trial, some = fit.trial, chosen if len(chosen) < fit.trial.case.passes else ()
    silent = {a: op for a, op in silent_axes(trial, fit.step).items() if a.removesuffix("_cp") in missing}
    moved = verdict_of(trial, "traffic") is Verdict.PASS
    hints = silent_text(trial, fit.step, silent)
    who = "rank" if {*missing} == {*_axes(trial)} else f"place along {' and '.join(missing)}"
    hints = hints or [f"each {who} adds only its own" + ", though collectives ran" * moved]
    hints += [f"its own counts {times_text(times)}{factor_text(trial, times, False)}"] * (times not in known)
    of = f" of {_some(fit, some).rpartition(' ')[0]}" if some else ""
    text = f"gradients{of} are not reduced over {' and '.join(missing)}"
    details = (("axes", missing), ("microbatches", some), ("factor", times))
    return Cause("gradients not reduced", text, hint=", ".join(hints), details=details), [*silent]


def _not_moved(reading: Reading, axes: Sequence[str], steps: Sequence[int]) -> Callable[[Trial], Trial]:
    """Assume in addition that nothing is to move over these axes."""
    left_out = frozenset(itertools.product(axes, steps))

    def both(trial: Trial) -> Trial:
        then = reading.assume(steps)(trial)
        return replace(then, plan=replace(then.plan, unreduced=then.plan.unreduced | left_out))

    return both


# ---- clipped more than once a step


def _clipped_while_adding_up(fit: Fit) -> Iterator[Hypothesis]:
    """Suppose that the accumulated gradient is clipped after every microbatch: of all ranks, or on each rank its own."""
    trial, pieces, passes = fit.trial, fit.pieces, fit.trial.case.passes
    last = fit.counted & (pieces.microbatch == passes - 1)
    once = passes == 1 or trial.case.training.max_norm is None
    if once or fit.alike is None or not fit.same(fit.alike[last], 1.0):
        return
    of = defaultdict[tuple[int, int], list[int]](list)
    for number, (rank, _, place, _) in enumerate(pieces.all):
        of[rank, place].append(number)
    whose = [("", [[*range(len(pieces.all))]]), ("each rank clips its own before they are reduced", [*of.values()])]
    for (hint, chains), twice in itertools.product(whose[: len(of)], (False, True)):
        times = "after every microbatch" + " and once more before the step" * twice
        details = (("each rank", bool(hint)), ("once more", twice))
        text = f"accumulated gradients are clipped {times}"
        cause = Cause("clipped in every microbatch", text, "", "once a step", hint, details=details)
        yield Hypothesis(cause, partial(_clipping, pieces, chains, twice))


def _clipping(pieces: Pieces, chains: Sequence[Sequence[int]], twice: bool, trial: Trial) -> Trial:
    """Assume that each chain adds up its own pieces, which are as much larger as they are averaged over chains.
    twice: their sum is clipped, and what comes of that again, whose norm is reported."""
    passes, limit = trial.case.passes, trial.case.training.max_norm
    parts = [[n for n in chain if pieces.microbatch[n] == number] for chain in chains for number in range(passes)]

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.asarray(sum(pieces.mask(number, step) for number in part)) for part in parts]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        sums = []
        for first in range(0, len(gradients), passes):
            held = gradients[first]
            for more in gradients[first + 1 : first + passes]:
                by = clip_coefficient(len(chains) * norm_of_all(held), limit)
                held = {fqn: more[fqn] + held[fqn].dtype.type(by) * held[fqn] for fqn in held}
            sums.append(held)
        return summed(sums)[:1]

    def clipped(norm: float) -> float:
        return norm * clip_coefficient(norm, limit)

    def by(norm: float) -> float:
        return clip_coefficient(norm, limit) * clip_coefficient(clipped(norm), limit)

    norms = {step: norm_of(trial, step) for step in trial.case.steps}
    given = {"given": lambda step, gradients, norm, _: {fqn: by(norm) * g for fqn, g in gradients.items()}}
    words, owners = [given if twice else {}], [0] * len(parts)
    other = assume.apart(trial, {}, words, owners=owners, shares=shares, reduce=reduce)
    if not twice:
        return other
    assumed = AssumedOptimizer(given=lambda rank, step, fqn, gradient: by(norms[step]) * gradient)
    return other.assuming(assumed, reports={"grad_norm": lambda rank, step: clipped(norms[step])})


# ---- another parameter of the partner


def _exchanged(trial: Trial, pieces: Pieces, gradients: list[Arrays], step: int) -> Iterator[Hypothesis]:
    """Find the parameter whose gradient a rank of two replicas takes of its partner, in place of the right one."""
    wrong = wrong_pairs(trial, step)
    if trial.case.dims.dp_replicate != 2 or not trial.case.exact or {rank for rank, _ in wrong} == {*trial.ranks}:
        return
    replicas = pieces.places(("dp_replicate",))[:, 0]
    own = [summed([gradients[n] for n in np.flatnonzero(replicas == one)])[0] for one in (0, 1)]
    found = {at: added for at in wrong if (added := _added(trial, *at, step, own))}
    if len(found) == len(wrong):
        (rank, fqn), (other, factor) = next(iter(found.items()))
        hint = f"rank {rank} adds {times_text(factor)} its partner's {other} to its {fqn}"
        details = (("rank", rank), ("parameter", fqn), ("adds", other), ("factor", factor))
        text = "tensors are swapped in the reduction over dp_replicate"
        cause = Cause("reductions exchanged", text, where_text(trial, wrong), hint=hint, details=details)
        yield Hypothesis(cause, partial(_adding_another, found, step), 1 + len({times for _, times in found.values()}))


def _added(trial: Trial, rank: int, fqn: str, step: int, own: list[Arrays]) -> tuple[str, float] | None:
    """Return the partner's parameter that is added, and how often. own: by replica, what its samples give."""
    seen = seen_gradients(trial, rank, step)[fqn]
    for other in trial.plan.shapes:
        mine, theirs = _two(trial, rank, fqn, other, own)
        if np.any(theirs):
            factor = best_fit(seen - mine, theirs)
            if relative_difference(seen - mine, factor * theirs) < 1e-9:
                return other, round(factor, 9)
    return None


def _two(trial: Trial, rank: int, fqn: str, other: str, of: list[Arrays]) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's slice, and its partner's of another parameter in that shape, or zeros. of: by replica."""
    places = {one: coordinate(trial.case.dims, one)["dp_replicate"] for one in trial.plan.peers(rank, "dp_replicate")}
    partner = next(one for one in places if one != rank)
    parts = [(one, name, trial.slice_of(one, name)) for one, name in ((rank, fqn), (partner, other))]
    own, theirs = (np.zeros(0) if part is None else take(of[places[one]][name], part) for one, name, part in parts)
    return own, theirs.reshape(own.shape) if theirs.size == own.size else np.zeros_like(own)


def _adding_another(found: Mapping[Pair, tuple[str, float]], since: int, trial: Trial) -> Trial:
    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        total = [{fqn: value.copy() for fqn, value in own.items()} for own in summed(gradients)]
        for (rank, fqn), (other, factor) in found.items() if step >= since else ():
            (own, theirs), (there, _) = (_two(trial, rank, fqn, other, of) for of in (gradients, total))
            there[...] = own + factor * theirs
        return total

    return clipping_apart(train_apart(trial, "dp_replicate", reduce))
