"""Whose value is it? Which tensor on record a wrong one is: as it is, scaled, rounded, transposed or with rows moved.

A wrong tensor, or its wrong rows, is compared with the right one, changed in one way. It is also compared with other tensors on
record: of another parameter, another rank, an earlier step, the weights. The answer must fit everything that is wrong in the
first wrong step. Then the reference is trained as if it were so in every step, and the checks judge.

Equality may be chance. So constants and whole numbers match nothing, and a tensor that is two others at once matches
neither. A tensor of few entries is not compared; a less close match needs more entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.core.causes.assume import another_reference, clipping_apart, summed, train_apart
from harness.core.causes.differences import first_wrong_step, seen_gradients, spans, wrong_pairs
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays, Pair, from_step, in_order, where_text
from harness.core.evidence.text import number_text, positions_text
from harness.core.judge.contents import ROUNDED, take
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import Slice
from harness.reference.distance import best_fit

Apply = Callable[[np.ndarray], np.ndarray]
CLOSE = 1e-9
"""How far values that are the same may differ in float64, relative to the largest."""
DIGITS = 30
"""Digits that all entries of a tensor match together: fewer may match by chance."""
SURE = 1e-6
"""How close rows must be matched to say in which order they are."""


@dataclass(frozen=True)
class Source:
    """A tensor on record that a wrong one may be."""

    what: str
    """gradient, or weight: the parameter as the step begins with it."""
    fqn: str
    """The parameter that it is of."""
    part: Slice
    """Which slice of that."""
    back: int = 0
    """How many steps before the wrong one it is of."""


@dataclass(frozen=True)
class Relation:
    """What a wrong tensor is: `factor` times a source or what is right, changed; `added` to what is right, if it is so."""

    change: str = ""
    """transposed, rounded to bfloat16, rows moved by 1, ...; empty: as it is."""
    source: Source | None = None
    """None: of what is right."""
    factor: float = 1.0
    """How often."""
    added: bool = False
    """Whether what is right is there as well."""
    apply: Apply = lambda value: value
    """The change."""

    def value(self, right: np.ndarray, source: np.ndarray | None) -> np.ndarray:
        """What the tensor is, from what is right and from the source."""
        own = self.apply(right if source is None else source)
        return np.asarray((right if self.added else 0) + self.factor * own)

    def words(self, fqn: str, part: Slice) -> str:
        """Say whose value this slice has."""
        if self.factor == 0:
            return "zero"
        times = "" if math.isclose(self.factor, 1) else f"{number_text(self.factor)} times "
        change = f", {self.change}" * bool(self.change)
        if self.source is None:
            return f"{times}the right ones{change}"
        return f"{'the right ones and ' * self.added}{times}{_source_words(self.source, fqn, part)}{change}"


def _source_words(source: Source, fqn: str, part: Slice) -> str:
    own = "the same parameter" if source.fqn == fqn else source.fqn
    own += " as another rank holds it" * (source.fqn == fqn and source.part != part)
    when = {0: "", 1: " of the step before"}.get(source.back, f" of {source.back} steps before")
    return f"{'those' if source.what == 'gradient' else f'the {source.what}'} of {own}{when}"


# ---- one tensor


def relation_of(
    value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[Source, np.ndarray]], close: float = CLOSE
) -> Relation | None:
    """Return what a wrong tensor is; None where that is nothing on record, or more than one thing."""
    few = value.size * -math.log10(min(close, 1)) < DIGITS
    if few or is_count(value) or not np.isfinite(value).all() or alike(value, right, close):
        return None
    for change, apply in changes(value, right, close):
        return Relation(change, apply=apply)
    if value.shape != right.shape:
        return None
    if (factor := _factor(value, right, close)) is not None:
        return Relation(factor=factor)
    others = [(source, array) for source, array in pool if array.shape == value.shape and not is_count(array)]
    others = [(source, array) for source, array in others if not alike(array, right, close)]
    found = [one for source, array in others if (one := _is_source(value, source, array, close))]
    if not found:
        rest = value - right
        times = ((source, _factor(rest, array, max(close, 1e-7))) for source, array in others)
        found = [Relation(source=source, factor=by, added=True) for source, by in times if by is not None]
    return found[0] if len(found) == 1 else None


def _is_source(value: np.ndarray, source: Source, array: np.ndarray, close: float) -> Relation | None:
    if (factor := _factor(value, array, close)) is not None:
        return Relation(source=source, factor=factor)
    return next((Relation(change, source, apply=apply) for change, apply in changes(value, array, close)), None)


def changes(value: np.ndarray, wanted: np.ndarray, close: float = CLOSE) -> Iterator[tuple[str, Apply]]:
    """Yield what makes the one of the other, which it is not as it is."""
    if alike(value, wanted, close):
        return
    for dtype, rounded in ROUNDED.items():
        if np.array_equal(value, rounded(value)) and alike(value, rounded(wanted), close):
            yield f"rounded to {dtype}", rounded
    if value.ndim == 2 and alike(value, wanted.T, close):
        yield "transposed", lambda array: array.T
    if value.shape == wanted.shape:
        names = ("entries",) if value.ndim == 1 else ("rows", "columns")[: value.ndim]
        for axis, name in enumerate(names):
            if (order := _order(np.moveaxis(value, axis, 0), np.moveaxis(wanted, axis, 0), close)) is not None:
                yield _moved(order, name), partial(np.take, indices=order, axis=axis)


def _order(value: np.ndarray, wanted: np.ndarray, close: float) -> np.ndarray | None:
    """Where the rows of the one are in the other; None where they are not all there, once."""
    ours, theirs = (a.reshape(len(a), -1).astype(np.float64) for a in (value, wanted))
    by = int(np.abs(ours).max(axis=1).argmax()) - int(np.abs(theirs).max(axis=1).argmax())
    if alike(ours, np.roll(theirs, by, axis=0), close):
        return np.roll(np.arange(len(theirs)), by)
    if close > SURE:
        return None
    line = np.sin(np.arange(1.0, 1 + theirs.shape[1]))  # rows in the order of where they lie along any one line
    order = np.empty(len(theirs), int)
    order[np.argsort(ours @ line, kind="stable")] = np.argsort(theirs @ line, kind="stable")
    return order if alike(ours, theirs[order], close) else None


def _moved(order: np.ndarray, name: str) -> str:
    by = int(-order[0] % len(order))
    cyclic = np.array_equal(order, np.roll(np.arange(len(order)), by))
    return f"{name} moved by {by}" if cyclic else f"{name} in another order"


def is_constant(value: np.ndarray) -> bool:
    return bool(value.size == 0 or np.all(value == value.flat[0]))


def is_count(value: np.ndarray) -> bool:
    """Return whether a tensor holds whole numbers alone, as a counter does, or is constant: it equals others by chance."""
    return is_constant(value) or bool(np.array_equal(value, np.round(value)))


def alike(one: np.ndarray, other: np.ndarray, close: float) -> bool:
    """Whether these are the same within the bound, relative to the largest entry."""
    if one.shape != other.shape or not one.size:
        return one.shape == other.shape
    return float(np.max(np.abs(one - other))) <= close * float(np.max(np.abs(other)))


def _factor(value: np.ndarray, of: np.ndarray, close: float) -> float | None:
    """How often the one is the other: a whole number or one part of a whole, where it is that within the bound."""
    factor = best_fit(value, of)
    if not abs(factor) > 1e-6 or not alike(value, factor * of, close):
        return None
    plain = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return plain if math.isclose(factor, plain, rel_tol=close) else factor


# ---- gradients


@dataclass(frozen=True)
class Wrong:
    """A wrong tensor: the rows that are wrong, and what these are."""

    rows: np.ndarray | slice
    """Rows of its first dim; all of them where one relation holds throughout."""
    part: Slice
    """Which slice of the parameter a rank has; all of it, where the slices of all ranks are one tensor changed."""
    relation: Relation

    @property
    def is_scaled(self) -> bool:
        """Whether all of it is a multiple of what is right."""
        return isinstance(self.rows, slice) and self.relation.source is None and not self.relation.change

    def words(self, fqn: str) -> str:
        rows = () if isinstance(self.rows, slice) else self.rows + self.part[0][0]
        which = f"row{'s' * (len(rows) > 1)} {positions_text(np.asarray(rows))} of " if len(rows) else ""
        return f"{which}gradients {'is' if len(rows) == 1 else 'are'} {self.relation.words(fqn, self.part)}"


def another_tensor(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Gradients that are another tensor. Whole ones that are a multiple of what is right are `contributions`'."""
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or trial.assumption.references:
        return
    found: dict[Pair, Wrong] = {}
    for at in wrong_pairs(trial, step):
        if (one := _wrong_slice(trial, at, step) or _wrong_whole(trial, at, step)) is None:
            return
        found[at] = one
    if not found or all(one.is_scaled for one in found.values()):
        return
    backs = {one.relation.source.back for one in found.values() if one.relation.source}
    for when, steps, more in spans(trial, step):
        if steps == [1] and any(backs):  # zeros of one step alone are nobody's
            continue
        cause = _cause(trial, found, step, when)
        yield Hypothesis(cause, partial(_assuming, found=found, steps=steps), 1 + more)
    if any(backs) and step < trial.case.steps[-1]:
        cause = _cause(trial, found, step, f" {from_step(trial, step)}, and stay so")
        cause = replace(cause, details=(*cause.details, ("stay", True)))
        steps = [other for other in trial.case.steps if other >= step]
        yield Hypothesis(cause, partial(_assuming, found=found, steps=steps, stay=True), 2)


