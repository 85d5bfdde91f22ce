"""Causes of a wrong resumption: parameters, optimizer state or schedule are not those of the checkpoint.

The reference then goes on from what was observed, and the checks judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.assume import assume_optimizer
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays, finding_line, sort_fqns, where_text
from harness.core.checks import update
from harness.core.checks.resume import (
    PARAMETER,
    TensorKey,
    assemble_state,
    expected_slice,
    has_same_bytes,
    keys_of_wrong_tensors,
    leftover_state_keys,
    resumed_state,
    saved_state,
    state_after,
    state_to_resume,
)
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import find_slice
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.slices import slice_text
from harness.hypotheses.started import common_text, value_text
from harness.hypotheses.whose import is_count

State = dict[TensorKey, np.ndarray]


def resumed_otherwise(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that training goes on from other parameters, with another optimizer state, or at other rates.

    Nothing unless `resume` fails. Each may be all that is wrong; the first one names the others. If ranks resumed
    elsewhere, that is the only one. What a rank held once it had resumed is compared bit for bit, so wrong parameters
    are observed.
    """
    if "resume" not in broken:
        return
    wanted = state_to_resume(trial)
    wrong = {
        rank: [*keys_of_wrong_tensors(trial, rank, wanted), *leftover_state_keys(trial, rank)]
        for rank in sorted(trial.ranks)
    }
    places = set()
    for rank, keys in wrong.items():
        places |= {(rank, key) for key in keys}
    weights = {(rank, key) for rank, key in places if key[0] == PARAMETER}
    judge_state = _wrong_state_cause if trial.case.model_of is None else _retained_state_cause
    proposals = [
        (_wrong_parameters_cause(trial, weights), ("left", "state") if _common_moment(trial, weights) else ("left",)),
        (judge_state(trial, places - weights), ("state",)),
        (_restarted_schedule_cause(trial), ("rate",)),
    ]
    known_proposals = [(cause, parts) for cause, parts in proposals if cause]
    is_elsewhere = bool(known_proposals) and known_proposals[0][0].kind == "resumed elsewhere"
    if is_elsewhere:
        known_proposals = known_proposals[:1]
    for number, (cause, parts) in enumerate(known_proposals):
        line = finding_line(broken["resume"])
        also_lines = tuple(("also", other) for other, _ in known_proposals[1:]) if number == 0 else ()
        checks = ("resume", "completed") if is_elsewhere and _trains_longer(trial) else ("resume",)
        yield Hypothesis(cause, partial(_assume_going_on, parts), 1, (*also_lines, line), () if number else checks)


Places = set[tuple[int, TensorKey]]
"""(rank, parameter or state that it should have got from the checkpoint and has not)."""


def _earlier_moments(trial: Trial) -> Iterator[tuple[str, State]]:
    """Yield (moment in words, all parameters): before training, then after each step of earlier launches, latest first.

    Steps whose parameters are not all on record are left out.
    """
    yield "before training", {(PARAMETER, fqn): full for fqn, full in trial.seed_weights.items()}
    for launch in reversed(trial.saved):
        for step in reversed(launch.case.steps):
            state = {key: full for key, full in state_after(launch, step).items() if key[0] == PARAMETER}
            if len(state) == len(trial.reference.weights):
                yield f"after step {step}", state


def _common_moment(trial: Trial, places: Places) -> str:
    """Return in words the moment from which all parameters of all ranks are, such as "after step 2".

    Empty if there is none, or `places` is empty.
    """
    if not places:
        return ""
    for moment, state in _earlier_moments(trial):
        if not any(keys_of_wrong_tensors(trial, rank, state) for rank in trial.ranks):
            return moment
    return ""


def _wrong_parameters_cause(trial: Trial, places: Places) -> Cause | None:
    """Return the cause of wrong parameters after resuming. None if `places` is empty.

    It is the first that fits: another moment, not loaded, exchanged, other slices; else changed, with what they are
    where that is known.
    """
    if not places:
        return None
    requested = f"after step {trial.saved[-1].case.saved_step}"
    if moment := _common_moment(trial, places):
        text = f"training goes on from the parameters of another moment: those {moment}"
        return Cause("resumed elsewhere", text, expected=f"those {requested}", details=(("moment", moment),))
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    first_moment = next(
        (moment for moment, state in _earlier_moments(trial) if _do_ranks_hold_state(trial, places, state)), ""
    )
    if first_moment == "before training":
        text = f"parameters are not loaded from the checkpoint {where}: they are those {first_moment}"
        return Cause("parameters not loaded", text, details=(("moment", first_moment),))
    if pair := _exchanged_pair(trial, places):
        text = f"after resuming, {pair[0]} has the values of {pair[1]}"
        return Cause("parameters exchanged", text, where, details=(("parameter", pair[0]), ("of", pair[1])))
    if not first_moment and (slices_text := _exchanged_slices_text(trial, places)):
        text = "parameters after resuming are other slices of what was saved"
        return Cause("slices mixed", text, where, hint=slices_text, details=(("moment", requested),))
    became_text = f"those {first_moment}" if first_moment else _change_text(trial, places)
    text = f"parameters after resuming are not those {requested}"
    if became_text:
        text += f", they are {became_text}"
    return Cause("parameters changed over the checkpoint", text, where, details=(("are", became_text),))


