"""Matches of a wrong tensor with tensors on record: equal as it is, scaled, rounded, transposed or with rows moved.

A wrong tensor, or its wrong rows, is compared with the right one, changed in one way. It is also compared with other
tensors on record: of another parameter, another rank, an earlier step, the weights. The answer must fit everything that
is wrong in the first wrong step. Then the reference is trained as if it were so in every step, and the checks judge.

Equality may be chance. So constants and whole numbers match nothing, and a tensor that is two others at once matches
neither. A tensor of few entries is not compared; a less close match needs more entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.core.causes.assume import (
    assume_reference,
    assume_separate_clipping,
    assume_separate_replicas,
    sum_over_replicas,
)
from harness.core.causes.differences import (
    first_wrong_step,
    observed_gradients,
    pairs_with_wrong_gradient,
    step_choices,
)
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays, Pair, from_step_text, sort_fqns, where_text
from harness.core.evidence.text import number_text, positions_text
from harness.core.judge.contents import ROUNDED, view_of_slice
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import Slice
from harness.reference.distance import best_fitting_factor

Apply = Callable[[np.ndarray], np.ndarray]
EQUAL_BOUND = 1e-9
"""How far values that are the same may differ in float64, relative to the largest."""
LEAST_DIGITS = 30
"""Digits that all entries of a tensor match together: fewer may match by chance."""
ROW_BOUND = 1e-6
"""How close rows must be matched to say in which order they are."""


@dataclass(frozen=True)
class TensorOnRecord:
    """A tensor on record that a wrong one may be equal to: a slice of a gradient or of a weight."""

    kind: str
    """gradient, or weight: the parameter as the step begins with it."""
    fqn: str
    """Name of the parameter."""
    slice_: Slice
    """Slice of that parameter."""
    steps_before: int = 0
    """How many steps before the wrong step the tensor was recorded."""


@dataclass(frozen=True)
class TensorMatch:
    """How a wrong tensor follows from a source or from the right values: changed, times a factor, perhaps added to these."""

    change: str = ""
    """transposed, rounded to bfloat16, rows moved by 1, ...; empty if unchanged."""
    source: TensorOnRecord | None = None
    """None: the right values."""
    factor: float = 1.0
    """By what the changed source is multiplied."""
    added: bool = False
    """Whether the result is added to the right values."""
    apply: Apply = lambda value: value
    """The function that makes the change."""

    def matched_value(self, right: np.ndarray, source: np.ndarray | None) -> np.ndarray:
        """Return the values that the wrong tensor should have by this match. source: the values of the source; None:
        the right ones."""
        own = self.apply(right if source is None else source)
        return np.asarray((right if self.added else 0) + self.factor * own)

    def match_text(self, fqn: str, part: Slice) -> str:
        """Return in words whose values a slice of a parameter has, such as "2 times those of layers.0.wq". fqn,
        part: that slice."""
        if self.factor == 0:
            return "zero"
        times = "" if math.isclose(self.factor, 1) else f"{number_text(self.factor)} times "
        change = f", {self.change}" if self.change else ""
        if self.source is None:
            return f"{times}the right ones{change}"
        right = "the right ones and " if self.added else ""
        return f"{right}{times}{_source_words(self.source, fqn, part)}{change}"


def _source_words(source: TensorOnRecord, fqn: str, part: Slice) -> str:
    """Return a source in words, such as "those of the same parameter of the step before". fqn, part: the slice that
    matches it."""
    own = "the same parameter" if source.fqn == fqn else source.fqn
    if source.fqn == fqn and source.slice_ != part:
        own += " as another rank holds it"
    when = {0: "", 1: " of the step before"}.get(source.steps_before, f" of {source.steps_before} steps before")
    return f"{'those' if source.kind == 'gradient' else f'the {source.kind}'} of {own}{when}"


# ---- one tensor


def find_match(
    value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[TensorOnRecord, np.ndarray]], close: float = EQUAL_BOUND
) -> TensorMatch | None:
    """Return how a wrong tensor follows from the right one or from one on record.

    None if from none, or from more than one. The right one is tried first. None as well if it equals the right one, is
    not finite, constant or whole numbers, or has too few entries. pool: other tensors on record, with values. close:
    largest difference, relative to the largest entry.
    """
    has_few_digits = value.size * -math.log10(min(close, 1)) < LEAST_DIGITS
    if has_few_digits or is_count(value) or not np.isfinite(value).all() or is_close(value, right, close):
        return None
    for change, apply in find_transforms(value, right, close):
        return TensorMatch(change, apply=apply)
    if value.shape != right.shape:
        return None
    if (factor := _multiple_of(value, right, close)) is not None:
        return TensorMatch(factor=factor)
    others = [(source, array) for source, array in pool if array.shape == value.shape and not is_count(array)]
    others = [(source, array) for source, array in others if not is_close(array, right, close)]
    relations = [relation for source, array in others if (relation := _match_with_source(value, source, array, close))]
    if not relations:
        difference = value - right
        scaled = ((source, _multiple_of(difference, array, max(close, 1e-7))) for source, array in others)
        relations = [
            TensorMatch(source=source, factor=factor, added=True) for source, factor in scaled if factor is not None
        ]
    return relations[0] if len(relations) == 1 else None


def _match_with_source(
    value: np.ndarray, source: TensorOnRecord, array: np.ndarray, close: float
) -> TensorMatch | None:
    """Return how a value follows from this source: as a multiple, or changed.

    None if it does not. array: the source's values.
    """
    if (factor := _multiple_of(value, array, close)) is not None:
        return TensorMatch(source=source, factor=factor)
    return next(
        (TensorMatch(change, source, apply=apply) for change, apply in find_transforms(value, array, close)), None
    )


def find_transforms(value: np.ndarray, wanted: np.ndarray, close: float = EQUAL_BOUND) -> Iterator[tuple[str, Apply]]:
    """Yield (in words, function) of the transforms that map `wanted` to `value`: rounded, transposed, rows or columns
    moved.

    Nothing if both are equal already, or if none does.
    """
    if is_close(value, wanted, close):
        return
    for dtype, rounded in ROUNDED.items():
        if np.array_equal(value, rounded(value)) and is_close(value, rounded(wanted), close):
            yield f"rounded to {dtype}", rounded
    if value.ndim == 2 and is_close(value, wanted.T, close):
        yield "transposed", lambda array: array.T
    if value.shape == wanted.shape:
        names = ("entries",) if value.ndim == 1 else ("rows", "columns")[: value.ndim]
        for axis, name in enumerate(names):
            if (order := _row_order(np.moveaxis(value, axis, 0), np.moveaxis(wanted, axis, 0), close)) is not None:
                yield _moved_text(order, name), partial(np.take, indices=order, axis=axis)


def _row_order(value: np.ndarray, wanted: np.ndarray, close: float) -> np.ndarray | None:
    """Return the indices by which the rows of `wanted`, so ordered, are those of `value`.

    None if the rows are not the same. Only cyclic moves are found where the match is less close than ROW_BOUND.
    """
    value_rows = value.reshape(len(value), -1).astype(np.float64)
    wanted_rows = wanted.reshape(len(wanted), -1).astype(np.float64)
    shift = int(np.abs(value_rows).max(axis=1).argmax()) - int(np.abs(wanted_rows).max(axis=1).argmax())
    if is_close(value_rows, np.roll(wanted_rows, shift, axis=0), close):
        return np.roll(np.arange(len(wanted_rows)), shift)
    if close > ROW_BOUND:
        return None
    line = np.sin(np.arange(1.0, 1 + wanted_rows.shape[1]))  # rows in the order of where they lie along any one line
    order = np.empty(len(wanted_rows), int)
    order[np.argsort(value_rows @ line, kind="stable")] = np.argsort(wanted_rows @ line, kind="stable")
    return order if is_close(value_rows, wanted_rows[order], close) else None


def _moved_text(order: np.ndarray, name: str) -> str:
    """Return in words how rows are moved: "rows moved by 1", else "rows in another order". name: rows, columns or entries."""
    shift = int(-order[0] % len(order))
    is_cyclic = np.array_equal(order, np.roll(np.arange(len(order)), shift))
    return f"{name} moved by {shift}" if is_cyclic else f"{name} in another order"


def is_constant(value: np.ndarray) -> bool:
    """Return whether all entries are equal, or there are none."""
    return bool(value.size == 0 or np.all(value == value.flat[0]))


def is_count(value: np.ndarray) -> bool:
    """Return whether a tensor holds whole numbers alone, as a counter does, or is constant: such a tensor equals
    others by chance."""
    return is_constant(value) or bool(np.array_equal(value, np.round(value)))


def is_close(first: np.ndarray, second: np.ndarray, close: float) -> bool:
    """Return whether both have the same shape and differ by no more than `close`, relative to the largest entry of
    the second."""
    if first.shape != second.shape or not first.size:
        return first.shape == second.shape
    return float(np.max(np.abs(first - second))) <= close * float(np.max(np.abs(second)))


def _multiple_of(value: np.ndarray, source: np.ndarray, close: float) -> float | None:
    """Return the factor by which `value` is a multiple of `source`.

    None if it is no multiple, or the factor is about 0. It is a whole number, or one divided by a whole number, if it
    is that within the bound.
    """
    factor = best_fitting_factor(value, source)
    if not abs(factor) > 1e-6 or not is_close(value, factor * source, close):
        return None
    simple = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return simple if math.isclose(factor, simple, rel_tol=close) else factor


# ---- gradients


@dataclass(frozen=True)
class WrongTensor:
    """A wrong tensor: which rows are wrong, and how these follow from others."""

    rows: np.ndarray | slice
    """Wrong rows of the first dim; all of them if one relation holds throughout."""
    slice_: Slice
    """Slice of the parameter that a rank has; all of it if the slices of all ranks together are one tensor changed."""
    relation: TensorMatch
    """How these rows follow from the right values or from a source."""

    @property
    def is_scaled(self) -> bool:
        """Return whether all rows are a multiple of the right ones."""
        return isinstance(self.rows, slice) and self.relation.source is None and not self.relation.change

    def wrong_text(self, fqn: str) -> str:
        """Return in words what the gradient is, or which rows of it: "rows 3-5 of gradients are zero". fqn: its parameter."""
        relation_text = self.relation.match_text(fqn, self.slice_)
        rows = () if isinstance(self.rows, slice) else self.rows + self.slice_[0][0]
        if not len(rows):
            return f"gradients are {relation_text}"
        rows_text = positions_text(np.asarray(rows))
        if len(rows) == 1:
            return f"row {rows_text} of gradients is {relation_text}"
        return f"rows {rows_text} of gradients are {relation_text}"


def another_tensor(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that gradients are other tensors on record, or the right ones changed, from the first wrong step
    on.

    Nothing unless that explains each wrong gradient. Nothing if all are multiples of the right ones, which
    `contributions` explains. A gradient of an earlier step may also stay in all later steps.
    """
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or trial.assumption.references:
        return
    wrong_tensors: dict[Pair, WrongTensor] = {}
    for pair in pairs_with_wrong_gradient(trial, step):
        if (wrong_tensor := _match_slice(trial, pair, step) or _match_whole(trial, pair, step)) is None:
            return
        wrong_tensors[pair] = wrong_tensor
    if not wrong_tensors or all(wrong_tensor.is_scaled for wrong_tensor in wrong_tensors.values()):
        return
    backs = {
        wrong_tensor.relation.source.steps_before
        for wrong_tensor in wrong_tensors.values()
        if wrong_tensor.relation.source
    }
    for when, steps, extra_choices in step_choices(trial, step):
        if steps == [1] and any(backs):  # zeros of one step alone are nobody's
            continue
        cause = _other_tensor_cause(trial, wrong_tensors, step, when)
        yield Hypothesis(
            cause, partial(_assume_substituted, wrong_tensors=wrong_tensors, steps=steps), 1 + extra_choices
        )
    if any(backs) and step < trial.case.steps[-1]:
        cause = _other_tensor_cause(trial, wrong_tensors, step, f" {from_step_text(trial, step)}, and stay so")
        cause = replace(cause, details=(*cause.details, ("stay", True)))
        steps = [other for other in trial.case.steps if other >= step]
        yield Hypothesis(cause, partial(_assume_substituted, wrong_tensors=wrong_tensors, steps=steps, stay=True), 2)


