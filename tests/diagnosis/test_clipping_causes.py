"""Gradients clipped by other norms than the global one, or not by a norm, named. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    LOW_CLIP,
    NORM,
    broken,
    expect,
    expect_first,
    first_line,
    proposed,
    trained_as,
)
from literal import (
    ADAMW,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_rank,
    with_step,
    with_updates_that_follow,
    with_value,
)
from literal_reference import clip
from resuming import resumed

from harness.diagnosis.algorithms import HALF
from harness.diagnosis.clipping import wrong_clipping
from harness.judge.result import Cause
from harness.plan.slices import tp_dim
from harness.report.cause_text import cause_line

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize(
    ("group", "of", "layout"),
    [
        ("parameter", lambda fqn: fqn, "fsdp_2"),
        ("layer", lambda fqn: ".".join(fqn.split(".")[:2]), "fsdp_2"),
        ("kind of parameters (matrices, vectors)", lambda fqn: "norm" in fqn, "fsdp_2"),
        ("placement over tp (dim 0, dim 1, replicated)", tp_dim, "tp_2"),
    ],
)
def test_each_group_of_parameters_clipped_by_its_own_norm(group: str, of: Callable[[str], object], layout: str) -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        def own(fqn: str) -> float:
            return math.sqrt(sum(float(np.sum(g * g)) for other, g in gradients.items() if of(other) == of(fqn)))

        return {fqn: clip(own(fqn), LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case(layout, LOW_CLIP)), given=given)
    expect_first(trial, f"each {group} is clipped by its own norm")
    whole = Cause("clipped by another norm", f"each {group} is clipped by its own norm")
    assert whole in [one.cause for one in wrong_clipping(trial, broken("update"))]


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
    own, wanted = norm_of(trial.reference.steps[0].gradients), trial.reference.steps[0].grad_norm
    instead = f"not by the global norm: {own:.6g} on rank 0, expected {wanted:.6g}"
    assert first_line(trial) == f"each rank clips by {whose}, {instead}"


def test_gradients_clipped_by_the_norm_of_the_step_before() -> None:
    norms = {0: 0.0}

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm
        return {fqn: clip(norms[step - 1], LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    instead = "not by the global norm: 0 on rank 0, expected 1.62647"
    assert first_line(trial) == f"each rank clips by the norm of the step before, {instead}"


def test_gradients_clipped_by_the_norm_of_the_step_before_and_in_the_first_by_their_own() -> None:
    norms: dict[int, float] = {}

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm
        return {fqn: clip(norms.get(step - 1, norm), LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    assert first_line(trial) == (
        "each rank clips by the norm of the step before (in step 1 its own), not by the global norm: "
        f"{norms[1]:.6g} on rank 0 in step 2, expected {norms[2]:.6g}"
    )


def test_clipping_that_enlarges_gradients_of_a_later_step_alone() -> None:
    between = replace(LOW_CLIP, max_norm=1.6)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: 1.6 / (norm + 1e-6) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", between)), given=given)
    told = "clipping enlarges gradients in step 2: it multiplies by 1.003 although the norm 1.595 is below max_norm 1.6"
    expect_first(trial, told)
    every = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    assert not [text for text in proposed(wrong_clipping, every, "update") if "enlarges" in text]


def test_gradients_clipped_entry_by_entry() -> None:
    low = replace(LOW_CLIP, max_norm=0.01)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: np.clip(g, -0.01, 0.01) for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", low)), given=given)
    expect_first(trial, "gradients are clipped entry by entry, to 0.01, not by their norm")


def test_a_norm_that_ranks_report_is_a_choice_more_than_the_one_that_it_is() -> None:
    norms = {0: 0.0}

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm
        return {fqn: clip(norms[step - 1], LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    for rank, step, _ in list(trial.steps()):
        trial = with_step(trial, rank, step.step, grad_norm=norms[step.step - 1])
    chosen = {cause_line(one.cause): one.fitted for one in wrong_clipping(trial, broken("update"))}
    instead = "not by the global norm: {} on rank 0, expected 1.62647"
    assert chosen == {
        f"each rank clips by the norm of the step before, {instead.format(0)}": 1,
        f"each rank clips by the norm it reports, {instead.format(0)}": 2,
        # what leaves the first step as it is explains no other
        "gradients are not clipped (coefficient 0.1537)": HALF,
        f"each rank clips by the largest absolute entry (infinity norm), {instead.format(0.14995)}": 1 + HALF,
        "gradients are clipped entry by entry, to 0.25, not by their norm": 1 + HALF,
        "gradients are clipped entry by entry, to 1, not by their norm": 1 + HALF,
    }
    expect(
        trial,
        """\
