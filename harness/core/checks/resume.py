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
from harness.core.judge.contents import view_of_slice
from harness.core.judge.finding import Finding, Value
from harness.core.judge.received_samples import samples_of_step, step_of_samples
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.slices import numel, slice_text

STAGE = "data"
NEEDS = frozenset({"reference", "values", "checkpoint"})

TensorKey = tuple[str, str]
"""A tensor of the saved state: its quantity (parameter, or the optimizer's name for it) and the parameter's fqn."""

PARAMETER = "parameter"


def check(trial: Trial) -> Result:
    """Compare what each rank held after resuming with what the earlier launch held when it saved.

    NOT APPLICABLE if nothing is resumed. UNKNOWN if a rank did not record what it held, or if the launch that saved
    left no complete evidence.
    """
    if not trial.saved:
        return not_applicable(
            "resume", "this launch starts at step 1" if trial.case.last_step else "nothing is resumed"
        )
    if any(evidence.resumed is None for evidence in trial.ranks.values()):
        return Result("resume", Verdict.UNKNOWN, note="a rank did not record what it held after resuming")
    if set(trial.saved[-1].ranks) != set(trial.saved[-1].plan.slices):
        return Result("resume", Verdict.UNKNOWN, note="the launch that saved left no complete evidence")
    wanted = state_to_resume(trial)
    findings: list[Finding] = []
    examined = 0
    for rank in sorted(trial.ranks):
        held_tensors = resumed_state(trial, rank)
        examined += len(held_tensors)
        findings += _tensor_findings(trial, rank, wanted, held_tensors)
        findings += [_leftover_finding(trial, rank, key, held_tensors[key]) for key in leftover_state_keys(trial, rank)]
    findings += [*_rate_findings(trial), *_sample_findings(trial)]
    return verdict_of("resume", findings, examined)


# ---- what was saved, and what is held


def saved_state(launch: Trial) -> dict[TensorKey, np.ndarray]:
    """Return, by (quantity, fqn), the whole tensors after the step that a launch saved, by default its last one.

    Elements that no rank held are NaN.
    """
    return state_after(launch, launch.case.saved_step or launch.case.steps[-1])


def state_to_resume(trial: Trial) -> dict[TensorKey, np.ndarray]:
    """Return, by (quantity, fqn), the saved tensors that this launch continues from: all, or the parameters alone.

    Precondition: a launch before it saved.
    """
    saved = saved_state(trial.saved[-1])
    if trial.case.model_of is None:
        return saved
    return {key: value for key, value in saved.items() if key[0] == PARAMETER}


def state_after(launch: Trial, step: int) -> dict[TensorKey, np.ndarray]:
    """Return, by (quantity, fqn), the whole tensors after a step of a launch, put together from its ranks.

    The optimizer's state is in it only for the step that saves and for the last one, because evidence has no other.
    Empty if the step is not on record.
    """
    local_states: dict[int, Resumed] = {}
    for rank, evidence in launch.ranks.items():
        for record in evidence.steps:
            if record.step == step:
                local_states[rank] = Resumed(record.parameters, record.optimizer_state)
    return assemble_state(launch, local_states)


def assemble_state(launch: Trial, states: Mapping[int, Resumed | None]) -> dict[TensorKey, np.ndarray]:
    """Return, by (quantity, fqn), whole tensors in the model's shapes, put together from the slices of ranks.

    Elements that no rank held are NaN. states: by rank; a rank with None adds nothing.
    """
    whole_tensors: dict[TensorKey, np.ndarray] = {}
    for rank, state in sorted(states.items()):
        if state is not None:
            _write_slices(launch, rank, state, whole_tensors)
    shapes = launch.case.model.parameter_shapes()
    return {key: value.reshape(shapes[key[1]]) if value.ndim else value for key, value in whole_tensors.items()}


def _write_slices(launch: Trial, rank: int, state: Resumed, whole_tensors: dict[TensorKey, np.ndarray]) -> None:
    """Write a rank's slices into `whole_tensors`, in place; a tensor that is not there yet is added, filled with NaN.

    A step counter is added as it is. A value that does not have its slice's shape is left out.
    """
    for key, value in _tensors_by_key(state).items():
        local_slice = launch.slice_of(rank, key[1])
        if not value.ndim:
            whole_tensors.setdefault(key, value)  # a step counter
        elif local_slice is not None:
            full = whole_tensors.setdefault(key, np.full(launch.plan.shapes[key[1]], np.nan, value.dtype))
            if view_of_slice(full, local_slice).shape == value.shape:
                view_of_slice(full, local_slice)[...] = value


def resumed_state(trial: Trial, rank: int) -> dict[TensorKey, np.ndarray]:
    """Return, by (quantity, fqn), the local tensors that a rank had once it had resumed.

    Precondition: the rank recorded them; otherwise the check is UNKNOWN.
    """
    resumed = trial.ranks[rank].resumed
    assert resumed is not None, rank
    return _tensors_by_key(resumed)


def _tensors_by_key(resumed: Resumed) -> dict[TensorKey, np.ndarray]:
    """Return a rank's parameters and optimizer state in one mapping, by (quantity, fqn)."""
    tensors = {(PARAMETER, fqn): value for fqn, value in resumed.parameters.items()}
    for fqn, state in resumed.optimizer_state.items():
        tensors |= {(name, fqn): value for name, value in state.items()}
    return tensors


def expected_slice(trial: Trial, rank: int, key: TensorKey, whole: np.ndarray) -> np.ndarray:
    """Return a rank's slice of a saved tensor: of the flattened one where FSDP1 cuts vectors.

    A step counter, and a parameter of which the rank holds no slice, are returned whole.
    """
    local_slice = trial.slice_of(rank, key[1])
    return (
        view_of_slice(whole.reshape(trial.plan.shapes[key[1]]), local_slice)
        if whole.ndim and local_slice is not None
        else whole
    )


