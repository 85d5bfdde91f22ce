"""What a checkpoint gave back is not what it should be: parameters, the optimizer's state, the schedule.

The reference then goes on from what was seen, and the checks judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.assume import another_optimizer
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays, finding_line, in_order, where_text
from harness.core.checks import update
from harness.core.checks.resume import (
    PARAMETER,
    Key,
    held_state,
    kept_state,
    put_together,
    same,
    saved_state,
    state_after,
    taken_over,
    wanted_part,
    wrong_keys,
)
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import locate
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.slices import slice_text
from harness.hypotheses.started import common, value_words
from harness.hypotheses.whose import is_count

State = dict[Key, np.ndarray]


def resumed_otherwise(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """From these parameters, with this optimizer state, at these rates: each may be all that is wrong. What a rank held once
    it had resumed is compared bit for bit, so that the first of these is seen."""
    if "resume" not in broken:
        return
    wanted = taken_over(trial)
    wrong = {rank: [*wrong_keys(trial, rank, wanted), *kept_state(trial, rank)] for rank in sorted(trial.ranks)}
    places = {(rank, key) for rank, keys in wrong.items() for key in keys}
    weights = {(rank, key) for rank, key in places if key[0] == PARAMETER}
    ways = [
        (_parameters(trial, weights), ("left", "state") if _elsewhere(trial, weights) else ("left",)),
        ((_optimizer if trial.case.model_of is None else _kept)(trial, places - weights), ("state",)),
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
    yield "before training", {(PARAMETER, fqn): full for fqn, full in trial.seed_weights.items()}
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
    requested = f"after step {trial.saved[-1].case.saved_step}"
    if moment := _elsewhere(trial, places):
        text = f"training goes on from the parameters of another moment: those {moment}"
        return Cause("resumed elsewhere", text, expected=f"those {requested}", details=(("moment", moment),))
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    first = next((moment for moment, state in _moments(trial) if _holds(trial, places, state)), "")
    if first == "before training":
        text = f"parameters are not loaded from the checkpoint {where}: they are those {first}"
        return Cause("parameters not loaded", text, details=(("moment", first),))
    if pair := _exchanged(trial, places):
        text = f"after resuming, {pair[0]} has the values of {pair[1]}"
        return Cause("parameters exchanged", text, where, details=(("parameter", pair[0]), ("of", pair[1])))
    if not first and (found := _other_slices(trial, places)):
        text = "parameters after resuming are other slices of what was saved"
        return Cause("slices mixed", text, where, hint=found, details=(("moment", requested),))
    became = f"those {first}" if first else _became(trial, places)
    text = f"parameters after resuming are not those {requested}" + f", they are {became}" * bool(became)
    return Cause("parameters changed over the checkpoint", text, where, details=(("are", became),))


def _other_slices(trial: Trial, places: Places) -> str:
    """What the first of these ranks has, if each has another slice of what was saved in place of its own; else nothing."""
    saved, first = saved_state(trial.saved[-1]), ""
    for rank, key in sorted(places):
        held, own = held_state(trial, rank)[key], trial.slice_of(rank, key[1])
        full = saved[key].reshape(trial.plan.shapes[key[1]])
        part = None if own is None or is_count(held) else locate(held, full)
        if part is None or own is None:
            return ""
        texts = (slice_text(one, full.shape, flat=bool(trial.plan.flat)) for one in (part, own))
        first = first or f"after resuming, rank {rank} has {' in place of '.join(texts)} of {key[1]}"
    return first


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
    whole = bool(moments) and not became and not any(one is None for one in held)
    slices = _other_slices(trial, places) if whole else ""
    return Cause("optimizer state lost", text, where, hint=slices, details=(("state", tuple(names)), ("are", became)))


def _kept(trial: Trial, places: Places) -> Cause | None:
    """An optimizer that should be new."""
    if not places:
        return None
    saved = saved_state(trial.saved[-1])
    places = {(rank, key) for rank, key in places if held_state(trial, rank)[key].ndim} or places
    names = sorted({key[0] for _, key in places})
    known = {(rank, key) for rank, key in places if key in saved} == places and _holds(trial, places, saved)
    became = f"saved after step {trial.case.model_of}" if known else ""
    text = f"the optimizer is not new, it begins with {' and '.join(names)}" + f" {became}" * bool(became)
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    return Cause("optimizer state kept", text, where, details=(("state", tuple(names)), ("are", became)))


def _became(trial: Trial, places: Places) -> str:
    """What has become of what was saved, in writing or in reading."""
    held, saved = _held_together(trial), saved_state(trial.saved[-1])
    keys = {key for _, key in places if key in held}
    return common([value_words(held[key], saved[key]) for key in keys if saved[key].ndim])


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
    """The first parameter of which all that is wrong is what was saved for another one; or the first average of it, if its
    averages are one another's."""
    saved = saved_state(trial.saved[-1])
    for fqn in in_order(trial, (key[1] for _, key in places)):
        own = {(rank, key) for rank, key in places if key[1] == fqn}
        names = sorted({name for _, (name, _) in own})
        moved = [((fqn, of), {name: (name, of) for name in names}) for of in trial.plan.shapes if of != fqn]
        kept = [name for name, of in saved if of == fqn]
        for others in itertools.product(*([other for other in kept if other != name] for name in names)):
            moved.append(((names[0], others[0]), {n: (other, fqn) for n, other in zip(names, others, strict=True)}))
        for pair, source in moved:
            theirs = {(name, fqn): saved[key] for name, key in source.items() if key in saved}
            shapes = all(whole.shape == saved[key].shape and not is_count(whole) for key, whole in theirs.items())
            if theirs and shapes and _holds(trial, own, theirs):
                return pair
    return None