def _wrong_slice(trial: Trial, at: Pair, step: int) -> Wrong | None:
    """What a rank's slice of a gradient is."""
    rank, fqn = at
    if (part := trial.gradient_slice_of(rank, fqn)) is None:
        return None

    def parts(other: str) -> set[Slice]:
        held = (trial.gradient_slice_of(peer, other) for peer in trial.ranks)
        return {part for part in held if part is not None}

    return _wrong(trial, fqn, part, seen_gradients(trial, rank, step)[fqn], step, parts)


def _wrong_whole(trial: Trial, at: Pair, step: int) -> Wrong | None:
    """What the slices of a gradient are together in the rank's replica, where those who hold the same have the same."""
    fqn, replica = at[1], _replica(trial, at[0])
    close, whole = max(CLOSE, trial.bounds.gradient[step]), np.full(trial.plan.shapes[fqn], np.nan)
    for rank in (rank for rank in trial.ranks if _replica(trial, rank) == replica):
        part, seen = trial.gradient_slice_of(rank, fqn), seen_gradients(trial, rank, step).get(fqn)
        if part is None or seen is None or take(whole, part).shape != seen.shape:
            continue
        laid = take(whole, part)
        if not np.isnan(laid).all() and not alike(laid, seen, close):
            return None
        laid[...] = seen
    return _wrong(trial, fqn, _all_of(trial, fqn), whole, step, lambda other: {_all_of(trial, other)})


