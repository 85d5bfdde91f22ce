"""What ranks go on from is not what it should be: initial weights, what a checkpoint gave back, weights between two steps.

Whose values these are is found by `whose`; the reference then goes on from what was seen, and the checks judge.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from harness.checks import update
from harness.checks.resume import (
    PARAMETER,
    Key,
    held_state,
    put_together,
    same,
    saved_state,
    state_after,
    wanted_part,
    wrong_keys,
)
from harness.diagnosis.assume import another_optimizer, another_reference
from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.hypothesis import Broken, Hypothesis, no_reference
from harness.diagnosis.whose import Source, is_constant, relation_of
from harness.diagnosis.words import Arrays, Pair, finding_line, in_order, some, where_text
from harness.evidence.text import number_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial

State = dict[Key, np.ndarray]


def _words(value: np.ndarray, right: np.ndarray, pool: Iterable[tuple[Source, np.ndarray]] = ()) -> str:
    """Say whose values these are; empty if no other tensor has them."""
    if value.size > 1 and is_constant(value):
        return f"all {number_text(value.flat[0])}"
    found = relation_of(value, right, pool)
    if found is None or found.source is None:
        return "" if found is None else found.words("", ())
    return f"those of {found.source.fqn}"


def _common(texts: Collection[str]) -> str:
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
        (rank, fqn), twin = next(iter(twins.items()))
        text = f"ranks start from the same shard: rank {rank} holds the values of rank {twin}"
        cause = Cause("same shard", text, where_text(trial, strange), details=(("rank", rank), ("of", twin)))
    else:
        are = _common([_seed_words(trial, at) for at in strange])
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
    weights, slices = trial.reference.weights, trial.plan.slices
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


def _seed_words(trial: Trial, at: Pair) -> str:
    rank, fqn = at
    part, weights = trial.plan.slices[rank][fqn], trial.reference.weights
    pool = (
        (Source("weight", other, part), take(full, part))
        for other, full in weights.items()
        if other != fqn and full.shape == weights[fqn].shape
    )
    held = _held(trial, at)
    return "" if held is None else _words(held, take(weights[fqn], part), pool)


def _again(trial: Trial, at: Pair) -> bool:
    """Whether the repeat of the run started from the same."""
    rank, fqn = at
    assert trial.repeat is not None
    others = trial.repeat.ranks[rank].parameters if rank in trial.repeat.ranks else ()
    return any(one.fqn == fqn and same(_held(trial, at), one.value) for one in others)


def observed_weights(trial: Trial) -> Arrays | None:
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
        _common([_words(now.reshape(left.shape), left) for now, left in both.values() if left is not None])
        if fits
        else "another shape"
    )
    became = became or _mean_of_steps(trial, step, {at: now for at, (now, _) in both.items()})
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
    return " + ".join(told).removesuffix(" x 1")


def _after_each(trial: Trial, at: Pair, steps: Sequence[int]) -> list[np.ndarray]:
    """[entries], the rank's own: of the start, and as the optimizer left them, nothing where it did not. float64"""
    rank, fqn = at
    left = [record.parameters for record in trial.ranks[rank].steps if record.step in steps]
    known = (held.get(fqn, np.empty(0)) for held in (trial.start_of(rank), *left))
    return [value.ravel().astype(np.float64) for value in known]


# ---- what a checkpoint gave back