def _exchanged_slices_text(trial: Trial, places: Places) -> str:
    """Return in words what the first rank has, if each has another slice of what was saved in place of its own.

    Empty if some rank has no slice of it.
    """
    saved = saved_state(trial.saved[-1])
    first_text = ""
    for rank, key in sorted(places):
        values = resumed_state(trial, rank)[key]
        own_slice = trial.slice_of(rank, key[1])
        full = saved[key].reshape(trial.plan.shapes[key[1]])
        held_slice = None if own_slice is None or is_count(values) else find_slice(values, full)
        if held_slice is None or own_slice is None:
            return ""
        if not first_text:
            is_flat = bool(trial.plan.flat)
            held_text = slice_text(held_slice, full.shape, flat=is_flat)
            own_text = slice_text(own_slice, full.shape, flat=is_flat)
            first_text = f"after resuming, rank {rank} has {held_text} in place of {own_text} of {key[1]}"
    return first_text


def _wrong_state_cause(trial: Trial, places: Places) -> Cause | None:
    """Return the cause of a wrong optimizer state after resuming: missing, zero, another parameter's, or changed.

    None if `places` is empty. Counters are left out if averages are wrong as well.
    """
    if not places:
        return None
    saved = saved_state(trial.saved[-1])
    moments = {(rank, key) for rank, key in places if saved[key].ndim}
    places = moments or places  # counters that are lost as well are in the check's findings
    names = sorted({key[0] for _, key in places})
    held_values = [resumed_state(trial, rank).get(key) for rank, key in sorted(places)]
    pair = _exchanged_pair(trial, places)
    if all(value is None for value in held_values):
        became_text = "missing"
    elif not any(value is None or value.any() for value in held_values):
        became_text = "zero"
    else:
        became_text = f"that of {pair[1]} for {pair[0]}" if pair else _change_text(trial, places)
    text = f"the optimizer resumes with another {' and '.join(names)}"
    if became_text:
        text += f": {became_text}"
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    may_be_slices = bool(moments) and not became_text and not any(value is None for value in held_values)
    slices_text = _exchanged_slices_text(trial, places) if may_be_slices else ""
    details = (("state", tuple(names)), ("are", became_text))
    return Cause("optimizer state lost", text, where, hint=slices_text, details=details)


def _retained_state_cause(trial: Trial, places: Places) -> Cause | None:
    """Return the cause of an optimizer that should be new and has a state. None if `places` is empty.

    For a case that starts from the weights of a checkpoint alone.
    """
    if not places:
        return None
    saved = saved_state(trial.saved[-1])
    places = {(rank, key) for rank, key in places if resumed_state(trial, rank)[key].ndim} or places
    names = sorted({key[0] for _, key in places})
    is_saved_state = {(rank, key) for rank, key in places if key in saved} == places and _do_ranks_hold_state(
        trial, places, saved
    )
    became_text = f"saved after step {trial.case.model_of}" if is_saved_state else ""
    text = f"the optimizer is not new, it begins with {' and '.join(names)}"
    if became_text:
        text += f" {became_text}"
    where = where_text(trial, [(rank, fqn) for rank, (_, fqn) in places])
    return Cause("optimizer state kept", text, where, details=(("state", tuple(names)), ("are", became_text)))


def _change_text(trial: Trial, places: Places) -> str:
    """Return in words what the saved values became, such as rounded or another's. Empty if that is not known."""
    resumed_state = _resumed_whole_state(trial)
    saved = saved_state(trial.saved[-1])
    keys = {key for _, key in places if key in resumed_state}
    return common_text([value_text(resumed_state[key], saved[key]) for key in keys if saved[key].ndim])


def _resumed_whole_state(trial: Trial) -> State:
    """Return the whole state that all ranks held once they had resumed."""
    return assemble_state(trial, {rank: evidence.resumed for rank, evidence in trial.ranks.items()})


def _do_ranks_hold_state(trial: Trial, places: Places, instead: State) -> bool:
    """Return whether all these ranks hold their slices of the state `instead`, byte for byte.

    False if it lacks a key.
    """
    if any(key not in instead for _, key in places):
        return False
    return all(
        has_same_bytes(resumed_state(trial, rank).get(key), expected_slice(trial, rank, key, instead[key]))
        for rank, key in places
    )