def _replica(trial: Trial, rank: int) -> int:
    return coordinate(trial.case.dims, rank)["dp_replicate"]


def _all_of(trial: Trial, fqn: str) -> Slice:
    return tuple((0, size) for size in trial.plan.shapes[fqn])


def _wrong(
    trial: Trial, fqn: str, part: Slice, seen: np.ndarray, step: int, parts: Callable[[str], set[Slice]]
) -> Wrong | None:
    """All of it, else those rows that are wrong."""
    right = take(trial.reference.steps[step - 1].gradients[fqn], part)
    if right.shape != seen.shape or not seen.size or not np.isfinite(seen).all():
        return None
    if step == 1 and not seen.any() and right.any():  # there is no step before, whose it may be
        return Wrong(slice(None), part, Relation(source=Source("gradient", fqn, part, 1)))
    close = max(CLOSE, trial.bounds.gradient[step])
    off = np.abs(seen - right).reshape(len(seen), -1).max(axis=1) > close * np.max(np.abs(right))
    some = [] if off.all() or seen.ndim < 2 else [np.flatnonzero(off)]
    each: list[np.ndarray | slice] = [slice(None), *some]
    for rows in each:
        pool = ((source, array[rows]) for source, array in _sources(trial, fqn, part, step, parts))
        if (relation := relation_of(seen[rows], right[rows], pool, close)) is not None:
            return Wrong(rows, part, relation)
        if isinstance(rows, np.ndarray) and not seen[rows].any():
            return Wrong(rows, part, Relation(factor=0.0))
    return None


def _sources(
    trial: Trial, fqn: str, own: Slice, step: int, parts: Callable[[str], set[Slice]]
) -> Iterator[tuple[Source, np.ndarray]]:
    """Yield what is right of other tensors of this shape: each slice once, of this step and of earlier ones."""
    for other in trial.plan.shapes:
        for part in sorted(parts(other)):
            if [stop - start for start, stop in part] != [stop - start for start, stop in own]:
                continue
            same = (other, part) == (fqn, own)
            for back in range(same, step):
                yield Source("gradient", other, part, back), _value(trial, "gradient", other, part, step - back)
            if same:
                yield Source("weight", fqn, part), _value(trial, "weight", fqn, part, step)


