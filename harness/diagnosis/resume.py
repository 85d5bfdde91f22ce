"""A launch does not go on from what was saved: the reference goes on from what was resumed instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from harness.checks.checkpoint import PARAMETER, may_be, saved, unknown, wanted
from harness.checks.resume import Key, held_state, put_together, saved_state, state_after, wanted_part, wrong_keys
from harness.diagnosis.assume import another_optimizer
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.weights import rearranged, rounded_to
from harness.diagnosis.words import Arrays, finding_line, in_order, in_parameters, on_ranks, some
from harness.evidence.checkpoint_index import Checkpoint
from harness.judge.assumed import AS_REQUESTED, AssumedOptimizer
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
    wrong, first, line = _wrong(trial), trial.case.steps.start, finding_line("resume", broken["resume"])
    ways = [(cause, way) for name, way in WAYS if (cause := name(trial, wrong))]
    ways = ways[:1] if ways and ways[0][0].kind == "resumed elsewhere" else ways
    lines = (*(("also", cause.text) for cause, _ in ways[1:]), line)
    for number, (cause, way) in enumerate(ways):
        laws = ("resume", "completed") if cause.kind == "resumed elsewhere" and _goes_on(trial) else ("resume",)
        assume = partial(_going_on, way, first)
        yield Hypothesis(cause, assume, 1, (line,) if number else lines, () if number else laws)


def _going_on(way: tuple[str, ...], first: int, trial: Trial) -> Trial:
    """As if training had gone on from what was held, of these: parameters, the optimizer's state, the schedule's beginning."""
    weights, state = Arrays(), dict[str, Arrays]()
    for (name, fqn), value in _held_together(trial).items():
        if name == PARAMETER:
            weights[fqn] = value
        else:
            state.setdefault(fqn, {})[name] = value
    words: dict[str, Any] = {}
    if "parameters" in way:
        words["left"] = lambda step, parameters: weights if step == first - 1 else parameters
    if "state" in way:
        words["state"] = lambda step: state if step == first else None
    if "schedule" in way:
        rates, odd = {step.step: step.lr for step in trial.reference.steps}, _first_odd_rate(trial)
        words["rate"] = lambda step, fqn: rates[step] if odd is None or step < odd else rates[step - first + 1]
    return another_optimizer(trial, _counting_on(state, first) if "state" in way else AS_REQUESTED, **words)


def _first_odd_rate(trial: Trial) -> int | None:
    """The first step whose learning rate is not the schedule's."""
    seen = ((step.step, step.lr, r.lr) for _, step, r in trial.steps() if step.lr is not None)
    return min((step for step, lr, wanted in seen if not math.isclose(lr, wanted, rel_tol=1e-12)), default=None)


def _counting_on(state: dict[str, dict[str, np.ndarray]], first: int) -> AssumedOptimizer:
    """From the counters resumed, where there are any."""
    if not any("step" in held for held in state.values()):
        return AS_REQUESTED
    begun = {fqn: int(held.get("step", np.zeros(()))) for fqn, held in state.items()}
    return AssumedOptimizer(counter=lambda step, fqn: begun.get(fqn, 0) + step - first + 1)


def _goes_on(trial: Trial) -> bool:
    """Whether all ranks train on to another last step, as from an earlier moment so many steps are left."""
    lasts = {tuple(step.step for step in evidence.steps) for evidence in trial.ranks.values()}
    return len(lasts) == 1 and set(trial.case.steps) < set(*lasts)


def _wrong(trial: Trial) -> Wrong:
    wanted = saved_state(trial.saved[-1])
    return {rank: wrong_keys(trial, rank, wanted) for rank in sorted(trial.ranks)}


# ---- other moments than the one that was saved


def _elsewhere(trial: Trial, wrong: Wrong) -> Cause | None:
    """All parameters are those of another moment: the checkpoint was not read at all, or another one was."""
    if not any(name == PARAMETER for keys in wrong.values() for name, _ in keys):
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
            observed = f"resumed from the state after step {step}"
            return Cause("resumed elsewhere", observed, "", f"the checkpoint of step {requested}", hint)
    return None


