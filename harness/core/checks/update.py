"""After every step, parameters and optimizer state are what the recipe's optimizer makes of the gradients seen, and stay so.

Recomputed here in numpy, rank by rank, from the bytes before the step, the gradients before clipping, their global norm
over all ranks, and the recipe's learning rate. For Muon, matrices are put together from the slices of all ranks. So a wrong
gradient is not blamed twice, and clipping, weight decay, the schedule and the optimizer are judged on their own. What the
optimizer left must be, bit for bit, what the next step begins with, and what there is when training has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.evidence.records import RankEvidence, TensorEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.text import number_text
from harness.core.judge import tolerance
from harness.core.judge.clipping import only_clipped_gradients_match
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.held_values import optimizer_slice
from harness.core.judge.muon import MuonUpdates
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial
from harness.reference.config import TrainingConfig, is_trainable, rule_of

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True
MakeFinding = Callable[..., Finding]  # Finding.at of a rank, a step and a parameter
"""Finding.at for a rank, a step and a parameter: (expected, observed, fields) -> the finding."""


@dataclass
class _ParameterState:
    """The state of one parameter on one rank while the optimizer is recomputed, in float64.

    first, second: the moments; for Muon the first is its average. first_magnitude: the first moment with absolute
    values, in which nothing cancels (for the bound). largest_second: the largest second moment so far, for AMSGrad.
    """

    value: np.ndarray
    first: np.ndarray
    second: np.ndarray
    first_magnitude: np.ndarray
    largest_second: np.ndarray | float = 0.0


def check(trial: Trial) -> Result:
    """Recompute the optimizer on every rank, and compare the parameters after each step and its state after the last.

    UNKNOWN if parameters were not observed after some step, and nothing is wrong.
    """
    findings = list(update_findings(trial, norms_for_clipping(trial)))
    examined = sum(len(evidence.steps) * len(trial.initial_parameters(rank)) for rank, evidence in trial.ranks.items())
    if not findings and (unseen := _unobserved_time(trial)):
        return Result("update", Verdict.UNKNOWN, examined, note=f"parameters were not observed {unseen}")
    return verdict_of("update", findings, examined)


def passes(trial: Trial, norms: dict[int, float]) -> bool:
    """Return whether `check` would pass with these norms, by step. It ends at the first finding.

    False if a step was not observed.
    """
    return is_every_step_observed(trial) and next(update_findings(trial, norms), None) is None


def is_every_step_observed(trial: Trial) -> bool:
    """Return whether it was observed what parameters were after every step, before the next one."""
    return not _unobserved_time(trial)


def norms_for_clipping(trial: Trial) -> dict[int, float]:
    """Return, by step, the global norm by which gradients are clipped.

    0, which clips nothing, where the gradients on record are clipped ones.
    """
    return {
        step: 0.0 if only_clipped_gradients_match(trial, step) else norm_of_slices(trial, step)
        for step in trial.case.steps
    }


def update_findings(trial: Trial, norms: dict[int, float]) -> Iterator[Finding]:
    """Yield, rank by rank, a finding for each wrong rate, then one of the first step at which each parameter is wrong.

    norms: by step, the global gradient norm.
    """
    rates = {step.step: step.lr for step in trial.reference.steps}
    matrices = MuonUpdates(trial, partial(_gradient_gathered, trial, norms), partial(recipe_of_parameter, trial))
    for evidence in trial.ranks.values():
        for step in _requested_steps(trial, evidence):
            yield from _rate_findings(trial, evidence.rank, step, rates[step.step])
        for fqn in trial.initial_parameters(evidence.rank):
            yield from _replay_findings(trial, evidence, fqn, norms, rates, matrices)


def _unobserved_time(trial: Trial) -> str:
    """Return a text of the time after the first step whose later parameters were not observed. Empty if all were."""
    unseen = [step for _, step, _ in trial.steps_with_reference() if step.changed is None]
    return time_after_step(trial, unseen[0].step) if unseen else ""


def time_after_step(trial: Trial, step: int) -> str:
    """Return a text of the time between a step and the next: "after the last step", "between steps 1 and 2"."""
    if step == trial.case.steps[-1]:
        return "after the last step"
    text = f"between steps {step} and {step + 1}"
    if step == trial.case.saved_step:
        text += ", where it saves"
    return text


def later_changes(trial: Trial) -> dict[int, list[tuple[int, str]]]:
    """Return, by step, (rank, fqn) of each parameter that something changed after the optimizer's step.

    The change came before the next step began. Steps without one are left out.
    """
    changes_by_step: dict[int, list[tuple[int, str]]] = {}
    for rank, step, _ in trial.steps_with_reference():
        for fqn in step.changed or {}:
            changes_by_step.setdefault(step.step, []).append((rank, fqn))
    return dict(sorted(changes_by_step.items()))


def _requested_steps(trial: Trial, evidence: RankEvidence) -> list[StepEvidence]:
    """Return a rank's steps that the case requests. The check `completed` reports others."""
    return [step for step in evidence.steps if step.step in trial.case.steps]


