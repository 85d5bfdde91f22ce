"""A launch does not go on from what was saved: from scratch, from an older state, without a part of it, or mixed up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from harness.checks.resume import (
    PARAMETER,
    Key,
    held_state,
    put_together,
    saved_state,
    state_after,
    step_received,
    wanted_part,
    wrong_keys,
)
from harness.diagnosis.words import Broken, finding_line, in_parameters, on_ranks, some
from harness.judge.received_samples import received_samples
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial

Wrong = dict[int, list[Key]]  # what each rank should have got from the checkpoint and has not
State = dict[Key, np.ndarray]


def started_elsewhere(trial: Trial, broken: Broken) -> Diagnosis | None:
    """All parameters are those of another moment: the checkpoint was not read at all, or another one was."""
    if "resume" not in broken or not any(name == PARAMETER for keys in _wrong(trial).values() for name, _ in keys):
        return None
    asked, line = trial.case.steps.start - 1, finding_line("resume", broken["resume"])
    if _is_all(trial, _seed(trial)):
        if _optimizer_arrived(trial):
            cause = f"resumed parameters are the seed's, although the optimizer's state is that of step {asked}"
            return one_cause(f"{cause}: stale ones were saved, or they were not loaded", (line,))
        return one_cause(
            f"the checkpoint of step {asked} was ignored: training starts from scratch, parameters are the seed's",
            (line,),
        )
    for step, state in _moments(trial):
        if _is_all(trial, state):
            text = f"resumed from the state after step {step}, requested the checkpoint of step {asked}"
            return one_cause(f"{text}: an older one was read, or a stale one written", (line,))
    return None


def resumed_wrongly(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Some of what was saved did not arrive: each kind is named, the first as the cause."""
    if "resume" not in broken:
        return None
    wrong = _wrong(trial)
    texts = [cause for explain in (_parameters, _optimizer) if (cause := explain(trial, wrong))]
    texts += [cause for cause in (_schedule(trial), _data(trial)) if cause]
    line = finding_line("resume", broken["resume"])
    if not texts:
        return one_cause(f"what was resumed is not what was saved: {line[1]}")
    return one_cause(texts[0], (*(("also", cause) for cause in texts[1:]), line))


def _wrong(trial: Trial) -> Wrong:
    wanted = saved_state(trial.saved[-1])
    return {rank: wrong_keys(trial, rank, wanted) for rank in sorted(trial.ranks)}


# ---- other moments than the one that was saved


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


def _optimizer_arrived(trial: Trial) -> bool:
    kept = [key for key in saved_state(trial.saved[-1]) if key[0] != PARAMETER]
    return bool(kept) and not any(name != PARAMETER for keys in _wrong(trial).values() for name, _ in keys)


# ---- parameters


def _parameters(trial: Trial, wrong: Wrong) -> str | None:
    names = _fqns(trial, wrong, {PARAMETER})
    if not names:
        return None
    ranks = _ranks(trial, wrong, {PARAMETER})
    if all(_holds(trial, wrong, PARAMETER, fqn, _seed(trial).get((PARAMETER, fqn))) for fqn in names):
        were = "was" if len(names) == 1 else "were"
        return f"{some(names)} {were} not loaded from the checkpoint{ranks}: still the seed's values"
    if pair := _exchanged(trial, wrong, PARAMETER, names):
        return f"parameters {pair[0]} and {pair[1]} are exchanged by the checkpoint{ranks}"
    if all(_rearranged(trial, fqn) for fqn in names):
        return f"rows or columns have changed places over the checkpoint {in_parameters(trial, names)}{ranks}"
    return f"parameters are not what was saved {in_parameters(trial, names)}{ranks}"


def _rearranged(trial: Trial, fqn: str) -> bool:
    """Whether all that was saved of a parameter is there, in other places."""
    saved = saved_state(trial.saved[-1])[PARAMETER, fqn]
    held = put_together(trial, {rank: evidence.resumed for rank, evidence in trial.ranks.items()}).get((PARAMETER, fqn))
    return held is not None and np.array_equal(np.sort(held.ravel()), np.sort(saved.ravel()))


def _holds(trial: Trial, wrong: Wrong, name: str, fqn: str, whole: np.ndarray | None) -> bool:
    """Whether the ranks that should hold something else of (name, fqn) hold their slices of `whole`."""
    return whole is not None and all(
        _equal(held_state(trial, rank).get((name, fqn)), wanted_part(trial, rank, (name, fqn), whole))
        for rank, keys in wrong.items()
        if (name, fqn) in keys
    )


def _equal(held: np.ndarray | None, wanted: np.ndarray) -> bool:
    return held is not None and np.array_equal(held, wanted)


def _exchanged(trial: Trial, wrong: Wrong, name: str, fqns: list[str]) -> tuple[str, str] | None:
    """The first parameter that has what was saved for another one."""
    saved = saved_state(trial.saved[-1])
    for fqn in fqns:
        for other in fqns:
            theirs = saved.get((name, other))
            alike = theirs is not None and theirs.shape == saved[name, fqn].shape
            if other != fqn and alike and _holds(trial, wrong, name, fqn, theirs):
                return fqn, other
    return None