def _match_slice(trial: Trial, pair: Pair, step: int) -> WrongTensor | None:
    """Return the match of a rank's slice of a gradient.

    None if nothing on record fits, or the rank's slice is not known.
    """
    rank, fqn = pair
    if (part := trial.gradient_slice_of(rank, fqn)) is None:
        return None

    def parts(other: str) -> set[Slice]:
        slices = (trial.gradient_slice_of(peer, other) for peer in trial.ranks)
        return {part for part in slices if part is not None}

    return _match_tensor(trial, fqn, part, observed_gradients(trial, rank, step)[fqn], step, parts)


def _match_whole(trial: Trial, pair: Pair, step: int) -> WrongTensor | None:
    """Return the match of a gradient that is put together from the slices in the rank's replica.

    None if nothing on record fits. None also if ranks that hold the same slice have other values of it.
    """
    fqn = pair[1]
    replica = _replica_of(trial, pair[0])
    close = max(EQUAL_BOUND, trial.bounds.gradient[step])
    whole = np.full(trial.plan.shapes[fqn], np.nan)
    for rank in (rank for rank in trial.ranks if _replica_of(trial, rank) == replica):
        part = trial.gradient_slice_of(rank, fqn)
        seen = observed_gradients(trial, rank, step).get(fqn)
        if part is None or seen is None or view_of_slice(whole, part).shape != seen.shape:
            continue
        target = view_of_slice(whole, part)
        if not np.isnan(target).all() and not is_close(target, seen, close):
            return None
        target[...] = seen
    return _match_tensor(trial, fqn, _whole_slice(trial, fqn), whole, step, lambda other: {_whole_slice(trial, other)})