def _seed(trial: Trial) -> State:
    return {(PARAMETER, fqn): full for fqn, full in trial.reference.weights.items()}


def _moments(trial: Trial) -> Iterator[tuple[int, State]]:
    """What the earlier launches held after each of their steps, the latest first."""
    for launch in reversed(trial.saved):
        for step in reversed(launch.case.steps):
            yield step, state_after(launch, step)


def _is_all(trial: Trial, state: State) -> bool:
    """Whether all parameters of all ranks are those of that state."""
    parameters = {key: whole for key, whole in state.items() if key[0] == PARAMETER}
    return bool(parameters) and not any(wrong_keys(trial, rank, parameters) for rank in trial.ranks)


def _optimizer_arrived(trial: Trial, wrong: Wrong) -> bool:
    kept = [key for key in saved_state(trial.saved[-1]) if key[0] != PARAMETER]
    return bool(kept) and not any(name != PARAMETER for keys in wrong.values() for name, _ in keys)


# ---- parameters


def _parameters(trial: Trial, wrong: Wrong) -> Cause | None:
    names = _fqns(trial, wrong, {PARAMETER})
    if not names:
        return None
    ranks, where = _ranks(trial, wrong, {PARAMETER}), in_parameters(trial, names)
    if all(_holds(trial, wrong, (PARAMETER, fqn), _seed(trial).get((PARAMETER, fqn))) for fqn in names):
        were = "was" if len(names) == 1 else "were"
        text = f"{some(names)} {were} not loaded from the checkpoint{ranks}: still the seed's values"
        return Cause("parameters not loaded", text)
    if pair := _exchanged(trial, wrong, PARAMETER, names):
        text = f"parameters {pair[0]} and {pair[1]} are swapped by the checkpoint{ranks}"
        return Cause("parameters exchanged", text)
    changes = {_change(trial, fqn) for fqn in names}
    if len(changes) == 1 and (change := next(iter(changes))).startswith(("rounded", "transposed")):
        text = f"parameters come back {change} from the checkpoint"
        return Cause("parameters changed over the checkpoint", text, where + ranks)
    if factor := _common_factor(trial, names):
        text = f"parameters are {factor:.9g} times the saved ones after resuming"
        return Cause("parameters changed over the checkpoint", text, where + ranks)
    if "" not in changes:
        text = f"entries are in another order after resuming {where}{ranks}"
        return Cause("parameters changed over the checkpoint", text)
    text = f"parameters after resuming are not those of step {trial.case.steps.start - 1} {where}{ranks}"
    return Cause("parameters changed over the checkpoint", text, hint=_instead(trial, wrong, names))


def _instead(trial: Trial, wrong: Wrong, names: list[str]) -> str:
    """After which other step, before or after the one that was saved, these parameters were so."""
    for step, state in _moments(trial):
        if all(_holds(trial, wrong, (PARAMETER, fqn), state.get((PARAMETER, fqn))) for fqn in names):
            return f"they are those after step {step}"
    return ""


def _held_together(trial: Trial) -> State:
    """What all ranks held once they had resumed."""
    return put_together(trial, {rank: evidence.resumed for rank, evidence in trial.ranks.items()})


def _change(trial: Trial, fqn: str) -> str:
    """What has become of a parameter on the way through the checkpoint, in writing or in reading."""
    saved = saved_state(trial.saved[-1])[PARAMETER, fqn]
    held = _held_together(trial).get((PARAMETER, fqn))
    if held is None or held.shape != saved.shape:
        return ""
    if dtype := rounded_to((held, saved)):
        return f"rounded to {dtype}"
    return rearranged(held, saved).removeprefix("they are ")


