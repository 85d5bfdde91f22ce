"""Gradients and losses that are not the reference's, and the checks that fail with them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.core.causes.reported import reports_of
from harness.core.causes.words import Pair, from_step_text
from harness.core.checks import all_checks, update
from harness.core.checks.replica_agreement import replica_families
from harness.core.judge import tolerance
from harness.core.judge.assembly import gradient_distance, gradient_misfits
from harness.core.judge.contents import view_of_slice
from harness.core.judge.losses import global_loss
from harness.core.judge.trial import Trial


def observed_gradients(trial: Trial, rank: int, step: int) -> dict[str, np.ndarray]:
    """Return the gradients that a rank had in a step, by fqn; empty if it has no such step."""
    return next((record.gradients for record in trial.ranks[rank].steps if record.step == step), {})


def expected_gradient(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the rank's slice of the reference's gradient in a step, a view.

    None if the rank has no slice or the reference no gradient.
    """
    part = trial.gradient_slice_of(rank, fqn)
    full = trial.reference.steps[step - 1].gradients.get(fqn)
    return None if part is None or full is None else view_of_slice(full, part)


def pairs_with_wrong_gradient(trial: Trial, step: int) -> list[Pair]:
    """Return each (rank, fqn) whose gradient in a step is off by more than the check allows, in the model's order.

    Gradients that have no expected one are left out. Raises NoBound.
    """
    wrong = []
    for rank in sorted(trial.ranks):
        for fqn in observed_gradients(trial, rank, step):
            if expected_gradient(trial, rank, fqn, step) is None:
                continue
            if not distance_to_reference(trial, rank, fqn, step) <= trial.bounds.gradient[step]:
                wrong.append((rank, fqn))
    return wrong


def distance_to_reference(trial: Trial, rank: int, fqn: str, step: int) -> float:
    """Return the largest difference of a rank's gradient from the expected one.

    It is relative to the largest entry of the whole expected gradient. Precondition: both exist.
    """
    full = trial.reference.steps[step - 1].gradients[fqn]
    return gradient_distance(trial, rank, fqn, observed_gradients(trial, rank, step)[fqn], full)


def loss_difference(trial: Trial, step: int) -> float | None:
    """Return the difference of a step's loss from the reference's, relative to that.

    None if it is right or was not observed.
    """
    observed = global_loss(trial, step)
    expected = trial.reference.steps[step - 1].loss
    if observed is None:
        return None
    difference = abs(observed - expected) / abs(expected)
    return difference if not difference <= trial.bounds.loss[step] else None


def first_wrong_step(trial: Trial) -> int | None:
    """Return the first step in which a gradient is wrong, entry by entry or, in recipes with noise, as a whole.

    None if all are right, or if a whole gradient cannot be judged for lack of measured noise.
    """
    for step in trial.case.steps:
        if pairs_with_wrong_gradient(trial, step):
            return step
        try:
            if not trial.case.has_derived_bounds and not all(
                misfit.is_within_bound for misfit in gradient_misfits(trial, step)[0]
            ):
                return step
        except tolerance.NoBound:
            return None
    return None


def step_choices(trial: Trial, step: int) -> Iterator[tuple[str, list[int], int]]:
    """Yield (words, steps, further choices) of all steps from `step` on, then of that step alone if it is not the last.

    further choices: how many more numbers that choice fits, 0 or 1.
    """
    later = [other for other in trial.case.steps if other >= step]
    yield f" {from_step_text(trial, step)}" if step > trial.first_step else "", later, 0
    if len(later) > 1:
        yield f" in step {step} alone", [step], 1


def ranks_holding(trial: Trial, fqn: str) -> list[int]:
    """Return the ranks that have the parameter on record, ascending."""
    return [rank for rank, local_shards in sorted(trial.local_slices.items()) if fqn in local_shards]


# ---- what follows of gradients that are wrong, as far as what came before is right

NUMBER_CHECKS = {"loss", "gradients", "grad_norm", "update", "samples", "positions", "initial_weights", "schedule"}
"""Checks of numbers that may be broken because gradients are wrong."""
GRADIENT_CHECKS = frozenset(name for name, module in all_checks().items() if getattr(module, "OF_GRADIENTS", False))
"""The checks that wrong gradients make fail: their files say so."""


def checks_failing_with_gradients(trial: Trial, step: int) -> tuple[str, ...]:
    """Return the checks that may fail because gradients are wrong from a step on, whether they fail here or not.

    The loss of that step is computed before them. Reports are of what was computed. Updates are judged by the gradients
    that were seen, if these have one norm.
    """
    losses = not any(loss_difference(trial, earlier) for earlier in trial.case.steps if earlier <= step)
    follows_by_check = {
        "gradients": True,
        "grad_norm": not (_gradients_have_one_norm(trial, step) and reports_of(trial, "grad_norm")),
        "loss": losses,
        "reported_loss": losses and not reports_of(trial, "reported_loss"),
        "update": not _gradients_have_one_norm(trial, step) and _updates_are_right_before(trial, step),
        "replica_agreement": not replicas_agree(trial, step),
    }
    return tuple(check for check, follows in follows_by_check.items() if follows)


def replicas_agree(trial: Trial, step: int) -> bool:
    """Return whether ranks that hold the same slice have nearly the same gradient of it in a step.

    Otherwise there is no global norm. Gradients that are missing or of another shape are not compared.
    """
    gradients = {rank: observed_gradients(trial, rank, step) for rank in trial.ranks}
    for (fqn, _), ranks in replica_families(trial).items():
        for rank in ranks[1:]:
            first = gradients[ranks[0]].get(fqn)
            gradient = gradients[rank].get(fqn)
            if gradient is None or first is None or gradient.shape != first.shape:
                continue
            if not np.allclose(gradient, first, rtol=1e-6, atol=0):
                return False
    return True


def _gradients_have_one_norm(trial: Trial, step: int) -> bool:
    """Return whether all gradients of a step are finite, have their parameters' shapes, and agree among replicas."""
    shapes = {}
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            shapes[rank, tensor.fqn] = tensor.value.shape
    for rank in trial.ranks:
        for fqn, gradient in observed_gradients(trial, rank, step).items():
            if not np.isfinite(gradient).all() or shapes.get((rank, fqn)) != gradient.shape:
                return False
    return replicas_agree(trial, step)


def _updates_are_right_before(trial: Trial, step: int) -> bool:
    """Return whether the check `update` finds nothing in the steps before this one."""
    mistakes = update.update_findings(trial, update.norms_for_clipping(trial))
    return not any(mistake.step and mistake.step < step for mistake in mistakes)
