"""Two independent mistakes at once: each is named, if it is needed to explain what is seen. Literal evidence, no ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from diagnosed import LOW_CLIP, fsdp_4, kinds
from literal import tiny_case, trained_otherwise, trial_of, with_step
from literal_reference import clip

from harness.core.causes.words import Arrays

REQUESTED = trial_of(tiny_case("fsdp_2", LOW_CLIP))


def test_two_wrong_reports_are_both_named() -> None:
    trial = fsdp_4()
    for rank, step in itertools.product(trial.ranks, trial.case.steps):
        seen = trial.ranks[rank].steps[step - 1]
        twice = {"reported_loss": 2 * (seen.reported_loss or 0.0), "grad_norm": 3 * (seen.grad_norm or 0.0)}
        trial = with_step(trial, rank, step, **twice)
    assert kinds(trial) == ("wrong report",) * 2


# ---- two in the optimizer


def test_clipping_left_out_and_another_beta() -> None:
    """The first step tells of clipping alone, the later ones of both."""
    training = replace(LOW_CLIP, max_norm=None, beta2=0.999)
    assert kinds(trained_otherwise(REQUESTED, training=training)) == ("clipping left out", "beta2")


def test_a_step_left_out_and_each_parameter_clipped_by_its_own_norm() -> None:
    """What one leaves alone the other does not give to the optimizer."""

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        by = {fqn: clip(float(np.linalg.norm(g)), LOW_CLIP) for fqn, g in gradients.items()}
        return {} if step == 2 else {fqn: by[fqn] * g for fqn, g in gradients.items()}

    assert kinds(trained_otherwise(REQUESTED, given=given)) == ("not stepped", "clipped by another norm")