def recipe_of_parameter(trial: Trial, fqn: str, step: int = 1) -> TrainingConfig:
    """Return the recipe that trains a parameter in a step, or that a hypothesis assumes.

    Weight decay is 0 in it for a parameter with one dim if only matrices decay.
    """
    if trial.assumption.optimizer.recipe:
        return trial.assumption.optimizer.recipe(step, fqn)
    training = trial.case.training
    spared = training.decay == "matrices" and len(trial.case.model.parameter_shapes().get(fqn, ())) == 1
    return replace(training, weight_decay=0.0) if spared else training


def is_right_rate(trial: Trial, rank: int, step: StepEvidence, wanted: float) -> bool:
    """Return whether a step's observed rate is `wanted`, or one that a hypothesis assumes of some parameter.

    False if none was read.
    """
    if step.lr is None:
        return False
    assumed = trial.assumption.optimizer.rate
    rates = {wanted, *(assumed(rank, step.step, fqn) for fqn in step.gradients if assumed)}
    return any(math.isclose(step.lr, rate, rel_tol=1e-12) for rate in rates)


def _rate_findings(trial: Trial, rank: int, step: StepEvidence, wanted: float) -> list[Finding]:
    """Return a finding if a step's learning rate is not right. Empty if it is."""
    if is_right_rate(trial, rank, step, wanted):
        return []
    return [Finding.at(rank, wanted, step.lr, step=step.step, quantity="learning rate")]


def _replay_findings(
    trial: Trial,
    evidence: RankEvidence,
    fqn: str,
    norms: dict[int, float],
    rates: dict[int, float],
    matrices: MuonUpdates,
) -> list[Finding]:
    """Return a finding of the first step at which a rank's parameter is not what the optimizer makes of it.

    Empty if it always is. Compared are its value and its optimizer state, and that nothing changed it later. It is not
    judged if it, its gradient or another rank's for Muon is not on record: the check `completed` reports that.
    """
    state = _starting_state(trial, evidence, fqn)
    assumed = trial.assumption.optimizer
    for step in _requested_steps(trial, evidence):
        trained = is_trainable(trial.case.training, fqn)
        if (trained and fqn not in step.gradients) or fqn not in step.parameters:
            return []  # `completed` reports it
        shape = state.value.shape
        gradient_shape = step.gradients[fqn].shape if trained else shape
        if gradient_shape != shape:
            subject: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": "gradient", "unit": "shape"}
            return [Finding.at(evidence.rank, shape, gradient_shape, step=step.step, **subject)]
        frozen = np.zeros(shape) if assumed.decays_frozen else None
        gradient = _gradient_given(trial, evidence.rank, step, fqn, norms[step.step]) if trained else frozen
        rate = _rate_of(trial, evidence.rank, step.step, fqn, rates[step.step])
        counted_step = replace(step, step=assumed.counter(step.step, fqn)) if assumed.counter else step
        recipe = recipe_of_parameter(trial, fqn, step.step)
        rule = rule_of(recipe, fqn)
        expected, magnitude = _apply_optimizer_step(
            state, counted_step, gradient, rate, recipe, rule=rule, amsgrad=assumed.amsgrad
        )
        bound = tolerance.update_bound(trial.case, magnitude) if trained or gradient is not None else None
        if rule == "muon" and gradient is not None:
            muon_step = matrices.subtracted_and_bound(evidence.rank, step.step, fqn, rate)
            if muon_step is None:
                return []  # another rank lacks a gradient, which `completed` reports
            expected = expected - muon_step[0]
            bound = bound + muon_step[1]
        finding_of = partial(Finding.at, evidence.rank, step=step.step, kind="parameter", name=fqn)
        stepped_value = optimizer_slice(trial, evidence.rank, fqn, step.parameters[fqn])
        finding = _compare_values(finding_of, stepped_value, expected, bound, state.value)
        if step is evidence.steps[-1] or step.optimizer_state:
            optimizer_state = step.optimizer_state.get(fqn, {})
            finding = finding or _compare_moments(
                finding_of, trial, rule if trained else FROZEN_RULE, optimizer_state, state
            )
        finding = finding or _compare_with_later_value(finding_of, trial, step, fqn)
        if finding:
            return [finding]
        state.value = stepped_value.astype(np.float64)  # go on from what is there: one mistake, one finding
    return []


