"""A launch does not go on from what was saved: the reference goes on from what was resumed instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from harness.checks.checkpoint import PARAMETER, may_be, saved, unknown, wanted
from harness.checks.resume import Key, held_state, put_together, same, saved_state, state_after, wanted_part, wrong_keys
from harness.diagnosis.assume import another_optimizer
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.weights import rearranged, rounded_to
from harness.diagnosis.words import (
    Arrays,
    Pair,
    finding_line,
    in_order,
    in_parameters,
    on_their_ranks,
    some,
    where_text,
)
from harness.evidence.checkpoint_index import Checkpoint
from harness.evidence.text import counted, number_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference.distance import best_fit

Wrong = dict[int, list[Key]]  # what each rank should have got from the checkpoint and has not
State = dict[Key, np.ndarray]
Name = Callable[[Trial, Wrong], Cause | None]


def resumed_otherwise(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """From these parameters, with this optimizer state, at these rates: each may be all that is wrong. What a rank held once
    it had resumed is compared bit for bit, so that the first of these is seen."""
    if "resume" not in broken:
        return
    wrong, first, line = _wrong(trial), trial.case.steps.start, finding_line(broken["resume"])
    ways = [(cause, way) for name, way in WAYS if (cause := name(trial, wrong))]
    ways = ways[:1] if ways and ways[0][0].kind == "resumed elsewhere" else ways
    lines = (*(("also", cause) for cause, _ in ways[1:]), line)
    for number, (cause, way) in enumerate(ways):
        checks = ("resume", "completed") if cause.kind == "resumed elsewhere" and _goes_on(trial) else ("resume",)
        assume = partial(_going_on, way, first)
        yield Hypothesis(cause, assume, 1, (line,) if number else lines, () if number else checks)


def _going_on(way: tuple[str, ...], first: int, trial: Trial) -> Trial:
    """As if training had gone on from what was held. way: of parameters (left), the optimizer's state and the schedule (rate),
    as reference.counterfactual.Otherwise calls them, those that it had gone on from."""
    weights, state = Arrays(), dict[str, Arrays]()
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
    assumed = _counting_on(trial, state, first) if "state" in way else AssumedOptimizer()
    return another_optimizer(trial, assumed, **{word: words[word] for word in way})


def _first_odd_rate(trial: Trial) -> int | None:
    """The first step whose learning rate is not the schedule's."""
    seen = ((step.step, step.lr, r.lr) for _, step, r in trial.steps() if step.lr is not None)
    return min((step for step, lr, wanted in seen if not math.isclose(lr, wanted, rel_tol=1e-12)), default=None)


def _counting_on(trial: Trial, state: dict[str, Arrays], first: int) -> AssumedOptimizer:
    """From the counters resumed, from none where they did not arrive; an optimizer may keep none at all."""
    if not any(name == "step" for name, _ in saved_state(trial.saved[-1])):
        return AssumedOptimizer()
    begun = {fqn: int(held["step"]) for fqn, held in state.items() if "step" in held}
    return AssumedOptimizer(counter=lambda step, fqn: begun.get(fqn, 0) + step - first + 1)


def _goes_on(trial: Trial) -> bool:
    """Whether all ranks train on to another last step, as from an earlier moment so many steps are left."""
    lasts = {evidence.steps[-1].step for evidence in trial.ranks.values()}
    return len(lasts) == 1 and max(lasts) > trial.case.steps[-1]


def _wrong(trial: Trial) -> Wrong:
    wanted = saved_state(trial.saved[-1])
    return {rank: wrong_keys(trial, rank, wanted) for rank in sorted(trial.ranks)}


# ---- other moments than the one that was saved


