"""Ranks start from other weights than the seed's: what these are, and the reference as trained from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from harness.checks import update
from harness.diagnosis.assume import another_reference
from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.hypothesis import Broken, Hypothesis, no_reference
from harness.diagnosis.words import Pair, finding_line, in_order, in_parameters, some, where_text
from harness.evidence.text import number_text
from harness.judge.contents import take
from harness.judge.result import Cause, Lines
from harness.judge.trial import Trial
from harness.reference.distance import best_fit

ANEW = "each run draws new ones, as without a seed"
VALUES, TIMES, FEW = "the values of ", " times the seed's", 4


def other_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The reference is trained from the weights observed, if ranks that hold the same slice hold the same of it."""
    if "initial_weights" not in broken or (found := _wrong_weights(trial)) is None:
        return
    (cause, lines), weights = found, observed_weights(trial)
    seen = ("initial_weights", "shard_contents", *["determinism"] * (cause.hint == ANEW))
    if weights is None:
        what = "the slices that ranks start from do not fit together, and no reference tells what follows"
        lines, seen = (*lines, no_reference(what)), (*seen, *OF_GRADIENTS)
    assume = partial(another_reference, weights=weights) if weights else None
    yield Hypothesis(cause, assume, lines=lines, seen=seen)


def observed_weights(trial: Trial) -> dict[str, np.ndarray] | None:
    """Whole, from the slices that the plan gives to ranks; None where holders of one slice disagree, or shapes do not fit."""
    whole = {fqn: full.copy() for fqn, full in trial.reference.weights.items()}
    laid: dict[object, bytes] = {}
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            part = trial.plan.slices[rank].get(tensor.fqn)
            if part is None or take(whole[tensor.fqn], part).shape != tensor.value.shape:
                return None
            if laid.setdefault((tensor.fqn, part), tensor.value.tobytes()) != tensor.value.tobytes():
                return None
            take(whole[tensor.fqn], part)[...] = tensor.value
    return whole


def _wrong_weights(trial: Trial) -> tuple[Cause, Lines] | None:
    if (same := _same_shard(trial)) is not None:
        return same, ()
    holdings = sorted(trial.holdings.items())
    strange = [(rank, fqn) for rank, held in holdings for fqn, part in held.items() if part is None]
    if not strange:
        return None
    instead = {place: _instead(*_held(trial, place)) or _of_another(trial, place) for place in strange}
    texts = [*instead.values()]
    if all(text.startswith(VALUES) for text in texts):
        hint = f"{strange[0][1]} holds {texts[0]}"
    else:
        hint = texts[0] if len({*texts}) == 1 else _several_factors(trial, instead)
    hint = hint or _drawn_anew(trial, strange)
    line = f"rank {strange[0][0]}, {strange[0][1]}: {_how_they_differ(*_held(trial, strange[0]))}"
    text = "training does not start from the seed weights"
    return Cause("other initial weights", text, where_text(trial, strange), hint=hint), (("weights", line),)


def _several_factors(trial: Trial, instead: Mapping[Pair, str]) -> str:
    """Which parameters are which multiple of the seed's, where all are one."""
    by_factor: dict[str, list[str]] = {}
    for (_, fqn), text in instead.items():
        by_factor.setdefault(text, []).append(fqn)
    if len(by_factor) > FEW or not all(text.endswith(TIMES) for text in by_factor):
        return ""
    factors = {text.removeprefix("they are ").removesuffix(TIMES): fqns for text, fqns in by_factor.items()}
    texts = (f"{factor} ({some(in_order(trial, fqns))})" for factor, fqns in factors.items())
    return f"they are multiples of the seed's: {', '.join(texts)}"


def _held(trial: Trial, place: Pair) -> tuple[np.ndarray, np.ndarray]:
    """What is there and what should be."""
    rank, fqn = place
    value = next(t.value for t in trial.ranks[rank].parameters if t.fqn == fqn)
    return value, take(trial.reference.weights[fqn], trial.plan.slices[rank][fqn])