def _exchanged_pair(trial: Trial, places: Places) -> tuple[str, str] | None:
    """Return (first parameter whose wrong values are all those saved for another one, that other one).

    None if there is none. If one average of a parameter has the values of another of its averages, the names of both
    averages are returned instead.
    """
    saved = saved_state(trial.saved[-1])
    for fqn in sort_fqns(trial, (key[1] for _, key in places)):
        own_places = {(rank, key) for rank, key in places if key[1] == fqn}
        names = sorted({name for _, (name, _) in own_places})
        exchanges: list[tuple[tuple[str, str], dict[str, TensorKey]]] = []
        for other_fqn in trial.plan.shapes:
            if other_fqn != fqn:
                exchanges.append(((fqn, other_fqn), {name: (name, other_fqn) for name in names}))
        saved_names = [name for name, owner in saved if owner == fqn]
        choices = []
        for name in names:
            choices.append([other for other in saved_names if other != name])
        for others in itertools.product(*choices):
            sources = zip(names, others, strict=True)
            exchanges.append(((names[0], others[0]), {name: (other, fqn) for name, other in sources}))
        for pair, source_keys in exchanges:
            substituted = {(name, fqn): saved[key] for name, key in source_keys.items() if key in saved}
            shapes_agree = all(
                full.shape == saved[key].shape and not is_count(full) for key, full in substituted.items()
            )
            if substituted and shapes_agree and _do_ranks_hold_state(trial, own_places, substituted):
                return pair
    return None


def _restarted_schedule_cause(trial: Trial) -> Cause | None:
    """Return the cause if the schedule restarts after resuming, by the rates that ranks report. None if it does not.

    From some step on each rate is then that of as many steps after the beginning. If the launch starts from weights
    alone, the mistake is the other way round: the schedule goes on.
    """
    if trial.case.model_of is not None:
        return _continued_schedule_cause(trial, trial.case.model_of)
    rates = {step.step: step.lr for step in trial.reference.steps}
    saved = trial.case.steps.start - 1
    reported_rates = [(step.step, step.lr) for _, step, _ in trial.steps_with_reference() if step.lr is not None]
    step = _first_deviating_step(trial)
    if step is None:
        return None
    later_rates = [(number, lr) for number, lr in reported_rates if number >= step]
    if not all(math.isclose(lr, rates[number - saved], rel_tol=1e-12) for number, lr in later_rates):
        return None
    text = f"the schedule restarts after resuming: the learning rate of step {step} is that of step {step - saved}"
    details = (("step", step), ("of_step", step - saved))
    return Cause("schedule starts anew", text, expected=number_text(rates[step]), details=details)


