"""Which tensor on record a wrong one is equal to: as it is, scaled, rounded, transposed or with rows moved.

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
    """A tensor on record that a wrong one may be equal to."""

    what: str
    """gradient, or weight: the parameter as the step begins with it."""
    fqn: str
    """Name of the parameter."""
    part: Slice
    """Slice of that parameter."""
    back: int = 0
    """How many steps before the wrong step the tensor was recorded."""


@dataclass(frozen=True)
class Relation:
    """How a wrong tensor follows from a source or from the right values: changed, times a factor, perhaps added to these."""

    change: str = ""
    """transposed, rounded to bfloat16, rows moved by 1, ...; empty if unchanged."""
    source: Source | None = None
    """None: the right values."""
    factor: float = 1.0
    """By what the changed source is multiplied."""
    added: bool = False
    """Whether the result is added to the right values."""
    apply: Apply = lambda value: value
    """The function that makes the change."""

    def value(self, right: np.ndarray, source: np.ndarray | None) -> np.ndarray:
        """Return the wrong tensor's values, from the right ones and from the source's."""
        own = self.apply(right if source is None else source)
        return np.asarray((right if self.added else 0) + self.factor * own)

    def words(self, fqn: str, part: Slice) -> str:
        """Return in words whose values this slice of a parameter has."""
        if self.factor == 0:
            return "zero"
        times = "" if math.isclose(self.factor, 1) else f"{number_text(self.factor)} times "
        change = f", {self.change}" if self.change else ""
        if self.source is None:
            return f"{times}the right ones{change}"
        right = "the right ones and " if self.added else ""
        return f"{right}{times}{_source_words(self.source, fqn, part)}{change}"


def _source_words(source: Source, fqn: str, part: Slice) -> str:
    """Return a source in words, as seen from this slice of a parameter."""
    own = "the same parameter" if source.fqn == fqn else source.fqn
    if source.fqn == fqn and source.part != part:
        own += " as another rank holds it"
    when = {0: "", 1: " of the step before"}.get(source.back, f" of {source.back} steps before")
    return f"{'those' if source.what == 'gradient' else f'the {source.what}'} of {own}{when}"


# ---- one tensor


def relation_of(
    value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[Source, np.ndarray]], close: float = CLOSE
) -> Relation | None:
    """Return how a wrong tensor follows from one on record. None if from none, or from more than one.

    pool: other tensors on record.
    """
    has_few_digits = value.size * -math.log10(min(close, 1)) < DIGITS
    if has_few_digits or is_count(value) or not np.isfinite(value).all() or alike(value, right, close):
        return None
    for change, apply in changes(value, right, close):
        return Relation(change, apply=apply)
    if value.shape != right.shape:
        return None
    if (factor := _factor(value, right, close)) is not None:
        return Relation(factor=factor)
    others = [(source, array) for source, array in pool if array.shape == value.shape and not is_count(array)]
    others = [(source, array) for source, array in others if not alike(array, right, close)]
    relations = [relation for source, array in others if (relation := _is_source(value, source, array, close))]
    if not relations:
        difference = value - right
        scaled = ((source, _factor(difference, array, max(close, 1e-7))) for source, array in others)
        relations = [
            Relation(source=source, factor=factor, added=True) for source, factor in scaled if factor is not None
        ]
    return relations[0] if len(relations) == 1 else None


def _is_source(value: np.ndarray, source: Source, array: np.ndarray, close: float) -> Relation | None:
    """Return how a value follows from this source. None if it does not. array: the source's values."""
    if (factor := _factor(value, array, close)) is not None:
        return Relation(source=source, factor=factor)
    return next((Relation(change, source, apply=apply) for change, apply in changes(value, array, close)), None)


def changes(value: np.ndarray, wanted: np.ndarray, close: float = CLOSE) -> Iterator[tuple[str, Apply]]:
    """Yield the transforms (in words, as a function) that map `wanted` to `value`. None are yielded if both are equal."""
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
    """Return the order in which the rows of `wanted` are those of `value`. None if the rows are not the same."""
    value_rows = value.reshape(len(value), -1).astype(np.float64)
    wanted_rows = wanted.reshape(len(wanted), -1).astype(np.float64)
    shift = int(np.abs(value_rows).max(axis=1).argmax()) - int(np.abs(wanted_rows).max(axis=1).argmax())
    if alike(value_rows, np.roll(wanted_rows, shift, axis=0), close):
        return np.roll(np.arange(len(wanted_rows)), shift)
    if close > SURE:
        return None
    line = np.sin(np.arange(1.0, 1 + wanted_rows.shape[1]))  # rows in the order of where they lie along any one line
    order = np.empty(len(wanted_rows), int)
    order[np.argsort(value_rows @ line, kind="stable")] = np.argsort(wanted_rows @ line, kind="stable")
    return order if alike(value_rows, wanted_rows[order], close) else None


