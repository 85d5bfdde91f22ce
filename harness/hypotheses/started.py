"""What ranks go on from is not what it should be: initial weights, or weights between two steps.

Whose values these are is found by `whose`; the reference then goes on from what was seen, and the checks judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from harness.core.causes.assume import another_reference
from harness.core.causes.differences import OF_GRADIENTS
from harness.core.causes.hypothesis import Broken, Hypothesis, no_reference
from harness.core.causes.words import Arrays, Pair, finding_line, rank_words, some, where_text
from harness.core.checks import update
from harness.core.checks.resume import same
from harness.core.evidence.text import number_text
from harness.core.judge.contents import take
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.hypotheses.whose import Source, is_constant, relation_of


def value_words(value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[Source, np.ndarray]] = ()) -> str:
    """Say whose values these are; empty if no other tensor has them."""
    if value.size > 1 and is_constant(value):
        return f"all {number_text(value.flat[0])}"
    found = relation_of(value, right, pool)
    if found is None or found.source is None:
        return "" if found is None else found.words("", ())
    return f"those of {found.source.fqn}"


def common(texts: Collection[str]) -> str:
    """Return what all of them are; the first of a few; nothing where some are unknown."""
    each = [*dict.fromkeys(texts)]
    return "" if "" in each else each[0] if len(each) == 1 else some(each)


# ---- initial weights


def other_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The reference is trained from the weights observed, if ranks that hold the same slice hold the same of it."""
    if "initial_weights" not in broken or not (strange := _strange(trial)):
        return
    twins = {at: _twin(trial, at) for at in strange}
    again = trial.repeat is not None and not any(_again(trial, at) for at in strange)
    if all(twin is not None for twin in twins.values()):
        (rank, _), twin = next(iter(twins.items()))
        alike = sorted({rank for rank, _ in twins} | {of for of in twins.values() if of is not None})
        text = f"ranks start from the same shard: {rank_words(alike)} hold values of one another"
        cause = Cause("same shard", text, where_text(trial, strange), details=(("rank", rank), ("of", twin)))
    else:
        are = common([_seedvalue_words(trial, at) for at in strange])
        hint = f"they are {are}" * bool(are) or "each run draws new ones" * again
        text = "training does not start from the seed weights"
        cause = Cause(
            "other initial weights", text, where_text(trial, strange), hint=hint, details=(("are", are or hint),)
        )
    weights = observed_weights(trial)
    seen: tuple[str, ...] = ("initial_weights", "shard_contents", *["determinism"] * again)
    if weights is None:
        line = no_reference("the slices that ranks start from do not fit together, and no reference shows what follows")
        yield Hypothesis(cause, None, lines=(line,), seen=(*seen, *OF_GRADIENTS))
    else:
        yield Hypothesis(cause, partial(another_reference, weights=weights), seen=seen)


def _strange(trial: Trial) -> list[Pair]:
    """What is no slice of the seed weights, or is another rank's without being planned so."""
    found = [(rank, fqn) for rank, held in sorted(trial.holdings.items()) for fqn, part in held.items() if part is None]
    if found:
        return found
    weights, slices = trial.seed_weights, trial.plan.slices
    twins = [at for at in _all(trial) if _twin(trial, at) is not None]
    planned = {at: part for at in twins if (part := slices[at[0]].get(at[1]))}
    return [at for at in twins if at not in planned or not same(_held(trial, at), take(weights[at[1]], planned[at]))]


def _all(trial: Trial) -> Iterator[Pair]:
    return ((rank, tensor.fqn) for rank, evidence in sorted(trial.ranks.items()) for tensor in evidence.parameters)


def _held(trial: Trial, at: Pair) -> np.ndarray | None:
    return next((tensor.value for tensor in trial.ranks[at[0]].parameters if tensor.fqn == at[1]), None)


def _twin(trial: Trial, at: Pair) -> int | None:
    """A rank that should hold another slice and holds these very values: one of the two is wrong, or both are. A constant's
    slices are all alike."""
    rank, fqn = at
    value, part = _held(trial, at), trial.plan.slices[rank].get(fqn)
    if value is None or is_constant(value) or value.shape == trial.plan.shapes.get(fqn):
        return None
    peers = (peer for peer in trial.ranks if trial.plan.slices[peer].get(fqn, part) != part)
    return next((peer for peer in peers if same(_held(trial, (peer, fqn)), value)), None)


def _seedvalue_words(trial: Trial, at: Pair) -> str:
    rank, fqn = at
    part, weights = trial.plan.slices[rank][fqn], trial.seed_weights
    pool = (
        (Source("weight", other, part), take(full, part))
        for other, full in weights.items()
        if other != fqn and full.shape == weights[fqn].shape
    )
    held = _held(trial, at)
    return "" if held is None else value_words(held, take(weights[fqn], part), pool)


