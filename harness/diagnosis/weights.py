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
from harness.judge.contents import take
from harness.judge.result import Cause, Lines
from harness.judge.trial import Trial
from harness.reference.distance import best_fit

ANEW = "each run draws new ones, as without a seed"
MULTIPLE, TIMES, FEW = "they are ", " times the seed's", 4


def other_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The reference is trained from the weights observed, if ranks that hold the same slice hold the same of it."""
    if "initial_weights" not in broken or (found := _wrong_weights(trial)) is None:
        return
    (cause, lines), weights = found, observed_weights(trial)
    seen = ("initial_weights", "shard_contents", *["determinism"] * (cause.hint == ANEW))
    if weights is None:
        what = "ranks that hold the same slice start from different numbers, and no reference tells what follows"
        lines, seen = (*lines, no_reference(what)), (*seen, *OF_GRADIENTS)
    yield Hypothesis(cause, partial(another_reference, weights=weights) if weights else None, 1, lines, seen)


def observed_weights(trial: Trial) -> dict[str, np.ndarray] | None:
    """Whole, from the slices that the plan gives to ranks; None where holders of one slice disagree, or shapes do not fit."""
    whole = {fqn: full.copy() for fqn, full in trial.reference.weights.items()}
    laid: dict[object, bytes] = {}
    for rank, evidence in sorted(trial.ranks.items()):
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
    found = set(instead.values())
    hint = found.pop() if len(found) == 1 else _several_factors(trial, instead)
    if all(text.startswith("the values of ") for text in found):
        hint = hint or _of_another(trial, strange[0])
    if hint.startswith("the values of "):
        hint = f"{strange[0][1]} holds {hint}"
    hint = hint or _drawn_anew(trial, strange)
    line = f"rank {strange[0][0]}, {strange[0][1]}: {_how_they_differ(*_held(trial, strange[0]))}"
    text = "training does not start from the seed weights"
    return Cause("other initial weights", text, where_text(trial, strange), hint=hint), (("weights", line),)


def _several_factors(trial: Trial, instead: Mapping[Pair, str]) -> str:
    """Which parameters are which multiple of the seed's, where all are one."""
    by_factor: dict[str, list[str]] = {}
    for (_, fqn), text in instead.items():
        by_factor.setdefault(text, []).append(fqn)
    if len(by_factor) > FEW or not all(text.startswith(MULTIPLE) and text.endswith(TIMES) for text in by_factor):
        return ""
    texts = (
        f"{text.removeprefix(MULTIPLE).removesuffix(TIMES)} ({some(in_order(trial, fqns))})"
        for text, fqns in by_factor.items()
    )
    return f"{MULTIPLE}multiples of the seed's: {', '.join(texts)}"


def _held(trial: Trial, place: Pair) -> tuple[np.ndarray, np.ndarray]:
    """What is there and what should be."""
    rank, fqn = place
    value = next(t.value for t in trial.ranks[rank].parameters if t.fqn == fqn)
    return value, take(trial.reference.weights[fqn], trial.plan.slices[rank][fqn])


def _instead(value: np.ndarray, wanted: np.ndarray) -> str:
    """A constant, or what becomes of the seed weight."""
    if value.size > 1 and np.all(value == value.flat[0]):
        return f"they are all {value.flat[0]:g}"
    if value.shape != wanted.shape:
        return ""
    if dtype := rounded_to((value, wanted)):
        return f"they are the seed's rounded to {dtype}"
    factor = best_fit(value, wanted)
    if factor and np.allclose(value, factor * wanted, rtol=1e-9, atol=0):
        return f"{MULTIPLE}{factor:.6g}{TIMES}"
    return rearranged(value, wanted)


def rounded_to(*pairs: tuple[np.ndarray, np.ndarray]) -> str:
    """The dtype that the first of each two, which is the second otherwise, has been through; empty where there is none."""
    for dtype, rounded in ROUNDED.items():
        if all(now.shape == was.shape and np.array_equal(now, rounded(was).astype(now.dtype)) for now, was in pairs):
            return dtype
    return ""