def _instead(value: np.ndarray, wanted: np.ndarray) -> str:
    """A constant, or what becomes of the seed weight."""
    if value.size > 1 and np.all(value == value.flat[0]):
        return f"they are all {number_text(value.flat[0])}"
    if dtype := rounded_to((value, wanted)):
        return f"they are the seed's rounded to {dtype}"
    factor = best_fit(value, wanted) if value.shape == wanted.shape else 0.0
    if factor and np.allclose(value, factor * wanted, rtol=1e-9, atol=0):
        return f"they are {number_text(factor)}{TIMES}"
    return rearranged(value, wanted)


def rounded_to(*pairs: tuple[np.ndarray, np.ndarray]) -> str:
    """The dtype that the first of each two, which is the second otherwise, has been through; empty where there is none."""
    for dtype, rounded in ROUNDED.items():
        if all(now.shape == was.shape and np.array_equal(now, rounded(was)) for now, was in pairs):
            return dtype
    return ""


def _to_bfloat16(value: np.ndarray) -> np.ndarray:
    """To the nearest, to even where two are."""
    bits = value.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda value: value.astype(np.float32),
    "bfloat16": _to_bfloat16,
    "float16": lambda value: value.astype(np.float16),
}


def rearranged(value: np.ndarray, wanted: np.ndarray) -> str:
    """Where all numbers of a matrix are there, in other places."""
    if value.ndim == 2 and value.shape == wanted.T.shape and np.array_equal(value, wanted.T):
        return "they are transposed"
    if value.shape != wanted.shape or not np.array_equal(np.sort(value.ravel()), np.sort(wanted.ravel())):
        return ""
    if value.ndim == 2 and sorted(map(bytes, value)) == sorted(map(bytes, wanted)):
        return "their rows are in another order"
    if value.ndim == 2 and sorted(map(bytes, value.T.copy())) == sorted(map(bytes, wanted.T.copy())):
        return "their columns are in another order"
    return "their entries are in another order"


def _of_another(trial: Trial, place: Pair) -> str:
    """The parameter whose values these are."""
    rank, fqn = place
    value, part, weights = _held(trial, place)[0], trial.plan.slices[rank][fqn], trial.reference.weights
    alike = (name for name, full in weights.items() if full.shape == weights[fqn].shape)
    return next((f"{VALUES}{name}" for name in alike if np.array_equal(take(weights[name], part), value)), "")


def _drawn_anew(trial: Trial, strange: list[Pair]) -> str:
    """Whether a repeat of the run started from others again."""
    again, first = (
        {(rank, t.fqn): t.value.tobytes() for rank, evidence in run.ranks.items() for t in evidence.parameters}
        for run in (trial.repeat or trial.run, trial.run)
    )
    return ANEW if all(again.get(place, first[place]) != first[place] for place in strange) else ""


def _how_they_differ(value: np.ndarray, wanted: np.ndarray) -> str:
    if value.shape != wanted.shape:
        return f"shape {value.shape}, expected {wanted.shape}"
    if value.dtype != wanted.dtype:
        return f"{value.dtype}, expected {wanted.dtype}"
    if not np.isfinite(value).all():
        return "not finite"
    return f"off by {np.max(np.abs(value - wanted)):.3g}, the largest seed weight is {np.max(np.abs(wanted)):.3g}"


# ---- the same shard


def _same_shard(trial: Trial) -> Cause | None:
    """Along an axis whose groups all do so."""
    for axis, groups in reversed(trial.plan.groups.items()):
        same = [_start_alike(trial, group) for group in groups]
        if all(same):
            one, other = groups[0][:2]
            alike = set().union(*same)
            where = (
                "" if alike == set().union(*(_cut(trial, group) for group in groups)) else in_parameters(trial, alike)
            )
            observed = f"ranks along {axis} start from the same shard"
            return Cause("same shard", f"{observed}: rank {other} holds the values of rank {one}", where)
    return None


def _cut(trial: Trial, group: tuple[int, ...]) -> set[str]:
    """Parameters that the plan cuts between the members."""
    mine, next_ones = (trial.plan.slices[rank] for rank in group[:2])
    return {fqn for fqn, part in mine.items() if next_ones.get(fqn, part) != part}