def resumed_otherwise(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """From these parameters, with this optimizer state, at these rates: each may be all that is wrong. What a rank held once
    it had resumed is compared bit for bit, so that the first of these is seen."""
    if "resume" not in broken:
        return
    wanted = saved_state(trial.saved[-1])
    wrong = {rank: wrong_keys(trial, rank, wanted) for rank in sorted(trial.ranks)}
    places = {(rank, key) for rank, keys in wrong.items() for key in keys}
    weights = {(rank, key) for rank, key in places if key[0] == PARAMETER}
    ways = [
        (_parameters(trial, weights), ("left", "state") if _elsewhere(trial, weights) else ("left",)),
        (_optimizer(trial, places - weights), ("state",)),
        (_schedule(trial), ("rate",)),
    ]
    known = [(cause, way) for cause, way in ways if cause]
    whole = bool(known) and known[0][0].kind == "resumed elsewhere"
    for number, (cause, way) in enumerate(known[:1] if whole else known):
        line = finding_line(broken["resume"])
        also = tuple(("also", other) for other, _ in known[1:]) if not number and not whole else ()
        checks = ("resume", "completed") if whole and _goes_on(trial) else ("resume",)
        yield Hypothesis(cause, partial(_going_on, way), 1, (*also, line), () if number else checks)


Places = set[tuple[int, Key]]
"""Rank, and what it should have got from the checkpoint and has not."""


def _moments(trial: Trial) -> Iterator[tuple[str, State]]:
    """All parameters before training, and as the earlier launches held them after each of their steps, the latest first."""
    yield "before training", {(PARAMETER, fqn): full for fqn, full in trial.reference.weights.items()}
    for launch in reversed(trial.saved):
        for step in reversed(launch.case.steps):
            state = {key: whole for key, whole in state_after(launch, step).items() if key[0] == PARAMETER}
            if len(state) == len(trial.reference.weights):
                yield f"after step {step}", state


def _elsewhere(trial: Trial, places: Places) -> str:
    """The moment of which all parameters of all ranks are; empty where it is none, or the one requested."""
    moments = _moments(trial) if places else ()
    return next((m for m, state in moments if not any(wrong_keys(trial, r, state) for r in trial.ranks)), "")


def _parameters(trial: Trial, places: Places) -> Cause | None:
    if not places:
        return None
    requested = f"after step {trial.case.steps.start - 1}"
    if moment := _elsewhere(trial, places):
        text = f"training goes on from the parameters of another moment: those {moment}"
        return Cause("resumed elsewhere", text, expected=f"those {requested}", details=(("moment", moment),))
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    first = next((moment for moment, state in _moments(trial) if _holds(trial, places, state)), "")
    if first == "before training":
        text = f"parameters are not loaded from the checkpoint {where}: they are those {first}"
        return Cause("parameters not loaded", text, details=(("moment", first),))
    if pair := _exchanged(trial, places):
        text = f"the checkpoint gives {pair[0]} the values of {pair[1]}"
        return Cause("parameters exchanged", text, where, details=(("parameter", pair[0]), ("of", pair[1])))
    became = f"those {first}" if first else _became(trial, places)
    text = f"parameters after resuming are not those {requested}" + f", they are {became}" * bool(became)
    return Cause("parameters changed over the checkpoint", text, where, details=(("are", became),))


def _optimizer(trial: Trial, places: Places) -> Cause | None:
    if not places:
        return None
    saved = saved_state(trial.saved[-1])
    moments = {(rank, key) for rank, key in places if saved[key].ndim}
    places = moments or places  # counters that are lost as well are in the check's findings
    names = sorted({key[0] for _, key in places})
    held = [held_state(trial, rank).get(key) for rank, key in sorted(places)]
    pair = _exchanged(trial, places)
    became = "missing" if all(one is None for one in held) else ""
    became = became or "zero" * (not any(one is None or one.any() for one in held))
    became = became or (f"that of {pair[1]} for {pair[0]}" if pair else _became(trial, places))
    text = f"the optimizer resumes with another {' and '.join(names)}" + f": {became}" * bool(became)
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    return Cause("optimizer state lost", text, where, details=(("state", tuple(names)), ("are", became)))


def _became(trial: Trial, places: Places) -> str:
    """What has become of what was saved, in writing or in reading."""
    held, saved = _held_together(trial), saved_state(trial.saved[-1])
    keys = {key for _, key in places if key in held}
    return _common([_words(held[key], saved[key]) for key in keys if saved[key].ndim])


def _held_together(trial: Trial) -> State:
    """What all ranks held once they had resumed."""
    return put_together(trial, {rank: evidence.resumed for rank, evidence in trial.ranks.items()})


def _holds(trial: Trial, places: Places, instead: State) -> bool:
    """Whether what ranks hold wrongly of these is theirs of `instead`."""
    known = [(rank, key) for rank, key in places if key in instead]
    return len(known) == len(places) and all(
        same(held_state(trial, r).get(key), wanted_part(trial, r, key, instead[key])) for r, key in known
    )


def _exchanged(trial: Trial, places: Places) -> tuple[str, str] | None:
    """The first parameter of which all that is wrong is what was saved for another one."""
    saved = saved_state(trial.saved[-1])
    fqns = in_order(trial, (key[1] for _, key in places))
    for fqn in fqns:
        own = {(rank, key) for rank, key in places if key[1] == fqn}
        for other in (other for other in trial.plan.shapes if other != fqn):
            theirs = {(name, fqn): saved[name, other] for _, (name, _) in own if (name, other) in saved}
            shapes = all(whole.shape == saved[key].shape and not is_constant(whole) for key, whole in theirs.items())
            if theirs and shapes and _holds(trial, own, theirs):
                return fqn, other
    return None


def _schedule(trial: Trial) -> Cause | None:
    """From some step on every rate is the one that the step had as many steps after the beginning as this is after resuming."""
    rates, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    seen = [(step.step, step.lr) for _, step, _ in trial.steps() if step.lr is not None]
    step = _first_odd_rate(trial)
    if step is None or not all(math.isclose(lr, rates[n - saved], rel_tol=1e-12) for n, lr in seen if n >= step):
        return None
    text = f"the schedule restarts after resuming: the learning rate of step {step} is that of step {step - saved}"
    details = (("step", step), ("of_step", step - saved))
    return Cause("schedule starts anew", text, expected=number_text(rates[step]), details=details)


def _first_odd_rate(trial: Trial) -> int | None:
    """The first step whose learning rate is not the schedule's."""
    seen = ((step.step, step.lr, r.lr) for _, step, r in trial.steps() if step.lr is not None)
    return min((step for step, lr, wanted in seen if not math.isclose(lr, wanted, rel_tol=1e-12)), default=None)


def _goes_on(trial: Trial) -> bool:
    """Whether all ranks train on to another last step, as from an earlier moment so many steps are left."""
    lasts = {evidence.steps[-1].step for evidence in trial.ranks.values()}
    return len(lasts) == 1 and max(lasts) > trial.case.steps[-1]


def _going_on(way: tuple[str, ...], trial: Trial) -> Trial:
    """Assume that training went on from what was held. way: from which of parameters (left), the optimizer's state and the
    schedule (rate), in the words of reference.counterfactual."""
    weights, state, first = Arrays(), dict[str, Arrays](), trial.case.steps.start
    for (name, fqn), value in _held_together(trial).items():
        if name == PARAMETER:
            weights[fqn] = value
        else:
            state.setdefault(fqn, {})[name] = value
    rates, odd = {step.step: step.lr for step in trial.reference.steps}, _first_odd_rate(trial)
    words: dict[str, Any] = {
        "left": lambda step, parameters: weights if step == first - 1 else parameters,
        "state": lambda step: state if step == first else None,
        "rate": lambda step, fqn: rates[step] if odd is None or step < odd else rates[step - first + 1],
    }
    assumed = _counting_on(trial, state) if "state" in way else AssumedOptimizer()
    return another_optimizer(trial, assumed, **{word: words[word] for word in way})


def _counting_on(trial: Trial, state: dict[str, Arrays]) -> AssumedOptimizer:
    """From the counters resumed, from none where they did not arrive; an optimizer may keep none at all."""
    if not any(name == "step" for name, _ in saved_state(trial.saved[-1])):
        return AssumedOptimizer()
    begun, first = {fqn: int(held["step"]) for fqn, held in state.items() if "step" in held}, trial.case.steps.start
    return AssumedOptimizer(counter=lambda step, fqn: begun.get(fqn, 0) + step - first + 1)