def _replica_of(trial: Trial, rank: int) -> int:
    """Return the coordinate of a rank along dp_replicate."""
    return coordinate_of_rank(trial.case.dims, rank)["dp_replicate"]


def _whole_slice(trial: Trial, fqn: str) -> Slice:
    """Return the slice that is the whole parameter."""
    return tuple((0, size) for size in trial.plan.shapes[fqn])


def _match_tensor(
    trial: Trial, fqn: str, part: Slice, seen: np.ndarray, step: int, parts: Callable[[str], set[Slice]]
) -> WrongTensor | None:
    """Return the match of all rows, else that of the wrong rows.

    None if nothing on record fits, or the shape is another. seen: the observed values of the slice `part`. parts: fqn
    -> the slices of it on record. Zeros in step 1 count as the gradient of a step before, which there is none of.
    """
    right = view_of_slice(trial.reference.steps[step - 1].gradients[fqn], part)
    if right.shape != seen.shape or not seen.size or not np.isfinite(seen).all():
        return None
    if step == 1 and not seen.any() and right.any():  # there is no step before, whose it may be
        return WrongTensor(slice(None), part, TensorMatch(source=TensorOnRecord("gradient", fqn, part, 1)))
    close = max(EQUAL_BOUND, trial.bounds.gradient[step])
    is_wrong = np.abs(seen - right).reshape(len(seen), -1).max(axis=1) > close * np.max(np.abs(right))
    row_choices: list[np.ndarray | slice] = [slice(None)]
    if not is_wrong.all() and seen.ndim >= 2:
        row_choices.append(np.flatnonzero(is_wrong))
    for rows in row_choices:
        pool = ((source, array[rows]) for source, array in _possible_sources(trial, fqn, part, step, parts))
        if (relation := find_match(seen[rows], right[rows], pool, close)) is not None:
            return WrongTensor(rows, part, relation)
        if isinstance(rows, np.ndarray) and not seen[rows].any():
            return WrongTensor(rows, part, TensorMatch(factor=0.0))
    return None


