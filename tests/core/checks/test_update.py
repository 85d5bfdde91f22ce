"""The check `update`: parameters and optimizer state after every step. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import NORM, WQ, findings, like
from literal import ADAMW, SGD, judged, tiny_case, trial_of, with_every_rank, with_step, with_value
from literal_reference import optimize

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge import tolerance
from harness.core.judge.result import Verdict
from harness.core.report.cause_text import diagnosis_line


def test_a_parameter_that_an_optimizer_forgot_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    start = trial.ranks[1].parameters[-2].value
    assert findings("update", with_value(trial, 1, 1, "parameters", NORM, lambda _: start))[0] == like(
        1, "moved by the optimizer", "unchanged", step=1, name=NORM
    )


def trained_as(trial, training, coefficient: float = 1.0):
    """The trial with parameters made of the same gradients by another recipe, or other clipping."""

    def change(trial, rank):
        for tensor in trial.ranks[rank].parameters:
            clips = [tolerance.clip_coefficient(s.grad_norm, training.max_norm) for s in trial.reference.steps]
            for step in (1, 2, 3):
                steps = zip(clips, trial.ranks[rank].steps[:step], strict=False)
                seen = [clip * coefficient * s.gradients[tensor.fqn] for clip, s in steps]
                after = optimize(tensor.value, seen, training)[0]
                trial = with_value(trial, rank, step, "parameters", tensor.fqn, lambda _, after=after: after)
        return trial

    return with_every_rank(trial, change)


WRONG_RECIPES = {
    "weight decay left out": {"weight_decay": 0.0},
    "weight decay off by 1e-6": {"weight_decay": 0.1 * (1 + 1e-6)},
    "no clipping": {"max_norm": None},
    "another beta1": {"beta1": 0.95},
    "another beta2": {"beta2": 0.999},
    "another eps": {"eps": 1e-6},
    "another learning rate": {"lr": 0.01 * (1 + 1e-8)},
}


@pytest.mark.parametrize("mistake", WRONG_RECIPES)
def test_another_recipe_than_the_one_requested_is_found(mistake: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert judged("update", trained_as(trial, trial.case.training)).verdict == Verdict.PASS
    broken = trained_as(trial, replace(trial.case.training, **WRONG_RECIPES[mistake]))
    assert 0 in {finding.rank for finding in findings("update", broken)}


def test_norm_weights_that_decay_although_only_matrices_should_are_found() -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, decay="matrices")))
    wrong = findings("update", trained_as(trial, ADAMW))
    assert {finding.name for finding in wrong} == {fqn for fqn in trial.plan.shapes if "norm" in fqn}


def test_samples_in_full_length_in_a_step_that_trains_on_half_are_found() -> None:
    requested, ran = (tiny_case("fsdp_2", replace(ADAMW, variable_length=half)) for half in (True, False))
    assert {finding.step for finding in findings("samples", trial_of(requested, ran))} == {2}


def test_a_gradient_of_another_shape_than_its_parameter_is_a_finding_and_can_be_diagnosed() -> None:
    """As where each tp rank has the whole gradient of its part of an embedding."""
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, max_norm=None)))
    broken = with_value(trial, 0, 1, "gradients", NORM, lambda value: np.tile(value, 2))
    told = like(0, (2,), (4,), step=1, name="norm.weight", quantity="gradient", unit="shape")
    assert told in findings("update", broken)
    diagnosis = diagnose(broken, judge(broken))
    assert diagnosis is not None and NORM in diagnosis_line(diagnosis)


def test_sgd_without_clipping_shows_the_ratio() -> None:
    trial = trial_of(tiny_case("single", replace(SGD, weight_decay=0.0)))
    broken = trained_as(trial, replace(trial.case.training, max_norm=None))
    ratios = [f.observed / f.expected for f in findings("update", broken)[:8]]
    assert ratios == pytest.approx([1 / tolerance.clip_coefficient(trial.reference.steps[0].grad_norm, 1.0)] * 8)


def test_clipping_by_one_ranks_own_norm_is_found() -> None:
    broken = trained_as(trial_of(tiny_case("fsdp_2", SGD)), SGD, coefficient=1.4)
    assert judged("update", broken).verdict == Verdict.FAIL


def test_a_parameter_moved_though_it_should_rest_is_a_failure_not_an_error() -> None:
    """SGD without decay leaves rows without gradient alone: the ratio would divide by zero."""
    trial = trial_of(tiny_case("single", replace(SGD, weight_decay=0.0, max_norm=None)))
    start = trial.ranks[0].parameters[-2].value
    for step in (1, 2, 3):
        trial = with_value(trial, 0, step, "gradients", NORM, np.zeros_like)
        trial = with_value(trial, 0, step, "parameters", NORM, lambda _: start)
    trial = with_value(trial, 0, 1, "parameters", NORM, lambda value: value + np.array([0, 0, 0.5, 0]))
    (finding,) = findings("update", trial)
    assert finding == like(
        0,
        0,
        0.5,
        step=1,
        kind="parameter",
        name=NORM,
        quantity="the optimizer's step",
        note="entry (2,), ratio inf; 1 of 4 entries wrong",
    )


def test_a_wrong_learning_rate_is_named() -> None:
    assert findings("update", with_step(trial_of(tiny_case("fsdp_2")), 1, 3, lr=0.0076)) == (
        like(1, 0.0075, 0.0076, step=3, quantity="learning rate"),
    )


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_wrong_optimizer_state_after_the_last_step_is_named(key: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    state = trial.ranks[1].steps[2].optimizer_state
    wrong = state | {WQ: state[WQ] | {key: state[WQ][key] * (1 + 1e-8)}}
    assert findings("update", with_step(trial, 1, 3, optimizer_state=wrong)) == (
        like(1, "the optimizer's average of the gradients seen", "another value", step=3, name=WQ, quantity=key),
    )


def test_a_parameter_under_which_an_optimizer_keeps_nothing_is_answered_with_what_names_its_vectors() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    state = {fqn: kept for fqn, kept in trial.ranks[1].steps[2].optimizer_state.items() if fqn != WQ}
    (found,) = findings("update", with_step(trial, 1, 3, optimizer_state=state))
    assert (found.name, found.quantity, found.observed) == (WQ, "exp_avg", None)
    assert found.note.endswith("harness.adapter.note_shards")


def test_parameters_rounded_to_float32_are_found() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "parameters", WQ, lambda p: p.astype(np.float32))
    assert [(f.rank, f.step, f.name) for f in findings("update", trial)] == [(1, 3, WQ)]


def test_a_parameter_that_is_changed_after_the_optimizer_is_not_the_optimizers_mistake() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    left = trial.ranks[1].steps[0].parameters[NORM]
    trial = with_step(trial, 1, 1, changed={NORM: left + np.array([0.0, 0.5])})
    expected = like(
        1,
        0,
        1,
        step=1,
        name=NORM,
        unit="of 2 entries changed",
        note="between steps 1 and 2, by up to 0.5",
        quantity="value",
    )
    assert findings("update", trial) == (expected,)


def test_a_parameter_that_is_changed_after_the_last_step_is_seen() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    left = trial.ranks[0].steps[2].parameters[NORM]
    trial = with_step(trial, 0, 3, changed={NORM: left.astype(np.float32)})
    expected = like(
        0,
        "unchanged",
        "float64 (4,) became float32 (4,)",
        step=3,
        name=NORM,
        note="after the last step",
        quantity="value",
    )
    assert findings("update", trial) == (expected,)


def test_without_a_look_at_what_followed_a_step_its_update_is_unknown() -> None:
    result = judged("update", with_step(trial_of(tiny_case("ddp_2")), 1, 2, changed=None))
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "parameters were not observed between steps 2 and 3")