def _rate_of(trial: Trial, rank: int, step: int, fqn: str, requested: float) -> float:
    """Return the learning rate that a hypothesis assumes of a parameter in a step, else the requested one."""
    rate = trial.assumption.optimizer.rate
    return rate(rank, step, fqn) if rate else requested


def _gradient_given(trial: Trial, rank: int, step: StepEvidence, fqn: str, norm: float) -> np.ndarray | None:
    """Return the clipped gradient of a rank's slice that the optimizer is given, float64, or what a hypothesis assumes.

    None if the hypothesis assumes that the optimizer leaves the parameter alone. norm: the global norm for clipping.
    """
    gradient = step.gradients[fqn].astype(np.float64)
    if trial.assumption.optimizer.given:
        return trial.assumption.optimizer.given(rank, step.step, fqn, gradient)
    return tolerance.clip_coefficient(norm, trial.case.training.max_norm) * gradient


def _gradient_gathered(trial: Trial, norms: dict[int, float], rank: int, step: StepEvidence, fqn: str) -> np.ndarray:
    """Return the clipped gradient of a rank's slice that other ranks gather for Muon, float64.

    It is there even if a hypothesis assumes that the rank's own optimizer leaves the parameter alone.
    """
    given_gradient = _gradient_given(trial, rank, step, fqn, norms[step.step])
    if given_gradient is not None:
        return given_gradient
    own_gradient = step.gradients[fqn].astype(np.float64)
    return tolerance.clip_coefficient(norms[step.step], trial.case.training.max_norm) * own_gradient


def _starting_state(trial: Trial, evidence: RankEvidence, fqn: str) -> _ParameterState:
    """Return the value and the averages of a rank's slice of a parameter before the launch's first step.

    Averages begin at zero, or where the checkpoint left them, whatever that is: the check `resume` judges that.
    """
    assumed_value = trial.assumption.optimizer.begun
    value = assumed_value(evidence.rank, fqn) if assumed_value else trial.initial_parameters(evidence.rank)[fqn]
    value = optimizer_slice(trial, evidence.rank, fqn, value)
    resumed_state = evidence.resumed.optimizer_state.get(fqn, {}) if evidence.resumed else {}
    value = value.astype(np.float64)
    average = "momentum_buffer" if rule_of(recipe_of_parameter(trial, fqn), fqn) == "muon" else "exp_avg"
    first = resumed_state.get(average, np.zeros_like(value)).astype(np.float64)
    second = resumed_state.get("exp_avg_sq", np.zeros_like(value)).astype(np.float64)
    return _ParameterState(value, first, second, np.abs(first))


def is_explained_by_clip(trial: Trial, evidence: RankEvidence, tensor: TensorEvidence, *, clip: float) -> bool:
    """Return whether a rank's first step left what the optimizer makes of this parameter's gradient times `clip`.

    False if value or gradient is not on record.
    """
    first = evidence.steps[0]
    if tensor.fqn not in first.gradients or tensor.fqn not in first.parameters:
        return False
    expected, bound = expected_after_first_step(trial, evidence, tensor, clip=clip)
    stepped_value = optimizer_slice(trial, evidence.rank, tensor.fqn, first.parameters[tensor.fqn])
    return stepped_value.shape == expected.shape and bool((np.abs(stepped_value - expected) <= bound).all())