def _value(trial: Trial, what: str, fqn: str, part: Slice, step: int) -> np.ndarray:
    """The right one: a gradient of a step, or the weights with which it begins."""
    steps = trial.reference.steps
    if what == "gradient":
        return take(steps[step - 1].gradients[fqn], part)
    return take((steps[step - 2].parameters if step > 1 else trial.reference.weights)[fqn], part)


def _cause(trial: Trial, found: Mapping[Pair, Wrong], step: int, when: str) -> Cause:
    """Return the cause of those that are the same; its hint has the first that are something else."""
    alike: dict[str, list[Pair]] = {}
    for at, one in sorted(found.items(), key=lambda item: item[1].is_scaled):
        alike.setdefault(one.words(at[1]), []).append(at)
    (text, pairs), *others = alike.items()
    hint = f"besides, {others[0][0]} {where_text(trial, others[0][1])}" if others else ""
    relation, part = found[pairs[0]].relation, found[pairs[0]].part
    source = relation.source or Source("gradient", pairs[0][1], part)
    details = (
        *(("source", source.fqn), ("of", source.what), ("back", source.back), ("change", relation.change)),
        *(("factor", float(f"{relation.factor:.9g}")), ("added", relation.added), ("step", step)),
        ("another rank's", source.fqn == pairs[0][1] and source.part != part),
        ("parameters", tuple(in_order(trial, (fqn for _, fqn in pairs)))),
        ("ranks", tuple(sorted({rank for rank, _ in pairs}))),
    )
    return Cause("another tensor", f"{text}{when}", where_text(trial, pairs), hint=hint, details=details)


def _assuming(trial: Trial, found: Mapping[Pair, Wrong], steps: Sequence[int], stay: bool = False) -> Trial:
    """Assume that these were so in these steps; stay: as in the first of them. Replicas that differ train separately, each with
    its own norm for clipping."""
    if not _replicas_differ(trial, found):
        one = _Substituted(trial, found, steps, stay)
        return another_reference(trial, gradients=one.gradients, left=one.left)
    places = {rank: _replica(trial, rank) for rank in trial.ranks}
    copies = [
        _Substituted(trial, {at: one for at, one in found.items() if places[at[0]] == copy}, steps, stay)
        for copy in range(trial.case.dims.dp_replicate)
    ]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        return [copy.gradients(step, own) for copy, own in zip(copies, summed(gradients), strict=True)]

    return clipping_apart(train_apart(trial, "dp_replicate", reduce, [{"left": copy.left} for copy in copies]))


class _Substituted:
    """A run in which slices of ranks hold something else in some steps."""

    def __init__(self, trial: Trial, found: Mapping[Pair, Wrong], steps: Sequence[int], stay: bool) -> None:
        self.found, self.steps, self.stay = found, steps, stay
        self.computed: dict[int, Arrays] = {}
        self.weights: Arrays = dict(trial.reference.weights)

    def gradients(self, step: int, own: Arrays) -> Arrays:
        """What is there in place of those of backward."""
        self.computed[step] = own
        changed = {fqn: value.copy() for fqn, value in own.items()} if step in self.steps else own
        for (_, fqn), one in self.found.items() if step in self.steps else ():
            right, source = take(own[fqn], one.part)[one.rows], one.relation.source
            if source is None:
                take(changed[fqn], one.part)[one.rows] = one.relation.value(right, None)
            else:
                kept = self.weights if source.what == "weight" else self._computed(step, source.back)
                held = take(kept[source.fqn], source.part)[one.rows] if kept else np.zeros_like(right)
                take(changed[fqn], one.part)[one.rows] = one.relation.value(right, held)
        return changed

    def _computed(self, step: int, back: int) -> Arrays | None:
        """The gradients of so many steps before, of which there may be none; before the first wrong step, where they stay."""
        return self.computed.get((self.steps[0] if self.stay and back else step) - back)

    def left(self, step: int, parameters: Arrays) -> Arrays:
        """The weights, which are kept for the next step."""
        self.weights = parameters
        return parameters


def _replicas_differ(trial: Trial, found: Mapping[Pair, Wrong]) -> bool:
    """Whether a rank of another replica has the right one, or something else, of a tensor that is wrong here."""
    words = {at: one.words(at[1]) for at, one in found.items()}
    peers = {at: trial.plan.peers(at[0], "dp_replicate") for at in found}
    return any(words.get((peer, fqn)) != words[rank, fqn] for (rank, fqn), of in peers.items() for peer in of)