def _possible_sources(
    trial: Trial, fqn: str, own: Slice, step: int, parts: Callable[[str], set[Slice]]
) -> Iterator[tuple[TensorOnRecord, np.ndarray]]:
    """Yield (source, right values) of other gradients with the slice's shape, of this step and of earlier ones, each
    slice once.

    The weights of the slice itself are a source, too. parts: fqn -> the slices of it on record.
    """
    for other in trial.plan.shapes:
        for part in sorted(parts(other)):
            if [stop - start for start, stop in part] != [stop - start for start, stop in own]:
                continue
            is_own = (other, part) == (fqn, own)
            for back in range(is_own, step):
                yield (
                    TensorOnRecord("gradient", other, part, back),
                    _recorded_value(trial, "gradient", other, part, step - back),
                )
            if is_own:
                yield TensorOnRecord("weight", fqn, part), _recorded_value(trial, "weight", fqn, part, step)


def _recorded_value(trial: Trial, kind: str, fqn: str, part: Slice, step: int) -> np.ndarray:
    """Return the right values of a slice: the gradient of a step, or the weights with which the step begins."""
    steps = trial.reference.steps
    if kind == "gradient":
        return view_of_slice(steps[step - 1].gradients[fqn], part)
    return view_of_slice((steps[step - 2].parameters if step > 1 else trial.reference.weights)[fqn], part)