def _moved(order: np.ndarray, name: str) -> str:
    """Return in words how rows are moved. name: rows, columns or entries."""
    shift = int(-order[0] % len(order))
    is_cyclic = np.array_equal(order, np.roll(np.arange(len(order)), shift))
    return f"{name} moved by {shift}" if is_cyclic else f"{name} in another order"


def is_constant(value: np.ndarray) -> bool:
    """Return whether all entries are equal, or there are none."""
    return bool(value.size == 0 or np.all(value == value.flat[0]))


def is_count(value: np.ndarray) -> bool:
    """Return whether a tensor holds whole numbers alone, as a counter does, or is constant: it equals others by chance."""
    return is_constant(value) or bool(np.array_equal(value, np.round(value)))


def alike(first: np.ndarray, second: np.ndarray, close: float) -> bool:
    """Return whether both are the same within the bound, relative to the largest entry of the second."""
    if first.shape != second.shape or not first.size:
        return first.shape == second.shape
    return float(np.max(np.abs(first - second))) <= close * float(np.max(np.abs(second)))


def _factor(value: np.ndarray, source: np.ndarray, close: float) -> float | None:
    """Return the factor by which `value` is a multiple of `source`. None if it is no multiple.

    It is a whole number, or one divided by a whole number, if it is that within the bound.
    """
    factor = best_fit(value, source)
    if not abs(factor) > 1e-6 or not alike(value, factor * source, close):
        return None
    simple = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return simple if math.isclose(factor, simple, rel_tol=close) else factor


# ---- gradients


@dataclass(frozen=True)
class Wrong:
    """A wrong tensor: which rows are wrong, and how these follow from others."""

    rows: np.ndarray | slice
    """Wrong rows of the first dim; all of them if one relation holds throughout."""
    part: Slice
    """Slice of the parameter that a rank has; all of it if the slices of all ranks together are one tensor changed."""
    relation: Relation

    @property
    def is_scaled(self) -> bool:
        """Return whether all rows are a multiple of the right ones."""
        return isinstance(self.rows, slice) and self.relation.source is None and not self.relation.change

    def words(self, fqn: str) -> str:
        """Return in words what the gradient of this parameter is."""
        relation_text = self.relation.words(fqn, self.part)
        rows = () if isinstance(self.rows, slice) else self.rows + self.part[0][0]
        if not len(rows):
            return f"gradients are {relation_text}"
        rows_text = positions_text(np.asarray(rows))
        if len(rows) == 1:
            return f"row {rows_text} of gradients is {relation_text}"
        return f"rows {rows_text} of gradients are {relation_text}"