each rank clips by the norm of the step before, not by the global norm: 0 on rank 0, expected 1.62647
  assuming this: 2 of 2 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_clipping_left_out_on_one_of_two_replicas_has_them_train_apart() -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP))
    trial = with_rank(trial, 1, steps=trained_as(replace(LOW_CLIP, max_norm=None), "ddp_2", LOW_CLIP).ranks[1].steps)
    expect(
        trial,
        """\
clipping is not applied to every parameter on rank 1 (coefficient 0.1537)
  assuming this: 2 of 2 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_parameters_that_are_left_out_of_clipping_may_be_left_out_of_its_norm() -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        others = math.sqrt(sum(by for fqn, by in squares(gradients).items() if fqn != NORM))
        return {fqn: g if fqn == NORM else clip(others, LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    whose = ", the others are clipped by their own norm"
    expect_first(trial, f"clipping is not applied to 1 of 12 parameters (norm.weight) (coefficient 0.1537){whose}")


def test_there_is_no_norm_of_the_step_before_of_a_step_of_another_launch() -> None:
    trial = resumed(training=LOW_CLIP)
    for rank, evidence in trial.ranks.items():
        assert evidence.resumed is not None
        (last,) = evidence.steps
        rate, held = trial.reference.steps[2].lr, evidence.resumed
        left, state = {}, {}
        for fqn, gradient in last.gradients.items():
            before = {key: held.optimizer_state[fqn][key] for key in ("exp_avg", "exp_avg_sq")}
            first = 0.9 * before["exp_avg"] + 0.1 * gradient
            second = 0.95 * before["exp_avg_sq"] + 0.05 * gradient**2
            moved = rate * first / (1 - 0.9**3) / (np.sqrt(second / (1 - 0.95**3)) + ADAMW.eps)
            left[fqn] = held.parameters[fqn] * (1 - rate * ADAMW.weight_decay) - moved
            state[fqn] = {"exp_avg": first, "exp_avg_sq": second}
        trial = with_step(trial, rank, 3, parameters=left, optimizer_state=state)
    norm = trial.reference.steps[2].grad_norm
    *others, left_out = proposed(wrong_clipping, trial, "update")
    assert left_out == f"gradients are not clipped (coefficient {0.25 / norm:.4g})"
    assert not [text for text in others if "step before" in text], "that norm was not seen"


def test_replicas_whose_gradients_differ_have_no_global_norm_to_be_clipped_by() -> None:
    unclipped = trained_as(replace(LOW_CLIP, max_norm=None), "ddp_2", LOW_CLIP)
    assert proposed(wrong_clipping, unclipped, "update")[-1] == "gradients are not clipped (coefficient 0.1537)"
    differing = with_value(trial_of(tiny_case("ddp_2", ADAMW)), 1, 1, "gradients", NORM, lambda g: 2 * g)
    never = replace(differing, case=replace(differing.case, training=replace(LOW_CLIP, max_norm=None)))
    wrong = replace(with_updates_that_follow(never), case=unclipped.case)
    assert proposed(wrong_clipping, wrong, "update") == []