# ---- the optimizer


def _optimizer(trial: Trial, wrong: Wrong) -> str | None:
    names = {name for keys in wrong.values() for name, _ in keys} - {PARAMETER}
    moments = sorted(name for name in names if _is_moment(trial, name))
    if moments:
        return _moments_lost(trial, wrong, moments)
    return _counter_lost(trial, wrong, sorted(names)) if names else None


def _is_moment(trial: Trial, name: str) -> bool:
    return any(whole.ndim for (of, _), whole in saved_state(trial.saved[-1]).items() if of == name)


def _moments_lost(trial: Trial, wrong: Wrong, moments: list[str]) -> str:
    fqns, ranks = _fqns(trial, wrong, set(moments)), _ranks(trial, wrong, set(moments))
    where = f"{in_parameters(trial, fqns)}{ranks}"
    steps = trial.case.steps.start - 1
    if _every(trial, wrong, moments, lambda held: held is None):
        return f"resumed without optimizer state: {' and '.join(moments)} are missing {where}, after {steps} steps"
    if _every(trial, wrong, moments, lambda held: held is not None and not held.any()):
        zero = "is" if len(moments) == 1 else "are"
        return f"resumed without optimizer state: {' and '.join(moments)} {zero} zero {where}, after {steps} steps"
    if pair := _exchanged(trial, wrong, moments[0], fqns):
        return f"optimizer state is exchanged: {pair[0]} resumed with {' and '.join(moments)} of {pair[1]}{ranks}"
    return f"optimizer state is not what was saved: {' and '.join(moments)} {where}"


def _counter_lost(trial: Trial, wrong: Wrong, names: list[str]) -> str:
    name = names[0]
    rank = next(rank for rank, keys in wrong.items() if any(of == name for of, _ in keys))
    key = next(key for key in wrong[rank] if key[0] == name)
    held, saved = held_state(trial, rank).get(key), saved_state(trial.saved[-1])[key]
    seen = "missing" if held is None else f"{float(held):g}"
    where = f"{in_parameters(trial, _fqns(trial, wrong, {name}))}{_ranks(trial, wrong, {name})}"
    lost = held is None or float(held) == 0
    why = ": AdamW's bias correction starts anew" if name == "step" and lost else ""
    return f"the optimizer's {name} counter is {seen} after resuming, {float(saved):g} was saved {where}{why}"


def _every(trial: Trial, wrong: Wrong, names: list[str], holds: Callable[[np.ndarray | None], bool]) -> bool:
    return all(
        holds(held_state(trial, rank).get(key)) for rank, keys in wrong.items() for key in keys if key[0] in names
    )


def _fqns(trial: Trial, wrong: Wrong, names: set[str]) -> list[str]:
    """Of which parameters something is wrong, in the model's order."""
    seen = {fqn for keys in wrong.values() for name, fqn in keys if name in names}
    return [fqn for fqn in trial.plan.shapes if fqn in seen]


def _ranks(trial: Trial, wrong: Wrong, names: set[str]) -> str:
    return on_ranks(trial, [rank for rank, keys in wrong.items() if any(name in names for name, _ in keys)])


# ---- schedule and data


def _schedule(trial: Trial) -> str | None:
    rates = {step.step: step.lr for step in trial.reference.steps}
    for rank, step, wanted in trial.steps():
        if step.lr is not None and not math.isclose(step.lr, wanted.lr, rel_tol=1e-12):
            like = [number for number, rate in rates.items() if math.isclose(rate, step.lr, rel_tol=1e-12)]
            seen = f"that of step {like[0]}" if like else f"{step.lr:.6g} on rank {rank}"
            text = "the schedule starts anew" if _anew(trial, rank, step.step) else "the schedule does not continue"
            return f"{text} after resuming: the learning rate of step {step.step} is {seen}, requested {wanted.lr:.6g}"
    return None


def _anew(trial: Trial, rank: int, first: int) -> bool:
    """From that step on every rate is the one that the step had as many steps after the beginning as this is after resuming."""
    rates, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    seen = {step.step: step.lr for step in trial.ranks[rank].steps if step.step >= first and step.lr is not None}
    return all(math.isclose(rate, rates[number - saved], rel_tol=1e-12) for number, rate in seen.items())


def _data(trial: Trial) -> str | None:
    first = trial.case.steps.start
    received = {rank: step_received(trial, ids) for rank, ids in received_samples(trial, first).items()}
    odd = {rank: step for rank, step in received.items() if step != first}
    if not odd:
        return None
    steps = set(odd.values())
    ranks = "" if len(odd) == len(received) else on_ranks(trial, odd)
    if steps == {1}:
        return f"the data position starts anew after resuming: step {first} receives the samples of step 1{ranks}"
    if len(steps) == 1 and None not in steps:
        return (
            f"the data position is wrong after resuming: step {first} receives the samples of step {steps.pop()}{ranks}"
        )
    return f"the data position is wrong after resuming: step {first} receives samples of other steps{ranks}"