def _elsewhere(trial: Trial, wrong: Wrong) -> Cause | None:
    """All parameters are those of another moment: the checkpoint was not read at all, or another one was."""
    if not _places(wrong, {PARAMETER}):
        return None
    requested = trial.case.steps.start - 1
    if _is_all(trial, _seed(trial)):
        if _optimizer_arrived(trial, wrong):
            text = f"resumed parameters are the seed's, although the optimizer's state is that of step {requested}"
            return Cause("resumed elsewhere", f"{text}: stale ones were saved, or they were not loaded")
        text = f"the checkpoint of step {requested} was ignored: training starts from scratch"
        return Cause("resumed elsewhere", f"{text}, parameters are the seed's")
    for step, state in _moments(trial):
        if _is_all(trial, state):
            older, later = "an older one was read, or a stale one written", "it was written after training had gone on"
            hint = later if step > requested else older
            observed, expected = f"resumed from the state after step {step}", f"the checkpoint of step {requested}"
            return Cause("resumed elsewhere", observed, expected=expected, hint=hint)
    return None


def _seed(trial: Trial) -> State:
    return {(PARAMETER, fqn): full for fqn, full in trial.reference.weights.items()}


def _moments(trial: Trial) -> Iterator[tuple[int, State]]:
    """All parameters that the earlier launches held after each of their steps, the latest first."""
    for launch in reversed(trial.saved):
        for step in reversed(launch.case.steps):
            state = {key: whole for key, whole in state_after(launch, step).items() if key[0] == PARAMETER}
            if len(state) == len(trial.reference.weights):
                yield step, state


def _is_all(trial: Trial, state: State) -> bool:
    """Whether all parameters of all ranks are those of that state."""
    return not any(wrong_keys(trial, rank, state) for rank in trial.ranks)


def _optimizer_arrived(trial: Trial, wrong: Wrong) -> bool:
    kept = [key for key in saved_state(trial.saved[-1]) if key[0] != PARAMETER]
    return bool(kept) and not any(set(kept) & set(keys) for keys in wrong.values())


# ---- parameters


def _parameters(trial: Trial, wrong: Wrong) -> Cause | None:
    places = _places(wrong, {PARAMETER})
    if not places:
        return None
    names, ranks = in_order(trial, (fqn for _, fqn in places)), on_their_ranks(trial, places)
    if _holds(trial, wrong, _seed(trial)):
        were = "was" if len(names) == 1 else "were"
        text = f"{some(names)} {were} not loaded from the checkpoint{ranks}: still the seed's values"
        return Cause("parameters not loaded", text)
    if pair := _exchanged(trial, wrong, {PARAMETER}, names):
        text = f"parameters {pair[0]} and {pair[1]} are swapped by the checkpoint{ranks}"
        return Cause("parameters exchanged", text)
    text, where = _changed(trial, names), where_text(trial, places)
    return Cause("parameters changed over the checkpoint", text, where, hint=_instead(trial, wrong))


def _instead(trial: Trial, wrong: Wrong) -> str:
    """After which other step, before or after the one that was saved, these parameters were so."""
    steps = (step for step, state in _moments(trial) if _holds(trial, wrong, state))
    return next((f"they are those after step {step}" for step in steps), "")


def _held_together(trial: Trial) -> State:
    """What all ranks held once they had resumed."""
    return put_together(trial, {rank: evidence.resumed for rank, evidence in trial.ranks.items()})