def _again(trial: Trial, at: Pair) -> bool:
    """Whether the repeat of the run started from the same."""
    rank, fqn = at
    assert trial.repeat is not None
    others = trial.repeat.ranks[rank].parameters if rank in trial.repeat.ranks else ()
    return any(one.fqn == fqn and same(_held(trial, at), one.value) for one in others)


def observed_weights(trial: Trial) -> Arrays | None:
    """Whole, from the slices that the plan gives to ranks; None where holders of one slice disagree, or shapes do not fit."""
    whole = {fqn: full.copy() for fqn, full in trial.seed_weights.items()}
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


# ---- weights between two steps


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What there was when the next step began, if it has the shape of what the optimizer left."""
    changes = update.changed(trial)
    if "update" not in broken or not changes:
        return
    step, pairs = next(iter(changes.items()))
    records = {(rank, record.step): record for rank, record, _ in trial.steps()}
    record = {rank: records[rank, step] for rank, _ in pairs}
    both = {at: ((record[at[0]].changed or {})[at[1]], record[at[0]].parameters.get(at[1])) for at in pairs}
    fits = all(left is not None and now.size == left.size and now.dtype == left.dtype for now, left in both.values())
    became = (
        common([value_words(now.reshape(left.shape), left) for now, left in both.values() if left is not None])
        if fits
        else "another shape"
    )
    became = became or _mean_of_steps(trial, step, {at: now for at, (now, _) in both.items()})
    became += ", as weight decay makes them" * (fits and _decayed(trial, step, both.values()))
    text = f"weights are changed outside the optimizer {update.until(trial, step)}" + f", to {became}" * bool(became)
    cause = Cause("weights changed", text, where_text(trial, pairs), details=(("step", step), ("are", became)))

    def left(number: int, parameters: Arrays) -> Arrays:
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(number, ()):
            part, now = trial.slice_of(rank, fqn), (records[rank, number].changed or {})[fqn]
            target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part) if part else now
            if target.size == now.size:
                target[...] = now.reshape(target.shape)
        return whole

    assume = partial(another_reference, left=left) if fits else None
    yield Hypothesis(cause, assume, lines=(finding_line(broken["update"]),), seen=("update",))


def _decayed(trial: Trial, step: int, both: Iterable[tuple[np.ndarray, np.ndarray | None]]) -> bool:
    """Whether what the optimizer left is smaller by what this step's weight decay takes."""
    kept = 1 - trial.reference_step(step).lr * trial.case.training.weight_decay
    near = (
        (now, left, 4 * np.finfo(now.dtype).eps) for now, left in both if left is not None and now.dtype.kind == "f"
    )
    alike = [np.allclose(now.ravel(), kept * left.ravel(), rtol=eps, atol=0) for now, left, eps in near]
    return kept != 1 and bool(alike) and all(alike)


def _mean_of_steps(trial: Trial, step: int, found: Mapping[Pair, np.ndarray]) -> str:
    """Which mean of the weights after each step so far they all are, the shares fitted to the largest; empty if none."""
    steps = [other for other in trial.case.steps if other <= step]
    at = max(found, key=lambda place: found[place].size)
    each = {place: _after_each(trial, place, steps) for place in found}
    sizes = {now.size == value.size for place, now in found.items() for value in each[place]}
    if found[at].size <= 2 * (len(steps) + 1) or sizes != {True} or not np.isfinite(np.stack(each[at])).all():
        return ""
    if not all(np.isfinite(now).all() for now in found.values()):
        return ""
    shares = np.linalg.lstsq(np.stack(each[at]).T, found[at].ravel().astype(np.float64))[0]
    fits = (
        np.allclose(shares @ np.stack(each[place]), now.ravel(), rtol=0, atol=1e-5 * np.abs(now).max())
        for place, now in found.items()
    )
    if not np.isclose(shares.sum(), 1, rtol=1e-6) or not all(fits):
        return ""
    names = ["before training", *(f"after step {number}" for number in steps)]
    told = [f"those {name} x {share:.3g}" for name, share in zip(names, shares, strict=True) if abs(share) > 1e-4]
    own = [f"those after step {step} x 1"]  # which they were changed from
    return "" if told == own else " + ".join(told).removesuffix(" x 1")


def _after_each(trial: Trial, at: Pair, steps: Sequence[int]) -> list[np.ndarray]:
    """[entries], the rank's own: of the start, and as the optimizer left them, nothing where it did not. float64"""
    rank, fqn = at
    left = [record.parameters for record in trial.ranks[rank].steps if record.step in steps]
    known = (held.get(fqn, np.empty(0)) for held in (trial.start_of(rank), *left))
    return [value.ravel().astype(np.float64) for value in known]
