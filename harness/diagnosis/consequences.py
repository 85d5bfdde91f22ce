"""What follows of gradients that are wrong, as far as what came before is right: no more than that is put down to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.checks import update
from harness.checks.replica_agreement import replica_families
from harness.diagnosis.differences import loss_off, seen_gradients
from harness.diagnosis.reports import reported_of
from harness.judge.result import Verdict
from harness.judge.trial import Trial

OF_GRADIENTS = frozenset({"grad_norm", "gradients", "loss", "reported_loss", "update", "replica_agreement"})
"""Laws of numbers that may be broken because gradients are wrong."""


def consequences(trial: Trial, step: int) -> tuple[str, ...]:
    """Of gradients that are wrong from a step on: the loss of that step is computed before them, reports are of what was
    computed, and updates are judged by the gradients that were seen, if these have one norm."""
    losses = not any(loss_off(trial, earlier) for earlier in trial.case.steps if earlier <= step)
    found = {
        "gradients": True,
        "grad_norm": not (_have_one_norm(trial, step) and reported_of(trial, "grad_norm")),
        "loss": losses,
        "reported_loss": losses and not reported_of(trial, "reported_loss"),
        "update": not _have_one_norm(trial, step) and _updated_until(trial, step),
        "replica_agreement": not replicas_agree(trial, step),
    }
    return tuple(law for law, follows in found.items() if follows)


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
    if step == trial.first_step:
        return True
    ranks = {r: replace(e, steps=tuple(s for s in e.steps if s.step < step)) for r, e in trial.ranks.items()}
    return update.check(replace(trial, run=replace(trial.run, ranks=ranks))).verdict is not Verdict.FAIL