def _held_and_saved(trial: Trial, keys: Iterable[Key]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Whole tensors; NaN where no rank held anything."""
    held, saved = _held_together(trial), saved_state(trial.saved[-1])
    return [(held.get(key, np.nan * saved[key]), saved[key]) for key in keys]


def _changed(trial: Trial, names: list[str]) -> str:
    """What has become of parameters on the way through the checkpoint, in writing or in reading."""
    pairs = _held_and_saved(trial, [(PARAMETER, fqn) for fqn in names])
    if dtype := rounded_to(*pairs):
        return f"parameters come back rounded to {dtype} from the checkpoint"
    arranged = {rearranged(held, saved) for held, saved in pairs}
    if arranged == {"they are transposed"}:
        return "parameters come back transposed from the checkpoint"
    if factor := _common_factor(pairs):
        return f"parameters are {number_text(factor, 9)} times the saved ones after resuming"
    if "" not in arranged:
        return "entries are in another order after resuming"
    return f"parameters after resuming are not those of step {trial.case.steps.start - 1}"


def _common_factor(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """As after a step that only decays them; 0 if there is none. What differs in its last bits has none."""
    factor = best_fit(*pairs[0])
    fits = all(np.allclose(held, factor * saved, rtol=1e-9, atol=0) for held, saved in pairs)
    return factor if fits and not math.isclose(factor, 1) else 0.0


def _holds(trial: Trial, wrong: Wrong, instead: State) -> bool:
    """Whether what ranks hold wrongly of these is theirs of `instead`."""
    places = ((rank, key) for rank, keys in wrong.items() for key in keys if key in instead)
    return all(same(held_state(trial, r).get(key), wanted_part(trial, r, key, instead[key])) for r, key in places)


def _exchanged(trial: Trial, wrong: Wrong, names: Iterable[str], fqns: list[str]) -> tuple[str, str] | None:
    """The first parameter of which everything that is wrong is what was saved for another one."""
    saved = saved_state(trial.saved[-1])
    lost = {fqn: {key for keys in wrong.values() for key in keys if key[0] in names and key[1] == fqn} for fqn in fqns}
    for fqn, other in itertools.permutations(fqns, 2):
        theirs = {key: saved[key[0], other] for key in lost[fqn] if (key[0], other) in saved}
        alike = len(theirs) == len(lost[fqn]) and all(whole.shape == saved[key].shape for key, whole in theirs.items())
        if alike and _holds(trial, wrong, theirs):
            return fqn, other
    return None


# ---- the optimizer


def _optimizer(trial: Trial, wrong: Wrong) -> Cause | None:
    names = {name for keys in wrong.values() for name, _ in keys} - {PARAMETER}
    moments = sorted(names & {name for (name, _), whole in saved_state(trial.saved[-1]).items() if whole.ndim})
    if moments:
        return Cause("optimizer state lost", _moments_lost(trial, wrong, moments))
    return Cause("optimizer state lost", _counter_lost(trial, wrong, min(names))) if names else None


def _moments_lost(trial: Trial, wrong: Wrong, moments: list[str]) -> str:
    places, steps = _places(wrong, moments), trial.case.steps.start - 1
    where, what, are = where_text(trial, places), " and ".join(moments), "is" if len(moments) == 1 else "are"
    keys = {(rank, key) for rank, keys in wrong.items() for key in keys if key[0] in moments}
    held = [held_state(trial, rank).get(key) for rank, key in keys]
    if all(one is None for one in held):
        return f"resumed without optimizer state: {what} {are} missing {where}, after {steps} steps"
    if not any(one is None or one.any() for one in held):
        return f"resumed without optimizer state: {what} {are} zero {where}, after {steps} steps"
    if pair := _exchanged(trial, wrong, moments, in_order(trial, (fqn for _, fqn in places))):
        lost, ranks = {name for _, (name, fqn) in keys if fqn == pair[0]}, on_their_ranks(trial, places)
        return f"optimizer state is swapped: {pair[0]} resumed with {' and '.join(sorted(lost))} of {pair[1]}{ranks}"
    if dtype := rounded_to(*_held_and_saved(trial, {key for _, key in keys})):
        return f"optimizer state comes back rounded to {dtype} from the checkpoint: {what} {where}"
    return f"optimizer state is not what was saved: {what} {where}"


def _counter_lost(trial: Trial, wrong: Wrong, name: str) -> str:
    places = _places(wrong, {name})
    every = [held_state(trial, rank).get((name, fqn)) for rank, fqn in places]
    seen = " or ".join(dict.fromkeys("missing" if held is None else number_text(float(held)) for held in every))
    saved = saved_state(trial.saved[-1])[name, places[0][1]]
    why = ": AdamW's bias correction restarts" if name == "step" and not any(every) else ""
    wanted = number_text(float(saved))
    return f"the optimizer's {name} counter is {seen} after resuming, saved {wanted} {where_text(trial, places)}{why}"


def _places(wrong: Wrong, names: Collection[str]) -> list[Pair]:
    """Where something is wrong of what has one of these names."""
    return [(rank, fqn) for rank, keys in wrong.items() for name, fqn in keys if name in names]


# ---- the schedule


def _schedule(trial: Trial, wrong: Wrong) -> Cause | None:
    """From some step on every rate is the one that the step had as many steps after the beginning as this is after resuming."""
    rates, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    seen = [(step.step, step.lr) for _, step, _ in trial.steps() if step.lr is not None]
    step = _first_odd_rate(trial)
    if step is None or not all(math.isclose(lr, rates[n - saved], rel_tol=1e-12) for n, lr in seen if n >= step):
        return None
    text = f"the schedule restarts after resuming: the learning rate of step {step} is that of step {step - saved}"
    return Cause("schedule starts anew", text, expected=number_text(rates[step]))


WAYS: tuple[tuple[Name, tuple[str, ...]], ...] = (
    (_elsewhere, ("left", "state")),
    (_parameters, ("left",)),
    (_optimizer, ("state",)),
    (_schedule, ("rate",)),
)
"""What may be all that is wrong, and from what training goes on then."""


# ---- what the checkpoint holds


def wrong_checkpoint(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is more, of another type or lacking; that is wrong in ranks already is another check's."""
    held = trial.run.checkpoint
    if "checkpoint" not in broken or held is None:
        return
    texts = [*_more(trial, held), *_other_types(trial, held), *_lacking(trial, held)]
    line = finding_line(broken["checkpoint"])
    text = f"the checkpoint of step {trial.case.saved_step} {texts[0] if texts else 'does not hold what was trained'}"
    cause = Cause("checkpoint", text, finding=None if texts else broken["checkpoint"].findings[0])
    yield Fact(cause, ("checkpoint",), (*(("also", f"it {more}") for more in texts[1:]), line))


def _more(trial: Trial, held: Checkpoint) -> Iterator[str]:
    """Names are shortened to what stands before and after the parameter's."""
    kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for key, tensors in saved(trial, held).items():
        if len(tensors) > (most := may_be(trial, key)):
            names = tuple(sorted(one.name.replace(one.fqn, "*") for one in tensors))
            kinds.setdefault(("one" if most else "none", names), []).append(key[1])
    for (expected, names), fqns in kinds.items():
        yield f"holds {counted(len(names), 'tensor')}, expected {expected}, {in_parameters(trial, fqns)}: {' and '.join(names)}"
    if strange := unknown(trial, held):
        yield f"holds {counted(len(strange), 'tensor')} of no parameter: {strange[0].name}"


def _other_types(trial: Trial, held: Checkpoint) -> Iterator[str]:
    types = wanted(trial)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for key, tensors in saved(trial, held).items():
        if key in types and len(tensors) == 1 and tensors[0].dtype not in types[key]:
            kinds.setdefault((key[0], tensors[0].dtype, " or ".join(sorted(types[key]))), []).append(key[1])
    for (name, dtype, wide), fqns in kinds.items():
        yield f"holds {_plural(name)} in {dtype}, trained in {wide}, {in_parameters(trial, fqns)}"


def _lacking(trial: Trial, held: Checkpoint) -> Iterator[str]:
    found = saved(trial, held)
    lacking = [key for key in wanted(trial) if key not in found]
    for name in dict.fromkeys(name for name, _ in lacking):
        yield f"lacks {_plural(name)} {in_parameters(trial, [fqn for of, fqn in lacking if of == name])}"


def _plural(name: str) -> str:
    return "parameters" if name == PARAMETER else name