# ---- differences


def keys_of_wrong_tensors(trial: Trial, rank: int, wanted: dict[TensorKey, np.ndarray]) -> list[TensorKey]:
    """Return (quantity, fqn) of each tensor that a rank should have from the checkpoint and has not.

    They are in the model's order. Parameters of which the rank holds nothing are left out: its optimizer need keep no
    state, and FSDP1's does not.
    """
    held_tensors = resumed_state(trial, rank)
    held_fqns = {fqn for fqn in trial.plan.slices[rank] if (part := trial.slice_of(rank, fqn)) and numel(part)}
    return [
        key
        for key, whole in wanted.items()
        if key[1] in held_fqns and not has_same_bytes(held_tensors.get(key), expected_slice(trial, rank, key, whole))
    ]


def leftover_state_keys(trial: Trial, rank: int) -> list[TensorKey]:
    """Return (quantity, fqn) of optimizer state that is not zero when a launch starts from weights alone.

    A new optimizer has none. Empty for launches that resume all.
    """
    if trial.case.model_of is None:
        return []
    return [key for key, value in resumed_state(trial, rank).items() if key[0] != PARAMETER and value.any()]


def _leftover_finding(trial: Trial, rank: int, key: TensorKey, held_value: np.ndarray) -> Finding:
    """Return the finding of optimizer state that is not zero. The note says if it is what was saved."""
    name, fqn = key
    subject: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": name, "note": "as the first step begins"}
    if not held_value.ndim:
        return Finding.at(rank, 0.0, float(held_value), **subject)
    local_slice = trial.slice_of(rank, fqn)
    saved = saved_state(trial.saved[-1]).get(key)
    if (
        saved is not None
        and local_slice is not None
        and has_same_bytes(held_value, expected_slice(trial, rank, key, saved))
    ):
        subject["note"] += f", what was saved after step {trial.case.model_of}"
    return Finding.at(
        rank,
        "none, or zeros",
        int(np.count_nonzero(held_value)),
        unit=f"of {held_value.size} entries not zero",
        **subject,
    )


def has_same_bytes(value: np.ndarray | None, wanted: np.ndarray) -> bool:
    """Return whether both have the same shape and bytes. False if `value` is None."""
    return value is not None and value.shape == wanted.shape and value.tobytes() == wanted.tobytes()


def _tensor_findings(
    trial: Trial, rank: int, wanted_tensors: dict[TensorKey, np.ndarray], held_tensors: dict[TensorKey, np.ndarray]
) -> Iterator[Finding]:
    """Yield a finding for each tensor of a rank that is not its slice of what was saved."""
    saved_step = trial.saved[-1].case.saved_step
    for key in keys_of_wrong_tensors(trial, rank, wanted_tensors):
        name, fqn = key
        expected, observed, unit = _describe_difference(
            held_tensors.get(key), expected_slice(trial, rank, key, wanted_tensors[key])
        )
        subject: dict[str, Any] = {
            "kind": "parameter",
            "name": fqn,
            "quantity": "value" if name == PARAMETER else name,
            "unit": unit,
        }
        local_slice = trial.slice_of(rank, fqn) if wanted_tensors[key].ndim else None
        slice_note = (
            f", {slice_text(local_slice, trial.plan.shapes[fqn], flat=bool(trial.plan.flat))}" if local_slice else ""
        )
        yield Finding.at(rank, expected, observed, **subject, note=f"saved after step {saved_step}{slice_note}")


def _describe_difference(value: np.ndarray | None, wanted: np.ndarray) -> tuple[Value, Value, str]:
    """Return (expected, observed, unit) of a finding on a tensor that is not what was saved.

    It tells apart a missing tensor, another shape, another single number, zeros, and a number of entries that differ.
    """
    if value is None:
        return "what was saved", None, ""
    if value.shape != wanted.shape:
        return wanted.shape, value.shape, "shape"
    if not wanted.ndim:
        return float(wanted), float(value), ""
    if value.size and not value.any():
        return "what was saved", "zeros", ""
    return 0, int(np.sum(value != wanted)), f"of {value.size} entries differ"


def _rate_findings(trial: Trial) -> Iterator[Finding]:
    """Yield a finding for each step whose learning rate is not that of the schedule that goes on, or starts anew.

    Every step is judged: for one step the optimizer's own rate hides where a scheduler is.
    """
    for rank, step, reference in trial.steps_with_reference():
        if not is_right_rate(trial, rank, step, reference.lr):
            yield Finding.at(rank, reference.lr, step.lr, step=step.step, quantity="learning rate")


def _sample_findings(trial: Trial) -> Iterator[Finding]:
    """Yield a finding for each rank that received samples of another step in the first step of the launch."""
    first = trial.case.steps.start
    samples = samples_of_step(trial, first)
    for rank in samples.ranks_with_others:
        ids = samples.by_rank[rank]
        foreign = [id_ for id_ in ids if id_ not in samples.requested]
        subject: dict[str, Any] = {
            "step": first,
            "quantity": "samples of another step",
            "note": _step_note(trial, ids),
        }
        yield Finding.at(rank, 0, len(foreign), unit=f"of {len(ids)} samples", **subject)


def _step_note(trial: Trial, ids: list[int | None]) -> str:
    """Return a note of the step that these samples belong to; empty if they belong to no single one."""
    step = step_of_samples(trial, ids)
    return f"all are of step {step}" if step else ""
