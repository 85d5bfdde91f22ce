"""Moves that are a multiple of the right ones, decay otherwise, or are none at all: what is said of them, and what is assumed
then. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, broken, diagnosis_text, first_line, proposed, trained_as
from literal import SGD, tiny_case, trained_otherwise, trial_of, with_parameter, with_rank, with_step, with_value
from literal_reference import clip
from trained_so import follows

from harness.diagnosis.hypothesis import Fact
from harness.diagnosis.optimizer import _not_stepped, _rates_and_decays, not_finite, wrong_optimizer
from harness.diagnosis.words import Arrays
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig
from harness.report.cause_text import cause_line

LOW = replace(SGD, max_norm=0.25)
"""Rates requested are 0.025, 0.05 and 0.0375, the peak is 0.05."""
NORMS = "3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more)"
OTHERS = "9 of 12 parameters (tok_embeddings.weight, layers.0.attention.wq.weight and 7 more)"
FSDP_2 = trial_of(tiny_case("fsdp_2", LOW))
RATES = [step.lr for step in FSDP_2.reference.steps]


def with_first(trial: Trial, **changes: float) -> Trial:
    """Another first step is that of the reference."""
    first, *rest = trial.reference.steps
    return replace(trial, reference=replace(trial.reference, steps=(replace(first, **changes), *rest)))


# ---- multiples of the rate


def moved_by(rate: Callable[[int, str], float], trial: Trial = FSDP_2) -> Trial:
    return trained_otherwise(trial, rate=rate)


def causes(trial: Trial, kind: str) -> list[Cause]:
    return [one.cause for one in wrong_optimizer(trial, broken("update")) if one.cause.kind == kind]


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (3.0, "every optimizer step is 3 times what it should be, as with 3 times the learning rate"),
        (1 / 3, "every optimizer step is 0.333333 times what it should be, as with 0.333333 times the learning rate"),
        (-1.0, "every optimizer step is -1 times what it should be, as with -1 times the learning rate"),
    ],
)
def test_steps_that_are_a_multiple_are_told_as_such(factor: float, text: str) -> None:
    trial = moved_by(lambda step, fqn: factor * RATES[step - 1])
    (one,) = (one for one in _rates_and_decays(trial) if one.cause.kind == "learning rate")
    assert (one.cause, one.fitted) == (Cause("learning rate", text), 3)
    follows(trial, one)


@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_some_parameters_steps_that_are_a_multiple_are_told_as_their_rate(decay: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(LOW, decay=decay)))
    trial = moved_by(lambda step, fqn: (1.5 if "norm" in fqn else 1.0) * RATES[step - 1], trial)
    (one,) = (one for one in _rates_and_decays(trial) if one.cause.kind == "learning rate")
    cause = Cause("learning rate", f"the learning rate of {NORMS} is 0.0375 in step 1", "", "0.025")
    assert (one.cause, one.fitted) == (cause, 1)
    follows(trial, one)


@pytest.mark.parametrize(("where", "chosen"), [("every parameter", ""), (NORMS, "norm")])
@pytest.mark.parametrize("constant", [True, False])
def test_a_first_step_at_the_peak_is_tried_without_a_schedule_and_as_a_multiple(
    where: str, chosen: str, constant: bool
) -> None:
    def rate(step: int, fqn: str) -> float:
        return RATES[step - 1] if chosen not in fqn else 0.05 if constant else 2 * RATES[step - 1]

    trial = moved_by(rate)
    unscheduled, twice = (one for one in _rates_and_decays(trial) if one.cause.kind == "learning rate")
    text = f"the learning rate of {where} is 0.05 in step 1"
    assert unscheduled.cause == Cause("learning rate", f"{text}, the peak, as without a schedule", "", "0.025")
    every = "every optimizer step is 2 times what it should be, as with 2 times the learning rate"
    assert twice.cause == (Cause("learning rate", text, "", "0.025") if chosen else Cause("learning rate", every))
    assert (unscheduled.fitted, twice.fitted) == (1, 1 if chosen else 3)
    follows(trial, unscheduled if constant else twice)


def test_steps_that_are_a_multiple_as_by_another_limit_of_the_norm_are_told_by_that() -> None:
    requested = replace(LOW, weight_decay=0.0)
    trial = trained_as(replace(requested, max_norm=0.5), requested=requested)
    assert "every optimizer step is 2 times" in str(causes(trial, "learning rate"))
    assert (
        diagnosis_text(trial)
        == """\