def _common_factor(trial: Trial, names: list[str]) -> float | None:
    """As after a step that only decays them."""
    saved, held = saved_state(trial.saved[-1]), _held_together(trial)
    pairs = [(held.get((PARAMETER, fqn)), saved[PARAMETER, fqn]) for fqn in names]
    known = [(now, was) for now, was in pairs if now is not None and now.shape == was.shape]
    factor = best_fit(*known[0]) if len(known) == len(pairs) else 0.0
    fits = factor and all(np.allclose(now, factor * was, rtol=1e-9, atol=0) for now, was in known)
    return factor if fits else None


def _holds(trial: Trial, wrong: Wrong, at: Key, whole: np.ndarray | None) -> bool:
    """Whether the ranks that should hold something else there hold their slices of `whole`."""
    if whole is None:
        return False
    pairs = (
        (held_state(trial, r).get(at), wanted_part(trial, r, at, whole)) for r, keys in wrong.items() if at in keys
    )
    return all(held is not None and np.array_equal(held, wanted) for held, wanted in pairs)


def _exchanged(trial: Trial, wrong: Wrong, name: str, fqns: list[str]) -> tuple[str, str] | None:
    """The first parameter that has what was saved for another one."""
    saved = saved_state(trial.saved[-1])
    for fqn, other in itertools.permutations(fqns, 2):
        theirs = saved.get((name, other))
        alike = theirs is not None and theirs.shape == saved[name, fqn].shape
        if alike and _holds(trial, wrong, (name, fqn), theirs):
            return fqn, other
    return None


# ---- the optimizer


def _optimizer(trial: Trial, wrong: Wrong) -> Cause | None:
    names = {name for keys in wrong.values() for name, _ in keys} - {PARAMETER}
    kept = saved_state(trial.saved[-1])
    moments = sorted(names & {name for (name, _), whole in kept.items() if whole.ndim})
    if moments:
        return Cause("optimizer state lost", _moments_lost(trial, wrong, moments))
    return Cause("optimizer state lost", _counter_lost(trial, wrong, sorted(names))) if names else None


def _moments_lost(trial: Trial, wrong: Wrong, moments: list[str]) -> str:
    fqns, ranks = _fqns(trial, wrong, set(moments)), _ranks(trial, wrong, set(moments))
    where = f"{in_parameters(trial, fqns)}{ranks}"
    steps = trial.case.steps.start - 1
    held = [held_state(trial, rank).get(key) for rank, keys in wrong.items() for key in keys if key[0] in moments]
    if all(one is None for one in held):
        return f"resumed without optimizer state: {' and '.join(moments)} are missing {where}, after {steps} steps"
    if not any(one is None or one.any() for one in held):
        zero = "is" if len(moments) == 1 else "are"
        return f"resumed without optimizer state: {' and '.join(moments)} {zero} zero {where}, after {steps} steps"
    if pair := _exchanged(trial, wrong, moments[0], fqns):
        return f"optimizer state is swapped: {pair[0]} resumed with {' and '.join(moments)} of {pair[1]}{ranks}"
    saved, together = saved_state(trial.saved[-1]), _held_together(trial)
    keys = [(name, fqn) for name in moments for fqn in fqns if (name, fqn) in saved]
    pairs = [(together[key], saved[key]) for key in keys if key in together and together[key].shape == saved[key].shape]
    if len(pairs) == len(keys) and (dtype := rounded_to(*pairs)):
        return f"optimizer state comes back rounded to {dtype} from the checkpoint: {' and '.join(moments)} {where}"
    return f"optimizer state is not what was saved: {' and '.join(moments)} {where}"


def _counter_lost(trial: Trial, wrong: Wrong, names: list[str]) -> str:
    name = names[0]
    rank, key = next((rank, key) for rank, keys in wrong.items() for key in keys if key[0] == name)
    held, saved = held_state(trial, rank).get(key), saved_state(trial.saved[-1])[key]
    seen = "missing" if held is None else f"{float(held):g}"
    where = f"{in_parameters(trial, _fqns(trial, wrong, {name}))}{_ranks(trial, wrong, {name})}"
    lost = held is None or float(held) == 0
    why = ": AdamW's bias correction restarts" if name == "step" and lost else ""
    return f"the optimizer's {name} counter is {seen} after resuming, saved {float(saved):g} {where}{why}"


