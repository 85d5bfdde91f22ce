"""A resumed rank continues, bit for bit, from what was saved: its slices of parameters and optimizer state, rate, samples.

What the earlier launch held after its last step is put together from all its ranks, by the slices that each really held.
It is then cut anew for the layout that resumes. The earlier launches are judged by all checks themselves. A start from weights
alone takes the parameters, bit for bit; its optimizer has no state or zeros, its rates and samples are those of step 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harness.core.checks.update import is_right_rate
from harness.core.evidence.records import Resumed
from harness.core.judge.contents import take
from harness.core.judge.finding import Finding, Value
from harness.core.judge.received_samples import received_samples
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.slices import numel, slice_text

STAGE = "data"
NEEDS = frozenset({"reference", "values", "checkpoint"})

Key = tuple[str, str]
"""A tensor of the saved state: what it is (parameter, or the optimizer's name for it) and the parameter's fqn."""

PARAMETER = "parameter"


def check(trial: Trial) -> Result:
    if not trial.saved:
        return not_applicable(
            "resume", "this launch starts at step 1" if trial.case.last_step else "nothing is resumed"
        )
    if any(evidence.resumed is None for evidence in trial.ranks.values()):
        return Result("resume", Verdict.UNKNOWN, note="a rank did not record what it held after resuming")
    if set(trial.saved[-1].ranks) != set(trial.saved[-1].plan.slices):
        return Result("resume", Verdict.UNKNOWN, note="the launch that saved left no complete evidence")
    wanted = taken_over(trial)
    findings: list[Finding] = []
    examined = 0
    for rank in sorted(trial.ranks):
        held = held_state(trial, rank)
        examined += len(held)
        findings += _wrong_tensors(trial, rank, wanted, held)
        findings += [_not_new(trial, rank, key, held[key]) for key in kept_state(trial, rank)]
    findings += [*_wrong_rates(trial), *_wrong_samples(trial)]
    return verdict_of("resume", findings, examined)


# ---- what was saved, and what is held


def saved_state(launch: Trial) -> dict[Key, np.ndarray]:
    """Whole tensors after the step that a launch saved; the elements that no rank held are NaN."""
    return state_after(launch, launch.case.saved_step or launch.case.steps[-1])


def taken_over(trial: Trial) -> dict[Key, np.ndarray]:
    """What of the saved state this launch goes on from: all of it, or the parameters alone."""
    saved = saved_state(trial.saved[-1])
    return saved if trial.case.model_of is None else {key: v for key, v in saved.items() if key[0] == PARAMETER}


def state_after(launch: Trial, step: int) -> dict[Key, np.ndarray]:
    """The same after any step, but for the optimizer's state, which is kept for that step and the last one."""
    records = {rank: record for rank, e in launch.ranks.items() for record in e.steps if record.step == step}
    return put_together(launch, {rank: Resumed(r.parameters, r.optimizer_state) for rank, r in records.items()})


def put_together(launch: Trial, held: Mapping[int, Resumed | None]) -> dict[Key, np.ndarray]:
    """Whole tensors, in the model's shapes, from what each rank holds of them."""
    whole: dict[Key, np.ndarray] = {}
    for rank, state in sorted(held.items()):
        if state is not None:
            _lay_down(launch, rank, state, whole)
    shapes = launch.case.model.parameter_shapes()
    return {key: value.reshape(shapes[key[1]]) if value.ndim else value for key, value in whole.items()}


def _lay_down(launch: Trial, rank: int, held: Resumed, whole: dict[Key, np.ndarray]) -> None:
    for key, value in _by_key(held).items():
        part = launch.slice_of(rank, key[1])
        if not value.ndim:
            whole.setdefault(key, value)  # a step counter
        elif part is not None:
            full = whole.setdefault(key, np.full(launch.plan.shapes[key[1]], np.nan, value.dtype))
            if take(full, part).shape == value.shape:
                take(full, part)[...] = value


def held_state(trial: Trial, rank: int) -> dict[Key, np.ndarray]:
    """What a rank had once it had resumed. The check is UNKNOWN where one does not say."""
    resumed = trial.ranks[rank].resumed
    assert resumed is not None, rank
    return _by_key(resumed)


def _by_key(held: Resumed) -> dict[Key, np.ndarray]:
    found = {(PARAMETER, fqn): value for fqn, value in held.parameters.items()}
    return found | {(name, fqn): value for fqn, state in held.optimizer_state.items() for name, value in state.items()}


def wanted_part(trial: Trial, rank: int, key: Key, whole: np.ndarray) -> np.ndarray:
    """Return this rank's slice of a saved tensor, where FSDP1 cuts vectors of the vector; a step counter is no rank's slice."""
    part = trial.slice_of(rank, key[1])
    return take(whole.reshape(trial.plan.shapes[key[1]]), part) if whole.ndim and part is not None else whole


# ---- differences


def wrong_keys(trial: Trial, rank: int, wanted: dict[Key, np.ndarray]) -> list[Key]:
    """What a rank should have got from the checkpoint, and has not, in the model's order.

    Where a rank holds nothing of a parameter, its optimizer need keep no state: FSDP1's does not.
    """
    held = held_state(trial, rank)
    own = {fqn for fqn in trial.plan.slices[rank] if (part := trial.slice_of(rank, fqn)) and numel(part)}
    return [
        key
        for key, whole in wanted.items()
        if key[1] in own and not same(held.get(key), wanted_part(trial, rank, key, whole))
    ]


def kept_state(trial: Trial, rank: int) -> list[Key]:
    """What the optimizer of a rank that starts from weights alone has, and a new one has not: numbers other than zero."""
    if trial.case.model_of is None:
        return []
    return [key for key, value in held_state(trial, rank).items() if key[0] != PARAMETER and value.any()]


def _not_new(trial: Trial, rank: int, key: Key, held: np.ndarray) -> Finding:
    name, fqn = key
    what: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": name, "note": "as the first step begins"}
    if not held.ndim:
        return Finding.at(rank, 0.0, float(held), **what)
    part, saved = trial.slice_of(rank, fqn), saved_state(trial.saved[-1]).get(key)
    of_saved = saved is not None and part is not None and same(held, wanted_part(trial, rank, key, saved))
    what["note"] += f", what was saved after step {trial.case.model_of}" * of_saved
    return Finding.at(
        rank, "none, or zeros", int(np.count_nonzero(held)), unit=f"of {held.size} entries not zero", **what
    )


def same(held: np.ndarray | None, wanted: np.ndarray) -> bool:
    return held is not None and held.shape == wanted.shape and held.tobytes() == wanted.tobytes()


def _wrong_tensors(
    trial: Trial, rank: int, wanted: dict[Key, np.ndarray], held: dict[Key, np.ndarray]
) -> Iterator[Finding]:
    after = trial.saved[-1].case.saved_step
    for key in wrong_keys(trial, rank, wanted):
        name, fqn = key
        expected, found, unit = _difference(held.get(key), wanted_part(trial, rank, key, wanted[key]))
        what: dict[str, Any] = {
            "kind": "parameter",
            "name": fqn,
            "quantity": "value" if name == PARAMETER else name,
            "unit": unit,
        }
        part = trial.slice_of(rank, fqn) if wanted[key].ndim else None
        cut = f", {slice_text(part, trial.plan.shapes[fqn], flat=bool(trial.plan.flat))}" if part else ""
        yield Finding.at(rank, expected, found, **what, note=f"saved after step {after}{cut}")


def _difference(held: np.ndarray | None, wanted: np.ndarray) -> tuple[Value, Value, str]:
    """Return what was expected and observed, and their unit."""
    if held is None:
        return "what was saved", None, ""
    if held.shape != wanted.shape:
        return wanted.shape, held.shape, "shape"
    if not wanted.ndim:
        return float(wanted), float(held), ""
    if held.size and not held.any():
        return "what was saved", "zeros", ""
    return 0, int(np.sum(held != wanted)), f"of {held.size} entries differ"


def _wrong_rates(trial: Trial) -> Iterator[Finding]:
    """The schedule goes on, or is at its start: in every step since, for the optimizer's own rate hides for one step where a
    scheduler is."""
    for rank, step, reference in trial.steps():
        if not is_right_rate(trial, rank, step, reference.lr):
            yield Finding.at(rank, reference.lr, step.lr, step=step.step, quantity="learning rate")


def _wrong_samples(trial: Trial) -> Iterator[Finding]:
    first = trial.case.steps.start
    wanted = set(trial.reference.samples[first - 1])
    for rank, ids in received_samples(trial, first).items():
        if strange := [id_ for id_ in ids if id_ not in wanted]:
            what: dict[str, Any] = {"step": first, "quantity": "samples of another step", "note": _of_step(trial, ids)}
            yield Finding.at(rank, 0, len(strange), unit=f"of {len(ids)} samples", **what)


def _of_step(trial: Trial, ids: list[int | None]) -> str:
    step = step_received(trial, ids)
    return f"all are of step {step}" if step else ""


def step_received(trial: Trial, ids: list[int | None]) -> int | None:
    """The step of the recipe that all these samples belong to."""
    return next(
        (n for n, of_step in enumerate(trial.reference.samples, start=1) if ids and set(ids) <= set(of_step)), None
    )
