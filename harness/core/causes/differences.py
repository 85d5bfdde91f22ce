"""Which gradients and which loss are not the reference's, and by what factor: what the rules about numbers share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.core.causes.reported import reported_of
from harness.core.causes.words import Pair, from_step
from harness.core.checks import all_checks, update
from harness.core.checks.replica_agreement import replica_families
from harness.core.judge import tolerance
from harness.core.judge.assembly import gradient_distance, misfits
from harness.core.judge.contents import take
from harness.core.judge.losses import global_loss
from harness.core.judge.trial import Trial


def seen_gradients(trial: Trial, rank: int, step: int) -> dict[str, np.ndarray]:
    return next((record.gradients for record in trial.ranks[rank].steps if record.step == step), {})


def expected_gradient(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    part = trial.gradient_slice_of(rank, fqn)
    full = trial.reference.steps[step - 1].gradients.get(fqn)
    return None if part is None or full is None else take(full, part)


def wrong_pairs(trial: Trial, step: int) -> list[Pair]:
    """(rank, fqn) whose gradient in a step is off by more than the check allows, in the model's order."""
    pairs = ((rank, fqn) for rank in sorted(trial.ranks) for fqn in seen_gradients(trial, rank, step))
    known = (at for at in pairs if expected_gradient(trial, *at, step) is not None)
    return [at for at in known if not distance(trial, *at, step) <= trial.bounds.gradient[step]]


def distance(trial: Trial, rank: int, fqn: str, step: int) -> float:
    """How far a gradient that has an expected one is from it, relative to the largest entry of the whole parameter's."""
    full = trial.reference.steps[step - 1].gradients[fqn]
    return gradient_distance(trial, rank, fqn, seen_gradients(trial, rank, step)[fqn], full)


def loss_off(trial: Trial, step: int) -> float | None:
    """Return how far the loss of a step is off, None if it is right or was not seen."""
    seen, wanted = global_loss(trial, step), trial.reference.steps[step - 1].loss
    if seen is None:
        return None
    off = abs(seen - wanted) / abs(wanted)
    return off if not off <= trial.bounds.loss[step] else None


def first_wrong_step(trial: Trial) -> int | None:
    """The first in which a gradient is wrong, entry by entry or, in recipes with noise, as a whole."""
    for step in trial.case.steps:
        if wrong_pairs(trial, step):
            return step
        try:
            if not trial.case.exact and not all(one.within for one in misfits(trial, step)[0]):
                return step
        except tolerance.NoBound:
            return None
    return None


def spans(trial: Trial, step: int) -> Iterator[tuple[str, list[int], int]]:
    """From the first wrong step on, and in it alone: words, steps, how many more choices that is."""
    later = [other for other in trial.case.steps if other >= step]
    yield f" {from_step(trial, step)}" if step > trial.first_step else "", later, 0
    if len(later) > 1:
        yield f" in step {step} alone", [step], 1


def holders_of(trial: Trial, fqn: str) -> list[int]:
    """The ranks that hold some of a parameter."""
    return [rank for rank, held in sorted(trial.holdings.items()) if fqn in held]


# ---- what follows of gradients that are wrong, as far as what came before is right

NUMBERS = {"loss", "gradients", "grad_norm", "update", "samples", "positions", "initial_weights", "schedule"}
OF_GRADIENTS = frozenset(name for name, module in all_checks().items() if getattr(module, "OF_GRADIENTS", False))
"""The checks that wrong gradients make fail: their files say so."""
"""Checks of numbers that may be broken because gradients are wrong."""


def consequences(trial: Trial, step: int) -> tuple[str, ...]:
    """Return the checks that fail because gradients are wrong from a step on.

    The loss of that step is computed before them. Reports are of what was computed. Updates are judged by the gradients that
    were seen, if these have one norm."""
    losses = not any(loss_off(trial, earlier) for earlier in trial.case.steps if earlier <= step)
    found = {
        "gradients": True,
        "grad_norm": not (_have_one_norm(trial, step) and reported_of(trial, "grad_norm")),
        "loss": losses,
        "reported_loss": losses and not reported_of(trial, "reported_loss"),
        "update": not _have_one_norm(trial, step) and _updated_until(trial, step),
        "replica_agreement": not replicas_agree(trial, step),
    }
    return tuple(check for check, follows in found.items() if follows)


def replicas_agree(trial: Trial, step: int) -> bool:
    """Whether those who hold the same slice have the same gradient of a step: else there is no global norm."""
    seen = {rank: seen_gradients(trial, rank, step) for rank in trial.ranks}
    return all(
        np.allclose(seen[rank][fqn], seen[ranks[0]][fqn], rtol=1e-6, atol=0)
        for (fqn, _), ranks in replica_families(trial).items()
        for rank in ranks[1:]
        if fqn in seen[rank] and fqn in seen[ranks[0]]
        if seen[rank][fqn].shape == seen[ranks[0]][fqn].shape
    )


def _have_one_norm(trial: Trial, step: int) -> bool:
    held = {(rank, tensor.fqn): tensor.value.shape for rank, e in trial.ranks.items() for tensor in e.parameters}
    seen = {(rank, fqn): g for rank in trial.ranks for fqn, g in seen_gradients(trial, rank, step).items()}
    fits = all(np.isfinite(g).all() and held.get(at) == g.shape for at, g in seen.items())
    return fits and replicas_agree(trial, step)


def _updated_until(trial: Trial, step: int) -> bool:
    """Whether the updates of all steps before are right."""
    wrong = update.mistakes(trial, update.clipped_norms(trial))
    return not any(one.step and one.step < step for one in wrong)