def _schedule(trial: Trial) -> Cause | None:
    """From some step on every rate is the one that the step had as many steps after the beginning as this is after resuming. If
    the launch starts from weights alone, it is the other way round."""
    if trial.case.model_of is not None:
        return _schedule_goes_on(trial, trial.case.model_of)
    rates, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    seen = [(step.step, step.lr) for _, step, _ in trial.steps() if step.lr is not None]
    step = _first_odd_rate(trial)
    if step is None or not all(math.isclose(lr, rates[n - saved], rel_tol=1e-12) for n, lr in seen if n >= step):
        return None
    text = f"the schedule restarts after resuming: the learning rate of step {step} is that of step {step - saved}"
    details = (("step", step), ("of_step", step - saved))
    return Cause("schedule starts anew", text, expected=number_text(rates[step]), details=details)


def copies_not_loaded(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The optimizer steps copies of the parameters that are those of another moment, and the model gets what it makes of them.
    After its first step, all are nearer to those of that moment than to what was loaded."""
    if not trial.saved or "update" not in broken or any(one.resumed is None for one in trial.ranks.values()):
        return
    for moment, state in _moments(trial):
        if all(_nearer(trial, rank, state) for rank in trial.ranks):
            text = f"the first step after loading is made from other parameters than were loaded: from those {moment}"
            cause = Cause("copies not loaded", text, details=(("moment", moment),))
            yield Hypothesis(cause, partial(_stepped_from, state), 1, (finding_line(broken["update"]),))
            return


def _nearer(trial: Trial, rank: int, state: State) -> bool:
    steps, held = trial.ranks[rank].steps, held_state(trial, rank)
    first = steps[0].parameters if steps else {}
    for fqn, left in first.items():
        key = (PARAMETER, fqn)
        if key not in state or key not in held or not left.size:
            continue
        other = wanted_part(trial, rank, key, state[key])
        if other.shape != left.shape or held[key].shape != left.shape:
            return False
        if not np.linalg.norm(left - other) < np.linalg.norm(left - held[key]):
            return False
    return bool(first)


def _stepped_from(state: State, trial: Trial) -> Trial:
    """Assume it. Apart from decay, an optimizer adds what does not depend on the value."""
    first, loaded = trial.case.steps.start, _held_together(trial)

    def left(step: int, parameters: Arrays) -> Arrays:
        return {f: value + moved(f) for f, value in parameters.items()} if step == first else parameters

    def moved(fqn: str) -> np.ndarray:
        decay = trial.reference_step(first).lr * update.recipe_of(trial, fqn, first).weight_decay
        return (state[PARAMETER, fqn] - loaded[PARAMETER, fqn]) * (1 - decay)

    def begun(rank: int, fqn: str) -> np.ndarray:
        return wanted_part(trial, rank, (PARAMETER, fqn), state[PARAMETER, fqn])

    return another_optimizer(trial, AssumedOptimizer(begun=begun), left=left)


def _schedule_goes_on(trial: Trial, after: int) -> Cause | None:
    step = _first_odd_rate(trial)
    seen = [(record.step, record.lr) for _, record, _ in trial.steps() if record.lr is not None]
    if step is None or not all(math.isclose(lr, _later_rate(trial, n), rel_tol=1e-12) for n, lr in seen if n >= step):
        return None
    text = f"the schedule goes on from the checkpoint: the learning rate of step {step} is that of step {step + after}"
    expected, details = number_text(trial.reference_step(step).lr), (("step", step), ("of_step", step + after))
    return Cause("schedule goes on", text, expected=expected, details=details)


def _later_rate(trial: Trial, step: int) -> float:
    """The rate of as many steps later as were trained before the weights were saved; behind the recipe's end its last."""
    steps = trial.reference.steps
    return steps[min(step + (trial.case.model_of or 0), len(steps)) - 1].lr


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
    rates, odd, anew = {one.step: one.lr for one in trial.reference.steps}, _first_odd_rate(trial), trial.case.model_of

    def rate(step: int) -> float:
        return rates[step - first + 1] if anew is None else _later_rate(trial, step)

    words: dict[str, Any] = {
        "left": lambda step, parameters: weights if step == first - 1 else parameters,
        "state": lambda step: state if step == first else None,
        "rate": lambda step, fqn: rates[step] if odd is None or step < odd else rate(step),
        "weights": weights,
    }
    way = way if anew is None else tuple("weights" if word == "left" else word for word in way)
    assumed = _counting_on(trial, state) if "state" in way else AssumedOptimizer()
    return another_optimizer(trial, assumed, **{word: words[word] for word in way})


def _counting_on(trial: Trial, state: dict[str, Arrays]) -> AssumedOptimizer:
    """From the counters resumed, from none where they did not arrive; an optimizer may keep none at all."""
    if not any(name == "step" for name, _ in saved_state(trial.saved[-1])):
        return AssumedOptimizer()
    begun, first = {fqn: int(held["step"]) for fqn, held in state.items() if "step" in held}, trial.case.steps.start
    return AssumedOptimizer(counter=lambda step, fqn: begun.get(fqn, 0) + step - first + 1)