the gradient norm's limit is 0.5 in the optimizer, requested 0.25
  assuming this: 1 of 1 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here"""
    )


def test_an_optimizer_that_never_steps_is_told_as_that_and_not_as_zero_times() -> None:
    trial = trained_otherwise(FSDP_2, given=lambda *of: {})
    assert (
        diagnosis_text(trial)
        == """\
the optimizer does not move any parameter in step 1
  assuming this: 1 of 1 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here"""
    )


def test_what_one_parameter_does_on_one_rank_is_told_with_both() -> None:
    start = FSDP_2.start_of(0)[NORM]
    trial = with_value(FSDP_2, 0, 1, "parameters", NORM, lambda value: start + 3 * (value - start))
    text = "the learning rate of 1 of 12 parameters (norm.weight) on rank 0 is 0.075 in step 1"
    assert causes(trial, "learning rate") == [Cause("learning rate", text, "", "0.025")]
    for off in (1e-3, 1e-9):
        other = with_value(trial, 0, 1, "parameters", NORM, lambda value, off=off: value + off * np.arange(value.size))
        assert list(_rates_and_decays(other)) == []


def test_moves_that_are_no_multiple_or_several_are_told_of_no_rate() -> None:
    assert causes(FSDP_2, "learning rate") == []
    assert causes(moved_by(lambda step, fqn: (1.5 + ("norm" in fqn)) * RATES[step - 1]), "learning rate") == []
    for off, told in ((1e-4, 0), (1e-9, 0), (1e-13, 1)):
        twice = moved_by(lambda step, fqn: 3 * RATES[step - 1])
        bent = lambda value, off=off: value + off * np.arange(value.size).reshape(value.shape)  # noqa: E731
        assert len(causes(with_value(twice, 0, 1, "parameters", NORM, bent), "learning rate")) == told
    near = moved_by(lambda step, fqn: (3 + 1e-8 * ("norm" in fqn)) * RATES[step - 1])
    told = "every optimizer step is 3 times what it should be, as with 3 times the learning rate"
    assert [cause_line(cause) for cause in causes(near, "learning rate")] == [told]
    near = moved_by(lambda step, fqn: (3 + 1e-4 * ("norm" in fqn)) * RATES[step - 1])
    assert causes(near, "learning rate") == []


# ---- decay


def decaying(decay: Callable[[int, str], float], requested: TrainingConfig = LOW) -> Trial:
    trial = trial_of(tiny_case("fsdp_2", requested))
    return trained_otherwise(trial, recipe=lambda step, fqn: replace(requested, weight_decay=decay(step, fqn)))


MATRICES = replace(LOW, decay="matrices")
EVEN = replace(LOW, weight_decay=0.3)


@pytest.mark.parametrize(
    ("requested", "norms", "others", "text", "expected"),
    [
        (LOW, 0.3, 0.3, "weight decay is 0.3", "0.1"),
        (LOW, 0.0, 0.0, "weight decay is not applied", "0.1"),
        (LOW, 0.123456789, 0.123456789, "weight decay is 0.123457", "0.1"),
        (LOW, 0.3, 0.1, f"weight decay of {NORMS} is 0.3", "0.1"),
        (LOW, 0.0, 0.1, "weight decay is applied to matrices only", "all parameters"),
        (LOW, 2.0, 2.0, "weight decay is 2, the requested one divided by the learning rate", "0.1"),
        (LOW, 2.0, 0.1, f"weight decay of {NORMS} is 2, the requested one divided by the learning rate", "0.1"),
        (MATRICES, 0.1, 0.1, "weight decay is applied to norm weights as well", "matrices only"),
        (MATRICES, 0.3, 0.1, f"weight decay of {NORMS} is 0.3", "0"),
        (MATRICES, 0.0, 0.3, f"weight decay of {OTHERS} is 0.3", "0.1"),
        (MATRICES, 0.0, 0.0, f"weight decay is not applied to {OTHERS}", "0.1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_another_decay_is_told_with_what_has_it(
    requested: TrainingConfig, norms: float, others: float, text: str, expected: str, optimizer: str
) -> None:
    requested = replace(requested, optimizer=optimizer)
    trial = decaying(lambda step, fqn: norms if fqn.endswith("norm.weight") else others, requested)
    (one,) = (one for one in _rates_and_decays(trial) if one.cause.kind == "weight decay")
    assert one.cause == Cause("weight decay", text, "", expected)
    follows(trial, one)


@pytest.mark.parametrize(("chosen", "of"), [("", ""), ("norm", f" of {NORMS}")])
def test_a_decay_that_is_not_multiplied_by_the_rate_is_tried_as_that_and_as_another(chosen: str, of: str) -> None:
    trial = decaying(lambda step, fqn: 0.1 / RATES[step - 1] if chosen in fqn else 0.1)
    plain, other = (one for one in _rates_and_decays(trial) if one.cause.kind == "weight decay")
    assert plain.cause == Cause("weight decay", f"weight decay{of} is not multiplied by the learning rate")
    assert other.cause == Cause("weight decay", f"weight decay{of} is 4", "", "0.1")
    follows(trial, plain)


def test_what_takes_too_much_of_a_weight_or_is_no_multiple_of_it_is_no_decay() -> None:
    assert len(causes(decaying(lambda step, fqn: 7.9), "weight decay")) == 1  # of it, 0.1975
    assert causes(decaying(lambda step, fqn: 8.1), "weight decay") == []
    assert causes(decaying(lambda step, fqn: 0.3 + 0.1 * ("norm" in fqn)), "weight decay") == []
    for off, told in ((1e-4, 0), (1e-14, 1)):
        trial = decaying(lambda step, fqn: 0.0)
        for rank, evidence in trial.ranks.items():
            left = {
                fqn: v + off * np.arange(v.size).reshape(v.shape) for fqn, v in evidence.steps[0].parameters.items()
            }
            trial = with_step(trial, rank, 1, parameters=left)
        assert causes(trial, "weight decay") == [Cause("weight decay", "weight decay is not applied", "", "0.1")] * told


def test_weights_that_grow_where_they_should_decay_have_no_recipe() -> None:
    def growing(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm, LOW) * g - 0.2 * parameters[fqn] for fqn, g in gradients.items()}

    assert list(_rates_and_decays(trained_otherwise(FSDP_2, given=growing))) == []


def test_of_parameters_that_are_zero_or_a_rate_that_is_nothing_is_known_of_decay() -> None:
    trial = decaying(lambda step, fqn: 0.3)
    assert list(_rates_and_decays(with_first(trial, lr=0.0))) == []
    value = trial.start_of(0)[NORM]
    assert causes(with_parameter(trial, 0, NORM, value=0 * value), "weight decay") == []


# ---- none


def given(chosen: Callable[[int, str], bool], training: TrainingConfig = LOW) -> Callable[..., Arrays]:
    """To the optimizer: the gradients of these parameters in these steps."""
    return lambda step, gradients, norm, parameters: {
        fqn: clip(norm, training) * g for fqn, g in gradients.items() if chosen(step, fqn)
    }


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        (lambda step, fqn: False, "any parameter in step 1"),
        (lambda step, fqn: step != 2, "any parameter in step 2"),
        (lambda step, fqn: fqn != NORM, "1 of 12 parameters (norm.weight) in step 1"),
        (lambda step, fqn: "norm" not in fqn or step == 2, f"{NORMS} in step 1"),
        (lambda step, fqn: step < 3 and (step < 2 or fqn != NORM), "1 of 12 parameters (norm.weight) in step 2"),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_does_not_move_is_told_with_its_first_step(
    chosen: Callable[[int, str], bool], where: str, optimizer: str
) -> None:
    training = replace(LOW, optimizer=optimizer)
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", training)), given=given(chosen, training))
    (one,) = _not_stepped(trial)
    assert (one.cause, one.fitted) == (Cause("not stepped", f"the optimizer does not move {where}"), 1)
    follows(trial, one)
    assert first_line(trial) == cause_line(one.cause)


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "hsdp_2x2"])
@pytest.mark.parametrize(
    ("optimizer", "chosen", "where"),
    [
        ("sgd", lambda step, fqn: fqn != NORM, "1 of 12 parameters (norm.weight) on rank 1 in step 1"),
        ("adamw", lambda step, fqn: fqn != NORM, "1 of 12 parameters (norm.weight) on rank 1 in step 1"),
        ("sgd", lambda step, fqn: step != 2, "any parameter on rank 1 in step 2"),
        ("adamw", lambda step, fqn: step < 2, "any parameter on rank 1 in step 2"),
    ],
)
def test_what_one_rank_does_not_move_is_so_in_its_slices_alone(
    layout: str, optimizer: str, chosen: Callable[[int, str], bool], where: str
) -> None:
    training = replace(LOW, optimizer=optimizer)
    trial = trained_otherwise(trial_of(tiny_case(layout, training)), [1], given=given(chosen, training))
    (one,) = _not_stepped(trial)
    assert (one.cause, one.fitted) == (Cause("not stepped", f"the optimizer does not move {where}"), 1)
    follows(trial, one)
    told, proof, *_ = diagnosis_text(trial).splitlines()
    assert told == f"the optimizer does not move {where}" and "no passing check fails" in proof
    assert "not proven" not in proof


def still(trial: Trial) -> list[str]:
    return [text for text in proposed(wrong_optimizer, trial, "update") if "does not move" in text]


def test_what_need_not_move_is_not_told() -> None:
    """Without a rate, what ranks hold nothing of, and what nobody saw before."""
    assert still(FSDP_2) == []
    trial = trained_otherwise(FSDP_2, given=given(lambda step, fqn: step > 1))
    assert still(trial) == ["the optimizer does not move any parameter in step 1"]
    assert still(with_first(trial, lr=0.0)) == []
    empty = with_value(FSDP_2, 0, 1, "parameters", NORM, lambda value: value[:0])
    empty = with_value(empty, 0, 2, "parameters", NORM, lambda value: value[:0])
    assert still(empty) == []
    trial = trained_otherwise(FSDP_2, given=given(lambda step, fqn: step > 1 or fqn != NORM))
    unknown = [tuple(t for t in trial.ranks[rank].parameters if t.fqn != NORM) for rank in (0, 1)]
    for rank in (0, 1):
        trial = with_rank(trial, rank, parameters=unknown[rank])
    assert still(trial) == []


# ---- not finite


def seen(trial: Trial, *checks: str) -> Fact | None:
    return next(not_finite(trial, broken(*checks)), None)


ALL = ("loss", "gradients", "grad_norm", "replica_agreement", "update", "traffic")


def spoiled(value: float, step: int = 1, what: str = "parameters", ranks: Iterable[int] = (1,)) -> Trial:
    trial = FSDP_2
    for rank in ranks:
        trial = with_value(trial, rank, step, what, NORM, lambda array: array * value)
    return trial


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_no_numbers_after_the_first_step_explain_all_numbers(value: float) -> None:
    text = "parameters are NaN or infinite after step 1 in 1 of 12 parameters (norm.weight) on rank 1"
    cause = Cause("not finite", f"{text}, gradients were finite")
    assert seen(spoiled(value), *ALL) == Fact(cause, ALL[:-1])
    assert seen(spoiled(value), *ALL[:-2]) is None


def test_parameters_that_are_no_numbers_explain_updates_alone_where_something_was_wrong_before() -> None:
    assert (
        diagnosis_text(spoiled(np.nan))
        == """\