def another_tensor(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Suppose that gradients are other tensors. `contributions` explains whole ones that are a multiple of the right ones."""
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or trial.assumption.references:
        return
    wrong_tensors: dict[Pair, Wrong] = {}
    for pair in wrong_pairs(trial, step):
        if (wrong_tensor := _wrong_slice(trial, pair, step) or _wrong_whole(trial, pair, step)) is None:
            return
        wrong_tensors[pair] = wrong_tensor
    if not wrong_tensors or all(wrong_tensor.is_scaled for wrong_tensor in wrong_tensors.values()):
        return
    backs = {
        wrong_tensor.relation.source.back for wrong_tensor in wrong_tensors.values() if wrong_tensor.relation.source
    }
    for when, steps, extra_choices in spans(trial, step):
        if steps == [1] and any(backs):  # zeros of one step alone are nobody's
            continue
        cause = _cause(trial, wrong_tensors, step, when)
        yield Hypothesis(cause, partial(_assuming, wrong_tensors=wrong_tensors, steps=steps), 1 + extra_choices)
    if any(backs) and step < trial.case.steps[-1]:
        cause = _cause(trial, wrong_tensors, step, f" {from_step(trial, step)}, and stay so")
        cause = replace(cause, details=(*cause.details, ("stay", True)))
        steps = [other for other in trial.case.steps if other >= step]
        yield Hypothesis(cause, partial(_assuming, wrong_tensors=wrong_tensors, steps=steps, stay=True), 2)


def _wrong_slice(trial: Trial, pair: Pair, step: int) -> Wrong | None:
    """Return what a rank's slice of a gradient is equal to. None if nothing on record."""
    rank, fqn = pair
    if (part := trial.gradient_slice_of(rank, fqn)) is None:
        return None

    def parts(other: str) -> set[Slice]:
        slices = (trial.gradient_slice_of(peer, other) for peer in trial.ranks)
        return {part for part in slices if part is not None}

    return _wrong(trial, fqn, part, seen_gradients(trial, rank, step)[fqn], step, parts)


def _wrong_whole(trial: Trial, pair: Pair, step: int) -> Wrong | None:
    """Return what the slices of a gradient in the rank's replica are equal to, put together. None if nothing on record.

    None also if ranks that hold the same slice have other values of it.
    """
    fqn = pair[1]
    replica = _replica(trial, pair[0])
    close = max(CLOSE, trial.bounds.gradient[step])
    whole = np.full(trial.plan.shapes[fqn], np.nan)
    for rank in (rank for rank in trial.ranks if _replica(trial, rank) == replica):
        part = trial.gradient_slice_of(rank, fqn)
        seen = seen_gradients(trial, rank, step).get(fqn)
        if part is None or seen is None or take(whole, part).shape != seen.shape:
            continue
        target = take(whole, part)
        if not np.isnan(target).all() and not alike(target, seen, close):
            return None
        target[...] = seen
    return _wrong(trial, fqn, _all_of(trial, fqn), whole, step, lambda other: {_all_of(trial, other)})


def _replica(trial: Trial, rank: int) -> int:
    """Return the coordinate of a rank along dp_replicate."""
    return coordinate(trial.case.dims, rank)["dp_replicate"]


def _all_of(trial: Trial, fqn: str) -> Slice:
    """Return the slice that is the whole parameter."""
    return tuple((0, size) for size in trial.plan.shapes[fqn])


def _wrong(
    trial: Trial, fqn: str, part: Slice, seen: np.ndarray, step: int, parts: Callable[[str], set[Slice]]
) -> Wrong | None:
    """Return what all rows are equal to, else what the wrong rows are equal to. None if nothing on record.

    parts: parameter -> the slices of it on record.
    """
    right = take(trial.reference.steps[step - 1].gradients[fqn], part)
    if right.shape != seen.shape or not seen.size or not np.isfinite(seen).all():
        return None
    if step == 1 and not seen.any() and right.any():  # there is no step before, whose it may be
        return Wrong(slice(None), part, Relation(source=Source("gradient", fqn, part, 1)))
    close = max(CLOSE, trial.bounds.gradient[step])
    is_wrong = np.abs(seen - right).reshape(len(seen), -1).max(axis=1) > close * np.max(np.abs(right))
    row_choices: list[np.ndarray | slice] = [slice(None)]
    if not is_wrong.all() and seen.ndim >= 2:
        row_choices.append(np.flatnonzero(is_wrong))
    for rows in row_choices:
        pool = ((source, array[rows]) for source, array in _sources(trial, fqn, part, step, parts))
        if (relation := relation_of(seen[rows], right[rows], pool, close)) is not None:
            return Wrong(rows, part, relation)
        if isinstance(rows, np.ndarray) and not seen[rows].any():
            return Wrong(rows, part, Relation(factor=0.0))
    return None


def _sources(
    trial: Trial, fqn: str, own: Slice, step: int, parts: Callable[[str], set[Slice]]
) -> Iterator[tuple[Source, np.ndarray]]:
    """Yield (source, right values) of other tensors of this shape: each slice once, of this step and of earlier ones."""
    for other in trial.plan.shapes:
        for part in sorted(parts(other)):
            if [stop - start for start, stop in part] != [stop - start for start, stop in own]:
                continue
            is_own = (other, part) == (fqn, own)
            for back in range(is_own, step):
                yield Source("gradient", other, part, back), _value(trial, "gradient", other, part, step - back)
            if is_own:
                yield Source("weight", fqn, part), _value(trial, "weight", fqn, part, step)


def _value(trial: Trial, kind: str, fqn: str, part: Slice, step: int) -> np.ndarray:
    """Return the right values of a slice: the gradient of a step, or the weights with which the step begins."""
    steps = trial.reference.steps
    if kind == "gradient":
        return take(steps[step - 1].gradients[fqn], part)
    return take((steps[step - 2].parameters if step > 1 else trial.reference.weights)[fqn], part)


def _cause(trial: Trial, wrong_tensors: Mapping[Pair, Wrong], step: int, when: str) -> Cause:
    """Return the cause of the gradients that have the same words; its hint has the first that have other words."""
    pairs_by_text: dict[str, list[Pair]] = {}
    for pair, wrong_tensor in sorted(wrong_tensors.items(), key=lambda item: item[1].is_scaled):
        pairs_by_text.setdefault(wrong_tensor.words(pair[1]), []).append(pair)
    (text, pairs), *others = pairs_by_text.items()
    hint = f"besides, {others[0][0]} {where_text(trial, others[0][1])}" if others else ""
    relation = wrong_tensors[pairs[0]].relation
    part = wrong_tensors[pairs[0]].part
    source = relation.source or Source("gradient", pairs[0][1], part)
    details = (
        *(("source", source.fqn), ("of", source.what), ("back", source.back), ("change", relation.change)),
        *(("factor", float(f"{relation.factor:.9g}")), ("added", relation.added), ("step", step)),
        ("another rank's", source.fqn == pairs[0][1] and source.part != part),
        ("parameters", tuple(in_order(trial, (fqn for _, fqn in pairs)))),
        ("ranks", tuple(sorted({rank for rank, _ in pairs}))),
    )
    return Cause("another tensor", f"{text}{when}", where_text(trial, pairs), hint=hint, details=details)


def _assuming(trial: Trial, wrong_tensors: Mapping[Pair, Wrong], steps: Sequence[int], stay: bool = False) -> Trial:
    """Assume that these gradients were wrong in these steps. stay: with the values of the first of them.

    Replicas that differ train separately, each with its own norm for clipping.
    """
    if not _replicas_differ(trial, wrong_tensors):
        substituted = _Substituted(trial, wrong_tensors, steps, stay)
        return another_reference(trial, gradients=substituted.gradients, left=substituted.left)
    replicas = {rank: _replica(trial, rank) for rank in trial.ranks}
    copies = []
    for replica in range(trial.case.dims.dp_replicate):
        wrong_of_replica = {pair: wrong for pair, wrong in wrong_tensors.items() if replicas[pair[0]] == replica}
        copies.append(_Substituted(trial, wrong_of_replica, steps, stay))

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        return [copy.gradients(step, own) for copy, own in zip(copies, summed(gradients), strict=True)]

    return clipping_apart(train_apart(trial, "dp_replicate", reduce, [{"left": copy.left} for copy in copies]))


class _Substituted:
    """A run in which some gradients are substituted in some steps."""

    def __init__(self, trial: Trial, wrong_tensors: Mapping[Pair, Wrong], steps: Sequence[int], stay: bool) -> None:
        self.found = wrong_tensors
        self.steps = steps
        self.stay = stay
        self.computed: dict[int, Arrays] = {}
        self.weights: Arrays = dict(trial.reference.weights)

    def gradients(self, step: int, own: Arrays) -> Arrays:
        """Return the gradients of a step with the substituted ones. own: those that backward computed."""
        self.computed[step] = own
        if step not in self.steps:
            return own
        changed = {fqn: value.copy() for fqn, value in own.items()}
        for (_, fqn), wrong_tensor in self.found.items():
            right = take(own[fqn], wrong_tensor.part)[wrong_tensor.rows]
            source = wrong_tensor.relation.source
            if source is None:
                take(changed[fqn], wrong_tensor.part)[wrong_tensor.rows] = wrong_tensor.relation.value(right, None)
            else:
                kept = self.weights if source.what == "weight" else self._computed(step, source.back)
                source_values = take(kept[source.fqn], source.part)[wrong_tensor.rows] if kept else np.zeros_like(right)
                take(changed[fqn], wrong_tensor.part)[wrong_tensor.rows] = wrong_tensor.relation.value(
                    right, source_values
                )
        return changed

    def _computed(self, step: int, back: int) -> Arrays | None:
        """Return the gradients of `back` steps before this step, or before the first wrong step if they stay. None if none."""
        last = self.steps[0] if self.stay and back else step
        return self.computed.get(last - back)

    def left(self, step: int, parameters: Arrays) -> Arrays:
        """Return the weights unchanged, and keep them for the next step."""
        self.weights = parameters
        return parameters


def _replicas_differ(trial: Trial, wrong_tensors: Mapping[Pair, Wrong]) -> bool:
    """Return whether a rank of another replica has other values of a wrong tensor, or the right ones."""
    words = {pair: wrong_tensor.words(pair[1]) for pair, wrong_tensor in wrong_tensors.items()}
    for rank, fqn in wrong_tensors:
        peers = trial.plan.peers(rank, "dp_replicate")
        if any(words.get((peer, fqn)) != words[rank, fqn] for peer in peers):
            return True
    return False
