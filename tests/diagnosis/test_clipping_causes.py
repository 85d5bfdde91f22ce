"""Gradients clipped by other norms than the global one, or not by a norm, named. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import LOW_CLIP, expect_first, first_line, with_scaled_samples
from literal import sum_of_samples, tiny_case, trained_otherwise, trial_of, with_step
from literal_reference import clip

from harness.judge.trial import Trial

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize(
    ("group", "of"),
    [
        ("parameter", lambda fqn: fqn),
        ("layer", lambda fqn: ".".join(fqn.split(".")[:2])),
        ("kind of parameters (matrices, vectors)", lambda fqn: "norm" in fqn),
    ],
)
def test_each_group_of_parameters_clipped_by_its_own_norm(group: str, of: Callable[[str], object]) -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        def own(fqn: str) -> float:
            return math.sqrt(sum(float(np.sum(g * g)) for other, g in gradients.items() if of(other) == of(fqn)))

        return {fqn: clip(own(fqn), LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    expect_first(trial, f"each {group} is clipped by its own norm")


def squares(gradients: Arrays) -> dict[str, float]:
    return {fqn: float(np.sum(g * g)) for fqn, g in gradients.items()}


@pytest.mark.parametrize(
    ("whose", "norm_of"),
    [
        ("the largest absolute entry (infinity norm)", lambda of: max(float(np.abs(g).max()) for g in of.values())),
        ("the sum of all absolute entries (norm type 1)", lambda of: sum(float(np.abs(g).sum()) for g in of.values())),
        ("the sum of the norms of all parameters", lambda of: sum(map(math.sqrt, squares(of).values()))),
        ("the square of the global norm", lambda of: sum(squares(of).values())),
        (
            "the norm of norm weights only",
            lambda of: math.sqrt(sum(by for fqn, by in squares(of).items() if "norm" in fqn)),
        ),
        (
            "a norm without norm weights",
            lambda of: math.sqrt(sum(by for fqn, by in squares(of).items() if "norm" not in fqn)),
        ),
    ],
)
def test_gradients_clipped_by_another_norm_than_the_global_one(whose: str, norm_of: Callable[[Arrays], float]) -> None:
    low = replace(LOW_CLIP, max_norm=0.01)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm_of(gradients), low) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", low)), given=given)
    assert first_line(trial).startswith(f"each rank clips by {whose}, not by the global norm: ")


def test_gradients_clipped_by_the_norm_of_the_step_before() -> None:
    norms = {0: 0.0}

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm
        return {fqn: clip(norms[step - 1], LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    assert first_line(trial).startswith("each rank clips by the norm of the step before, not by the global norm: ")


def test_gradients_clipped_entry_by_entry() -> None:
    low = replace(LOW_CLIP, max_norm=0.01)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: np.clip(g, -0.01, 0.01) for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", low)), given=given)
    expect_first(trial, "gradients are clipped entry by entry, to 0.01, not by their norm")


def clipped_after_every_microbatch(trial: Trial, chains: int) -> dict[int, float]:
    """What samples of step 1 count where sums of one chain, or of each data rank's, are clipped as they add up."""
    firsts, weights = [[0, 1, 4, 5]] if chains == 1 else [[0, 1], [4, 5]], {}
    for own in firsts:  # the samples of first microbatches; of those that are averaged, each is as much larger
        only = dict.fromkeys(range(8), 0.0) | dict.fromkeys(own, float(chains))
        norm = math.sqrt(sum(squares({fqn: sum_of_samples(trial, fqn, only) for fqn in trial.plan.shapes}).values()))
        assert norm > LOW_CLIP.max_norm
        weights |= dict.fromkeys(own, clip(norm, LOW_CLIP))
    return weights


OF_RANKS = "; each rank clips its own before they are reduced"


@pytest.mark.parametrize(("chains", "whose"), [(1, ""), (2, OF_RANKS)])
def test_gradients_clipped_after_every_microbatch_while_they_add_up(chains: int, whose: str) -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP, accumulation=2))
    told = f"accumulated gradients are clipped after every microbatch, requested once a step{whose}"
    expect_first(with_scaled_samples(trial, clipped_after_every_microbatch(trial, chains)), told)


@pytest.mark.parametrize(("chains", "whose"), [(1, ""), (2, OF_RANKS)])
def test_gradients_clipped_after_every_microbatch_and_once_more_before_the_step(chains: int, whose: str) -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP, accumulation=2))
    weights, norms = clipped_after_every_microbatch(trial, chains), {}

    def gradients(step: int, own: Arrays) -> Arrays:
        return {fqn: sum_of_samples(trial, fqn, weights) for fqn in own} if step == 1 else own

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm * clip(norm, LOW_CLIP)  # what the clipping of the step finds, and reports
        return {fqn: clip(norms[step], LOW_CLIP) * clip(norm, LOW_CLIP) * g for fqn, g in gradients.items()}

    wrong = trained_otherwise(trial, gradients=gradients, given=given)
    for rank, step, _ in list(wrong.steps()):
        wrong = with_step(wrong, rank, step.step, grad_norm=norms[step.step])
    times = "after every microbatch and once more before the step"
    expect_first(wrong, f"accumulated gradients are clipped {times}, requested once a step{whose}")