def _other_tensor_cause(trial: Trial, wrong_tensors: Mapping[Pair, WrongTensor], step: int, when: str) -> Cause:
    """Return the cause, by the wrong tensors with the same words as the first one; its hint has the first that have
    other words.

    step: the first wrong one. when: words for the steps.
    """
    pairs_by_text: dict[str, list[Pair]] = {}
    for pair, wrong_tensor in sorted(wrong_tensors.items(), key=lambda item: item[1].is_scaled):
        pairs_by_text.setdefault(wrong_tensor.wrong_text(pair[1]), []).append(pair)
    (text, pairs), *others = pairs_by_text.items()
    hint = ""
    if _are_exchanged(wrong_tensors):
        text = "gradients are exchanged"
        pairs = [*wrong_tensors]
    elif others:
        hint = f"besides, {others[0][0]} {where_text(trial, others[0][1])}"
    relation = wrong_tensors[pairs[0]].relation
    part = wrong_tensors[pairs[0]].slice_
    source = relation.source or TensorOnRecord("gradient", pairs[0][1], part)
    details = (
        *(("source", source.fqn), ("of", source.kind), ("back", source.steps_before), ("change", relation.change)),
        *(("factor", float(f"{relation.factor:.9g}")), ("added", relation.added), ("step", step)),
        ("another rank's", source.fqn == pairs[0][1] and source.slice_ != part),
        ("parameters", tuple(sort_fqns(trial, (fqn for _, fqn in pairs)))),
        ("ranks", tuple(sorted({rank for rank, _ in pairs}))),
    )
    return Cause("another tensor", f"{text}{when}", where_text(trial, pairs), hint=hint, details=details)


def _are_exchanged(wrong_tensors: Mapping[Pair, WrongTensor]) -> bool:
    """Return whether exactly two parameters are wrong, and each whole gradient is the unchanged one of the other."""
    source_by_fqn: dict[str, set[str]] = {}
    for (_, fqn), wrong_tensor in wrong_tensors.items():
        source = wrong_tensor.relation.source
        if source is None or not isinstance(wrong_tensor.rows, slice):
            return False
        if wrong_tensor.wrong_text(fqn) != f"gradients are those of {source.fqn}":
            return False
        source_by_fqn.setdefault(fqn, set()).add(source.fqn)
    if len(source_by_fqn) != 2:
        return False
    first, second = source_by_fqn
    return source_by_fqn == {first: {second}, second: {first}}