def _start_alike(trial: Trial, group: tuple[int, ...]) -> set[str]:
    """Those of which all hold the first one's bytes, not the whole; a constant has no slices to tell apart."""
    first, *others = [{t.fqn: t.value for t in trial.ranks[rank].parameters} for rank in group]
    alike = {
        fqn
        for fqn in _cut(trial, group) & first.keys()
        if all(fqn in other and other[fqn].tobytes() == first[fqn].tobytes() for other in others)
    }
    return {f for f in alike if np.unique(first[f]).size > 1 and first[f].shape != trial.plan.shapes[f]}


# ---- changed when the optimizer is done


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What there was when the next step began, if it has the shape of what the optimizer left."""
    changes = update.changed(trial)
    if "update" not in broken or not changes:
        return
    cause = _cause(trial, changes)
    held = {(rank, step.step): step.changed or {} for rank, step, _ in trial.steps()}

    def left(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(step, ()):
            if part := trial.slice_of(rank, fqn):
                target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                target[...] = held[rank, step][fqn].reshape(target.shape)
        return whole

    fits, lines = "shape or dtype" not in cause.observed, (finding_line(broken["update"]),)
    yield Hypothesis(cause, partial(another_reference, left=left) if fits else None, lines=lines, seen=("update",))


def _cause(trial: Trial, changes: dict[int, list[Pair]]) -> Cause:
    step, pairs = next(iter(changes.items()))
    observed = f"weights are changed outside the optimizer {update.until(trial, step)}"
    return Cause("weights changed", f"{observed}: {_as_if(trial, step, pairs)}{where_text(trial, pairs)}")


def _as_if(trial: Trial, step: int, pairs: list[Pair]) -> str:
    """What was done to all of them, if it is something that is easily told."""
    records = {rank: next(s for s in trial.ranks[rank].steps if s.step == step) for rank, _ in pairs}
    found = {(rank, fqn): (records[rank].changed or {})[fqn] for rank, fqn in pairs}
    both = [(now, records[rank].parameters[fqn]) for (rank, fqn), now in found.items()]
    if any(now.size != left.size or now.dtype != left.dtype for now, left in both):
        return "to another shape or dtype, "
    if not any(now.any() for now in found.values()):
        return "to 0, "
    if dtype := rounded_to(*((now.reshape(left.shape), left) for now, left in both)):
        return f"rounded to {dtype}, "
    return _of_earlier_ones(trial, step, found)


def _of_earlier_ones(trial: Trial, step: int, found: Mapping[Pair, np.ndarray]) -> str:
    """Where all are one mean of the weights after each step so far, the shares fitted to the largest."""
    steps = [other for other in trial.case.steps if other <= step]
    names = ["before training", *(f"after step {other}" for other in steps)]
    tables = {at: _after_each(trial, at, steps) for at in found}
    largest = max(found, key=lambda at: found[at].size)
    if found[largest].size <= 2 * len(names):
        return ""
    shares, *_ = np.linalg.lstsq(tables[largest].T, found[largest].ravel().astype(np.float64))
    fits = (
        np.allclose(shares @ tables[at], now.ravel(), rtol=0, atol=64 * np.finfo(now.dtype).eps * np.abs(now).max())
        for at, now in found.items()
    )
    if not np.isclose(shares.sum(), 1, rtol=1e-6) or not all(fits):
        return ""
    told = [(name, share) for name, share in zip(names, shares, strict=True) if abs(share) > 1e-4]
    if len(told) == 1:
        return f"to those {told[0][0]}, "
    return f"to a mean of those {', '.join(f'{name} ({number_text(share, 3)})' for name, share in told)}, "


def _after_each(trial: Trial, at: Pair, steps: Sequence[int]) -> np.ndarray:
    """[1 + steps, entries], the rank's own: of the start, and as the optimizer left them. float64"""
    rank, fqn = at
    left = [record.parameters[fqn] for record in trial.ranks[rank].steps if record.step in steps]
    return np.stack([value.ravel().astype(np.float64) for value in (trial.start_of(rank)[fqn], *left)])