parameters are NaN or infinite after step 1 in 1 of 12 parameters (norm.weight) on rank 1, gradients were finite
  loss, gradients: equal to the reference exactly: a loss-curve test passes here"""
    )
    other = with_value(spoiled(np.nan), 0, 1, "gradients", NORM, lambda array: 2 * array)
    fact = seen(other, *ALL)
    assert fact is not None and fact.checks == ("update",)
    assert (
        diagnosis_text(other)
        == """\
parameters are NaN or infinite after step 1 in 1 of 12 parameters (norm.weight) on rank 1, gradients were finite
  not explained: gradients are wrong by up to 8e-01 of the largest entry in 1 of 12 parameters (norm.weight) on rank 0; \
the loss of step 1 matches within 1e-14
  gradients: rank 0, step 1, gradient of norm.weight: expected the reference's, observed off by 8.25e-01 of the largest entry \
(bound 2.5e-14)
  loss: equal to the reference exactly: a loss-curve test passes here"""
    )
    fact = seen(with_first(spoiled(np.nan), loss=1.0), *ALL)
    assert fact is not None and fact.checks == ("update",)


def test_of_parameters_that_are_no_numbers_gradients_before_or_steps_are_the_cause() -> None:
    assert seen(spoiled(np.nan, step=2), *ALL) is None
    assert seen(FSDP_2, *ALL) is None
    both = with_value(spoiled(np.nan), 0, 1, "gradients", NORM, lambda array: array * np.inf)
    assert seen(both, *ALL) is None
    assert seen(with_value(spoiled(np.nan), 0, 2, "gradients", NORM, lambda array: array * np.inf), *ALL) is not None