def _assume_substituted(
    trial: Trial, wrong_tensors: Mapping[Pair, WrongTensor], steps: Sequence[int], stay: bool = False
) -> Trial:
    """Return the trial under the assumption that these gradients were wrong in these steps.

    stay: with the values of the first of them. Replicas that differ train separately, each with its own norm for
    clipping.
    """
    if not _replicas_differ(trial, wrong_tensors):
        substituted = _GradientSubstitution(trial, wrong_tensors, steps, stay)
        return assume_reference(trial, gradients=substituted.gradients, left=substituted.keep_weights)
    replicas = {rank: _replica_of(trial, rank) for rank in trial.ranks}
    copies = []
    for replica in range(trial.case.dims.dp_replicate):
        wrong_of_replica = {pair: wrong for pair, wrong in wrong_tensors.items() if replicas[pair[0]] == replica}
        copies.append(_GradientSubstitution(trial, wrong_of_replica, steps, stay))

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        return [copy.gradients(step, own) for copy, own in zip(copies, sum_over_replicas(gradients), strict=True)]

    return assume_separate_clipping(
        assume_separate_replicas(trial, "dp_replicate", reduce, [{"left": copy.keep_weights} for copy in copies])
    )


class _GradientSubstitution:
    """Run of the reference in which some gradients are substituted in some steps.

    It keeps gradients and weights of steps so far.
    """

    def __init__(
        self, trial: Trial, wrong_tensors: Mapping[Pair, WrongTensor], steps: Sequence[int], stay: bool
    ) -> None:
        self.wrong_tensors = wrong_tensors
        self.steps = steps
        self.stays = stay
        self.computed: dict[int, Arrays] = {}
        self.weights: Arrays = dict(trial.reference.weights)

    def gradients(self, step: int, own: Arrays) -> Arrays:
        """Return the gradients of a step, with the substituted ones in steps that are wrong. own: those that backward
        computed.

        An earlier gradient that there is none of counts as zero.
        """
        self.computed[step] = own
        if step not in self.steps:
            return own
        changed = {fqn: value.copy() for fqn, value in own.items()}
        for (_, fqn), wrong_tensor in self.wrong_tensors.items():
            right = view_of_slice(own[fqn], wrong_tensor.slice_)[wrong_tensor.rows]
            source = wrong_tensor.relation.source
            if source is None:
                view_of_slice(changed[fqn], wrong_tensor.slice_)[wrong_tensor.rows] = (
                    wrong_tensor.relation.matched_value(right, None)
                )
            else:
                kept = self.weights if source.kind == "weight" else self._earlier_gradients(step, source.steps_before)
                source_values = (
                    view_of_slice(kept[source.fqn], source.slice_)[wrong_tensor.rows] if kept else np.zeros_like(right)
                )
                view_of_slice(changed[fqn], wrong_tensor.slice_)[wrong_tensor.rows] = (
                    wrong_tensor.relation.matched_value(right, source_values)
                )
        return changed

    def _earlier_gradients(self, step: int, back: int) -> Arrays | None:
        """Return the gradients of `back` steps before this step, or before the first wrong step if they stay.

        None if that step did not run.
        """
        last = self.steps[0] if self.stays and back else step
        return self.computed.get(last - back)

    def keep_weights(self, step: int, parameters: Arrays) -> Arrays:
        """Return the weights unchanged, and keep them for the next step."""
        self.weights = parameters
        return parameters


def _replicas_differ(trial: Trial, wrong_tensors: Mapping[Pair, WrongTensor]) -> bool:
    """Return whether any wrong tensor is described otherwise on a dp_replicate peer, or is not wrong there.

    Descriptions in words are compared, no values. wrong_tensors: by rank and fqn.
    """
    words = {pair: wrong_tensor.wrong_text(pair[1]) for pair, wrong_tensor in wrong_tensors.items()}
    for rank, fqn in wrong_tensors:
        peers = trial.plan.peers(rank, "dp_replicate")
        if any(words.get((peer, fqn)) != words[rank, fqn] for peer in peers):
            return True
    return False