def expected_after_first_step(
    trial: Trial, evidence: RankEvidence, tensor: TensorEvidence, *, clip: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (value after a rank's first step with this parameter's gradient times `clip`, the bound on each entry).

    The value is NaN, which explains nothing, if the gradient is missing or has another shape. It is NaN, too, where
    Muon's step is not known.
    """
    first = evidence.steps[0]
    state = _starting_state(trial, evidence, tensor.fqn)
    gradient = first.gradients.get(tensor.fqn)
    if gradient is None or gradient.shape != state.value.shape:  # explains nothing
        return np.full_like(state.value, math.nan), np.zeros_like(state.value)
    lr = trial.reference_step(first.step).lr
    recipe = recipe_of_parameter(trial, tensor.fqn, first.step)
    rule = rule_of(recipe, tensor.fqn)
    expected, magnitude = _apply_optimizer_step(state, first, clip * gradient, lr, recipe, rule=rule)
    bound = tolerance.update_bound(trial.case, magnitude)
    if rule == "muon":
        matrices = MuonUpdates(
            trial,
            lambda rank, step, fqn: clip * step.gradients[fqn].astype(np.float64),
            partial(recipe_of_parameter, trial),
        )
        muon_step = matrices.subtracted_and_bound(evidence.rank, first.step, tensor.fqn, lr)
        added, added_bound = muon_step or (np.full_like(bound, math.nan), 0.0)
        return expected - added, bound + added_bound
    return expected, bound


def _apply_optimizer_step(
    state: _ParameterState,
    step: StepEvidence,
    gradient: np.ndarray | None,
    lr: float,
    training: TrainingConfig,
    *,
    rule: str,
    amsgrad: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value after an optimizer step, and the sum of absolute values of all that went into it.

    Advances `state`'s moments. Without a gradient (None) the value stays. For Muon only the average and the weight
    decay are done, which need no whole matrix.
    """
    if gradient is None:
        return state.value, np.abs(state.value)
    decay = lr * training.weight_decay
    if rule == "sgd":
        moved = lr * np.abs(gradient) + decay * np.abs(state.value)
        return state.value - lr * (gradient + training.weight_decay * state.value), np.abs(state.value) + moved
    if rule == "muon":
        state.first = training.momentum * state.first + (1 - training.momentum) * gradient
        state.first_magnitude = training.momentum * state.first_magnitude + (1 - training.momentum) * np.abs(gradient)
        return state.value * (1 - decay), np.abs(state.value) * (1 + decay)
    b1 = training.beta1
    b2 = training.beta2
    state.first = b1 * state.first + (1 - b1) * gradient
    state.first_magnitude = b1 * state.first_magnitude + (1 - b1) * np.abs(gradient)
    state.second = b2 * state.second + (1 - b2) * gradient * gradient
    state.largest_second = np.maximum(state.largest_second, state.second)
    with np.errstate(invalid="ignore"):  # what a checkpoint gave back may be below 0
        denominator = np.sqrt((state.largest_second if amsgrad else state.second) / (1 - b2**step.step)) + training.eps
    scale = lr / (1 - b1**step.step) / denominator
    magnitude = np.abs(state.value) * (1 + decay) + scale * state.first_magnitude
    return state.value * (1 - decay) - scale * state.first, magnitude


def _compare_values(
    finding_of: MakeFinding, observed: np.ndarray, expected: np.ndarray, bound: np.ndarray | None, before: np.ndarray
) -> Finding | None:
    """Return a finding if a parameter is not within the bound of what is expected, or has another shape.

    None if it is right. bound: by entry; None if the parameter is frozen, which must not change at all. before: its
    value before the step. The finding has the move of the worst entry.
    """
    if observed.shape != expected.shape:
        return finding_of(expected.shape, observed.shape, quantity="value", unit="shape")
    if bound is None:
        return _frozen_finding(finding_of, observed, before)
    wrong = ~_is_within_bound(observed, expected, bound)
    if not wrong.any():
        return None
    if np.array_equal(observed, before):
        return finding_of("moved by the optimizer", "unchanged", quantity=OPTIMIZER_STEP)
    bound_ratio = np.where(wrong, np.abs(observed - expected) / np.maximum(bound, 1e-300), -1.0)
    worst = np.unravel_index(np.argmax(bound_ratio), observed.shape)
    moved = float(observed[worst] - before[worst])
    expected_move = float(expected[worst] - before[worst])
    ratio = moved / expected_move if expected_move else math.inf
    entry = tuple(map(int, worst))
    entries_wrong = f"{int(wrong.sum())} of {wrong.size} entries wrong"
    note = f"entry {entry}, ratio {number_text(ratio, 10)}; {entries_wrong}"
    return finding_of(expected_move, moved, quantity=OPTIMIZER_STEP, note=note, bound=Bound(float(bound[worst])))


def _is_within_bound(observed: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return, entry by entry, whether both are within the bound, or both NaN, or equal.

    An update by gradients that are not finite is not finite: the check `finite` reports that.
    """
    is_same = (observed == expected) | (np.isnan(observed) & np.isnan(expected))
    return is_same | (np.abs(observed - expected) <= bound)


def _frozen_finding(finding_of: MakeFinding, observed: np.ndarray, before: np.ndarray) -> Finding | None:
    """Return a finding if any entry of a frozen parameter changed in a step. None if none did."""
    if np.array_equal(observed, before):
        return None
    largest_move = number_text(float(np.max(np.abs(observed - before))), 2)
    return finding_of("unchanged: it is frozen", f"moved by up to {largest_move}", quantity=OPTIMIZER_STEP)


OPTIMIZER_STEP = "the optimizer's step"
FROZEN_RULE = "frozen"
"""Stands for the rule of an optimizer: what is not trained has no state."""


def _compare_with_later_value(finding_of: MakeFinding, trial: Trial, step: StepEvidence, fqn: str) -> Finding | None:
    """Return a finding if a parameter was changed after the optimizer's step, before the next one. None if it was not.

    Only changed parameters are put on record, so there is no bound.
    """
    later_value = (step.changed or {}).get(fqn)
    if later_value is None:
        return None
    stepped_value = step.parameters[fqn]
    time = time_after_step(trial, step.step)
    if later_value.size != stepped_value.size or later_value.dtype != stepped_value.dtype:
        observed = f"{stepped_value.dtype} {stepped_value.shape} became {later_value.dtype} {later_value.shape}"
        return finding_of("unchanged", observed, quantity="value", note=time)
    differing = later_value.reshape(-1) != stepped_value.reshape(-1)
    largest_change = np.max(np.abs(later_value.reshape(-1) - stepped_value.reshape(-1)), initial=0.0)
    note = f"{time}, by up to {number_text(largest_change, 2)}"
    return finding_of(
        0, int(differing.sum()), unit=f"of {later_value.size} entries changed", quantity="value", note=note
    )


KEPT_ELSEWHERE = (
    "the optimizer keeps no state under this parameter; if it keeps one vector for several, name its parts by"
    " harness.adapter.note_shards"
)


def _compare_moments(
    finding_of: MakeFinding, trial: Trial, rule: str, observed_state: dict[str, np.ndarray], state: _ParameterState
) -> Finding | None:
    """Return a finding of the first optimizer state that is missing, or not within the bound of what is expected.

    None if all are. Precondition: the step has state on record, as the last one and one that a checkpoint follows have.
    These are averages over all steps until then. A frozen parameter must have none.
    """
    first = (state.first, state.first_magnitude)
    second = (state.second, state.second)
    expected_by_rule = {
        FROZEN_RULE: {},
        "sgd": {},
        "adamw": {"exp_avg": first, "exp_avg_sq": second},
        "muon": {"momentum_buffer": first},
    }
    if rule == FROZEN_RULE and (unexpected := [key for key, value in observed_state.items() if value.ndim]):
        return finding_of(None, "one", quantity=unexpected[0], note="the parameter is frozen")
    for key, (expected, magnitude) in expected_by_rule[rule].items():
        bound = 4 * tolerance.update_bound(trial.case, magnitude)
        average = observed_state.get(key)
        if average is None or average.shape != expected.shape or not _is_within_bound(average, expected, bound).all():
            observed = None if average is None else "another value"
            note = "" if observed_state else KEPT_ELSEWHERE
            return finding_of("the optimizer's average of the gradients seen", observed, quantity=key, note=note)
    return None