def copies_not_loaded(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield one hypothesis: the optimizer steps its own copies of the parameters, which are those of another moment.

    After its first step, all parameters are then nearer to those of that moment than to the loaded ones. Nothing if
    that is so of no moment, or a rank did not record what it resumed with.
    """
    if not trial.saved or "update" not in broken or any(evidence.resumed is None for evidence in trial.ranks.values()):
        return
    for moment, state in _earlier_moments(trial):
        if all(_is_nearer(trial, rank, state) for rank in trial.ranks):
            text = f"the first step after loading is made from other parameters than were loaded: from those {moment}"
            cause = Cause("copies not loaded", text, details=(("moment", moment),))
            yield Hypothesis(cause, partial(_assume_stepped_from, state), 1, (finding_line(broken["update"]),))
            return


def _is_nearer(trial: Trial, rank: int, state: State) -> bool:
    """Return whether a rank's parameters after its first step are all nearer to `state` than to those it resumed with.

    Parameters that are not in both are left out. False without a first step, or if shapes differ.
    """
    steps = trial.ranks[rank].steps
    resumed_values = resumed_state(trial, rank)
    first_parameters = steps[0].parameters if steps else {}
    for fqn, after_step in first_parameters.items():
        key = (PARAMETER, fqn)
        if key not in state or key not in resumed_values or not after_step.size:
            continue
        other = expected_slice(trial, rank, key, state[key])
        if other.shape != after_step.shape or resumed_values[key].shape != after_step.shape:
            return False
        if not np.linalg.norm(after_step - other) < np.linalg.norm(after_step - resumed_values[key]):
            return False
    return bool(first_parameters)


def _assume_stepped_from(state: State, trial: Trial) -> Trial:
    """Return the trial under the assumption that the first step was made from the parameters of `state`.

    Apart from decay, an optimizer adds what does not depend on the value.
    """
    first = trial.case.steps.start
    loaded = _resumed_whole_state(trial)

    def add_difference(step: int, parameters: Arrays) -> Arrays:
        if step != first:
            return parameters
        return {fqn: value + difference(fqn) for fqn, value in parameters.items()}

    def difference(fqn: str) -> np.ndarray:
        decay = trial.reference_step(first).lr * update.recipe_of_parameter(trial, fqn, first).weight_decay
        return (state[PARAMETER, fqn] - loaded[PARAMETER, fqn]) * (1 - decay)

    def begun(rank: int, fqn: str) -> np.ndarray:
        return expected_slice(trial, rank, (PARAMETER, fqn), state[PARAMETER, fqn])

    return assume_optimizer(trial, AssumedOptimizer(begun=begun), left=add_difference)


def _continued_schedule_cause(trial: Trial, after: int) -> Cause | None:
    """Return the cause if the schedule goes on from the checkpoint of step `after`, though only its weights were to be
    loaded.

    None if it does not.
    """
    step = _first_deviating_step(trial)
    reported_rates = [
        (record.step, record.lr) for _, record, _ in trial.steps_with_reference() if record.lr is not None
    ]
    if step is None:
        return None
    later_rates = [(number, lr) for number, lr in reported_rates if number >= step]
    if not all(math.isclose(lr, _later_rate(trial, number), rel_tol=1e-12) for number, lr in later_rates):
        return None
    text = f"the schedule goes on from the checkpoint: the learning rate of step {step} is that of step {step + after}"
    expected = number_text(trial.reference_step(step).lr)
    details = (("step", step), ("of_step", step + after))
    return Cause("schedule goes on", text, expected=expected, details=details)


def _later_rate(trial: Trial, step: int) -> float:
    """Return the learning rate that the recipe has `model_of` steps later: as many as were trained before weights were
    saved.

    After the recipe's end it is the recipe's last rate.
    """
    steps = trial.reference.steps
    return steps[min(step + (trial.case.model_of or 0), len(steps)) - 1].lr


def _first_deviating_step(trial: Trial) -> int | None:
    """Return the first step whose reported learning rate is not the schedule's.

    None if all are, or none is reported.
    """
    rates = (
        (step.step, step.lr, expected.lr) for _, step, expected in trial.steps_with_reference() if step.lr is not None
    )
    return min((step for step, lr, wanted in rates if not math.isclose(lr, wanted, rel_tol=1e-12)), default=None)


def _trains_longer(trial: Trial) -> bool:
    """Return whether all ranks train to the same later last step, because more steps are left from an earlier moment."""
    last_steps = {evidence.steps[-1].step for evidence in trial.ranks.values()}
    return len(last_steps) == 1 and max(last_steps) > trial.case.steps[-1]


def _assume_going_on(parts: tuple[str, ...], trial: Trial) -> Trial:
    """Return the trial under the assumption that training went on from what ranks held once they had resumed.

    parts: what of it is assumed: left (parameters), state (of the optimizer), rate (the schedule), in the words of
    reference.counterfactual.
    """
    weights = Arrays()
    state = dict[str, Arrays]()
    first = trial.case.steps.start
    for (name, fqn), value in _resumed_whole_state(trial).items():
        if name == PARAMETER:
            weights[fqn] = value
        else:
            state.setdefault(fqn, {})[name] = value
    rates = {step.step: step.lr for step in trial.reference.steps}
    first_odd = _first_deviating_step(trial)
    model_of = trial.case.model_of

    def rate(step: int) -> float:
        return rates[step - first + 1] if model_of is None else _later_rate(trial, step)

    changes: dict[str, Any] = {
        "left": lambda step, parameters: weights if step == first - 1 else parameters,
        "state": lambda step: state if step == first else None,
        "rate": lambda step, fqn: rates[step] if first_odd is None or step < first_odd else rate(step),
        "weights": weights,
    }
    if model_of is not None:
        parts = tuple("weights" if part == "left" else part for part in parts)
    assumed = _optimizer_with_counters(trial, state) if "state" in parts else AssumedOptimizer()
    return assume_optimizer(trial, assumed, **{part: changes[part] for part in parts})


def _optimizer_with_counters(trial: Trial, state: dict[str, Arrays]) -> AssumedOptimizer:
    """Return the optimizer that counts on from the resumed step counters, from 0 where none arrived.

    An optimizer may keep no counters at all; then nothing is assumed.
    """
    if not any(name == "step" for name, _ in saved_state(trial.saved[-1])):
        return AssumedOptimizer()
    begun = {fqn: int(values["step"]) for fqn, values in state.items() if "step" in values}
    first = trial.case.steps.start
    return AssumedOptimizer(counter=lambda step, fqn: begun.get(fqn, 0) + step - first + 1)