def _to_bfloat16(value: np.ndarray) -> np.ndarray:
    """To the nearest, to even where two are."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


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
    value, part, full = _held(trial, place)[0], trial.plan.slices[rank][fqn], trial.reference.weights[fqn]
    alike = (name for name, other in trial.reference.weights.items() if other.shape == full.shape and name != fqn)
    same = (name for name in alike if np.array_equal(take(trial.reference.weights[name], part), value))
    return next((f"the values of {name}" for name in same), "")


def _drawn_anew(trial: Trial, strange: list[Pair]) -> str:
    """Whether a repeat of the run started from others again."""
    repeats = trial.repeat.ranks if trial.repeat else {}
    again = {(rank, t.fqn): t.value.tobytes() for rank, e in repeats.items() for t in e.parameters}
    first = {(rank, t.fqn): t.value.tobytes() for rank, e in trial.ranks.items() for t in e.parameters}
    anew = bool(again) and all(first[place] != again.get(place) for place in strange)
    return ANEW if anew else ""


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
            cut = [fqn for fqn in trial.plan.shapes if trial.plan.slices[one][fqn] != trial.plan.slices[other][fqn]]
            where = "" if set(cut) == same[0] else in_parameters(trial, same[0])
            observed = f"ranks along {axis} start from the same shard"
            return Cause("same shard", f"{observed}: rank {other} holds the values of rank {one}", where)
    return None


def _start_alike(trial: Trial, group: tuple[int, ...]) -> set[str]:
    """Parameters that the plan cuts between the members, and of which all hold the first one's bytes, not the whole."""
    first, *others = [{t.fqn: t.value for t in trial.ranks[rank].parameters} for rank in group]
    mine, next_ones = trial.plan.slices[group[0]], trial.plan.slices[group[1]]
    cut = [f for f in first if f in mine and mine[f] != next_ones.get(f, mine[f]) and first[f].size]
    alike = {f for f in cut if all(f in other and other[f].tobytes() == first[f].tobytes() for other in others)}
    alike = {f for f in alike if np.any(first[f] != first[f].flat[0])}  # a constant has no slices to tell apart
    return alike if all(first[f].shape != trial.plan.shapes[f] for f in alike) else set()


# ---- changed when the optimizer is done


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What there was when the next step began, if it has the shape of what the optimizer left."""
    changes = update.changed(trial)
    if "update" not in broken or not (cause := _cause(trial, changes)):
        return
    held = {(rank, step.step): step.changed or {} for rank, step, _ in trial.steps()}

    def left(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(step, ()):
            if part := trial.slice_of(rank, fqn):
                target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                target[...] = held[rank, step][fqn].reshape(target.shape)
        return whole

    fits, lines = "shape or dtype" not in cause.observed, (finding_line("update", broken["update"]),)
    yield Hypothesis(cause, partial(another_reference, left=left) if fits else None, 1, lines, ("update",))


def _cause(trial: Trial, changes: dict[int, list[Pair]]) -> Cause | None:
    step = next(iter(changes), None)
    if step is None:
        return None
    observed = f"weights are changed outside the optimizer {update.until(trial, step)}"
    how = _as_if(trial, step, changes[step])
    return Cause("weights changed", f"{observed}: {how}{where_text(trial, changes[step])}")


def _as_if(trial: Trial, step: int, pairs: list[Pair]) -> str:
    """What was done to all of them, if it is something that is easily told."""
    records = {rank: next(s for s in trial.ranks[rank].steps if s.step == step) for rank, _ in pairs}
    both = [(records[rank].parameters[fqn], (records[rank].changed or {})[fqn]) for rank, fqn in pairs]
    if any(now.size != left.size or now.dtype != left.dtype for left, now in both):
        return "to another shape or dtype, "
    if not any(now.any() for _, now in both):
        return "to 0, "
    if dtype := rounded_to(*((now.reshape(left.shape), left) for left, now in both)):
        return f"rounded to {dtype}, "
    return _of_earlier_ones(trial, step, {at: now for at, (_, now) in zip(pairs, both, strict=True)})


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
        if now.size
    )
    if not np.isclose(shares.sum(), 1, rtol=1e-6) or not all(fits):
        return ""
    some = [(name, share) for name, share in zip(names, shares, strict=True) if abs(share) > 1e-4]
    if len(some) == 1:
        return f"to those {some[0][0]}, "
    return f"to a mean of those {', '.join(f'{name} ({share:.3g})' for name, share in some)}, "


def _after_each(trial: Trial, at: Pair, steps: Sequence[int]) -> np.ndarray:
    """[1 + steps, entries], the rank's own: of the start, and as the optimizer left them. float64"""
    rank, fqn = at
    left = [record.parameters[fqn] for record in trial.ranks[rank].steps if record.step in steps]
    return np.stack([value.ravel().astype(np.float64) for value in (trial.start_of(rank)[fqn], *left)])