def _fqns(trial: Trial, wrong: Wrong, names: set[str]) -> list[str]:
    """Of which parameters something is wrong, in the model's order."""
    return in_order(trial, (fqn for keys in wrong.values() for name, fqn in keys if name in names))


def _ranks(trial: Trial, wrong: Wrong, names: set[str]) -> str:
    return on_ranks(trial, [rank for rank, keys in wrong.items() if any(name in names for name, _ in keys)])


# ---- the schedule


def _schedule(trial: Trial, wrong: Wrong) -> Cause | None:
    """From some step on every rate is the one that the step had as many steps after the beginning as this is after resuming."""
    rates, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    seen = [(step.step, step.lr) for _, step, _ in trial.steps() if step.lr is not None]
    step = _first_odd_rate(trial)
    if step is None or not all(math.isclose(lr, rates[n - saved], rel_tol=1e-12) for n, lr in seen if n >= step):
        return None
    text = f"the schedule restarts after resuming: the learning rate of step {step} is that of step {step - saved}"
    return Cause("schedule starts anew", text, "", f"{rates[step]:.6g}")


WAYS: tuple[tuple[Name, tuple[str, ...]], ...] = (
    (_elsewhere, ("parameters", "state")),
    (_parameters, ("parameters",)),
    (_optimizer, ("state",)),
    (_schedule, ("schedule",)),
)
"""What may be all that is wrong, and from what training goes on then."""


# ---- what the checkpoint holds


def wrong_checkpoint(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is more, of another type or lacking; that is wrong in ranks already is another law's."""
    held = trial.run.checkpoint
    if "checkpoint" not in broken or held is None:
        return
    texts = [*_more(trial, held), *_other_types(trial, held), *_lacking(trial, held)]
    line = finding_line("checkpoint", broken["checkpoint"])
    first = texts[0] if texts else f"does not hold what was trained: {line[1]}"
    text = f"the checkpoint of step {trial.case.saved_step} {first}"
    yield Fact(Cause("checkpoint", text), ("checkpoint",), (*(("also", f"it {more}") for more in texts[1:]), line))


def _more(trial: Trial, held: Checkpoint) -> Iterator[str]:
    """Names are shortened to what stands before and after the parameter's."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for key, tensors in saved(trial, held).items():
        if len(tensors) > max(may_be(trial, key), 1) or not may_be(trial, key):
            shown = (one.name.replace(one.fqn, "*") if one.fqn else one.name for one in tensors)
            kinds.setdefault(tuple(sorted(shown)), []).append(key[1])
    for names, fqns in kinds.items():
        most = "one" if len(names) > 1 else "none"
        yield f"holds {len(names)} tensors, expected {most}, {in_parameters(trial, fqns)}: {' and '.join(names)}"
    if strange := unknown(trial, held):
        yield f"holds {len(strange)} tensors that belong to no parameter: {strange[0].name}"


def _other_types(trial: Trial, held: Checkpoint) -> Iterator[str]:
    types = wanted(trial)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for (name, fqn), tensors in saved(trial, held).items():
        trained = types.get((name, fqn), set())
        if len(tensors) == 1 and trained and tensors[0].dtype not in trained:
            kinds.setdefault((name, tensors[0].dtype, " or ".join(sorted(trained))), []).append(fqn)
    for (name, dtype, wide), fqns in kinds.items():
        yield f"holds {_plural(name)} in {dtype}, trained in {wide}, {in_parameters(trial, fqns)}"


def _lacking(trial: Trial, held: Checkpoint) -> Iterator[str]:
    found = saved(trial, held)
    lacking = [key for key in wanted(trial) if key not in found]
    for name in dict.fromkeys(name for name, _ in lacking):
        yield f"lacks {_plural(name)} {in_parameters(trial, [fqn for of, fqn in lacking if of == name])}"


def _plural(name: str) -> str:
    return "parameters" if name == PARAMETER else name
