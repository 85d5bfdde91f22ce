"""Which schedule gives the learning rates that were seen, in place of a warm-up of 4 steps and a cosine over 10."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from diagnosed import diagnosis_text, first_line
from literal import ADAMW, tiny_case, trained_otherwise, trial_of, with_step

from harness.diagnosis.optimizer import _rates_of_ranks, _rules, schedule_of

WARMUP, STEPS, LAST, PEAK = 4, 10, 0.2, 0.01
TEN_STEPS = replace(ADAMW, lr=PEAK, steps=STEPS, warmup_steps=WARMUP, final_lr_fraction=LAST)
TRIAL = trial_of(tiny_case("single"))
TRIAL = replace(TRIAL, case=replace(TRIAL.case, training=TEN_STEPS))


def cosine(done: float, last: float = LAST) -> float:
    return last + (1 - last) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def requested(step: int, warmup: int = WARMUP, steps: int = STEPS, last: float = LAST) -> float:
    return step / warmup if 0 < warmup >= step else cosine((step - warmup) / (steps - warmup), last)


def after_the_warm_up(step: int, then: float) -> float:
    return step / WARMUP if step <= WARMUP else then


RULES: dict[str, Callable[[int], float]] = {
    "every step takes the rate of the step before": lambda step: requested(step - 1),
    "every step takes the rate of the next step": lambda step: requested(step + 1),
    "each step advances the schedule by 2": lambda step: requested(2 * step - 1),
    "each step advances the schedule by 5": lambda step: requested(5 * step - 4),
    "each step advances the schedule by 8": lambda step: requested(8 * step - 7),
    "each step from step 2 on takes the rate of the step before": lambda step: requested(step - (step >= 2)),
    "each step from step 9 on takes the rate of the step before": lambda step: requested(step - (step >= 9)),
    "as without a schedule": lambda step: 1.0,
    "constant after the warm-up": lambda step: after_the_warm_up(step, 1.0),
    "linear decay after the warm-up, not cosine": lambda step: after_the_warm_up(
        step, 1 - (1 - LAST) * (step - WARMUP) / (STEPS - WARMUP)
    ),
    "the cosine counts the steps of the warm-up as well": lambda step: after_the_warm_up(step, cosine(step / STEPS)),
    "the cosine takes all steps of the run, starting after the warm-up": lambda step: after_the_warm_up(
        step, cosine((step - WARMUP) / STEPS)
    ),
    "the cosine also multiplies the warm-up": lambda step: min(1.0, step / WARMUP) * cosine(step / STEPS),
    "as with warmup_steps 0, not 4": lambda step: requested(step, warmup=0),
    "as with warmup_steps 3, not 4": lambda step: requested(step, warmup=3),
    "as with warmup_steps 5, not 4": lambda step: requested(step, warmup=5),
    "as with warmup_steps 8, not 4": lambda step: requested(step, warmup=8),
    "as with warmup_steps 2, not 4": lambda step: requested(step, warmup=2),
    "as with final_lr_fraction 0, not 0.2": lambda step: requested(step, last=0.0),
    "as with final_lr_fraction 0.01, not 0.2": lambda step: requested(step, last=0.01),
    "as with final_lr_fraction 0.1, not 0.2": lambda step: requested(step, last=0.1),
    "as with final_lr_fraction 0.5, not 0.2": lambda step: requested(step, last=0.5),
    "as with steps 9, not 10": lambda step: requested(step, steps=9),
    "as with steps 11, not 10": lambda step: requested(step, steps=11),
    "as with steps 20, not 10": lambda step: requested(step, steps=20),
    "as with steps 5, not 10": lambda step: requested(step, steps=5),
    "as with lr 0.001, not 0.01": lambda step: 0.1 * requested(step),
    "as with lr 0.005, not 0.01": lambda step: 0.5 * requested(step),
    "as with lr 0.02, not 0.01": lambda step: 2.0 * requested(step),
    "as with lr 0.1, not 0.01": lambda step: 10.0 * requested(step),
}


def named(rates: dict[int, float]) -> str:
    """Rank 0 has these rates, rank 1 the right ones."""
    shown = {(0, step): rate for step, rate in rates.items()}
    wrong = {at: lr for at, lr in shown.items() if not math.isclose(lr, PEAK * requested(at[1]), rel_tol=1e-9)}
    return schedule_of(TRIAL, wrong, shown | {(1, step): PEAK * requested(step) for step in rates})


@pytest.mark.parametrize("rule", RULES)
def test_a_schedule_is_named_by_the_rates_that_it_gives(rule: str) -> None:
    assert named({step: PEAK * RULES[rule](step) for step in range(1, STEPS + 1)}) == rule


def test_without_a_warm_up_a_step_late_begins_with_the_peak() -> None:
    training = replace(TEN_STEPS, warmup_steps=0)
    late = {(0, step): PEAK * requested(step - 1, warmup=0) for step in range(1, STEPS + 1)}
    told = "every step takes the rate of the step before"
    assert schedule_of(replace(TRIAL, case=replace(TRIAL.case, training=training)), late, late) == told


FRACTIONS = [
    "as with final_lr_fraction 0.01, not 0",
    "as with final_lr_fraction 0.1, not 0",
    "as with final_lr_fraction 0.5, not 0",
]
SHORT = ["as with steps 1, not 2", "as with steps 3, not 2", "as with steps 4, not 2", "as with steps 1, not 2"]
RATES = [f"as with lr {rate:g}, not 1" for rate in (0.1, 0.5, 2, 10)]


@pytest.mark.parametrize(
    ("warmup", "numbers"),
    [(0, (1,)), (1, (0, 0, 2, 2, 0)), (2, (0, 1, 3, 4, 1))],
)
def test_rules_are_tried_in_this_order(warmup: int, numbers: tuple[int, ...]) -> None:
    """Without one of a number that is below zero, or as it was requested."""
    training = replace(ADAMW, lr=1.0, steps=2, warmup_steps=warmup, final_lr_fraction=0.0)
    assert [text for text, _ in _rules(training)] == [
        "every step takes the rate of the step before",
        "every step takes the rate of the next step",
        *(f"each step advances the schedule by {by}" for by in range(2, 9)),
        "as without a schedule",
        "constant after the warm-up",
        "linear decay after the warm-up, not cosine",
        "the cosine counts the steps of the warm-up as well",
        "the cosine takes all steps of the run, starting after the warm-up",
        "the cosine also multiplies the warm-up",
        *(f"as with warmup_steps {number}, not {warmup}" for number in numbers),
        *FRACTIONS,
        *SHORT,
        *RATES,
    ]


def test_where_every_step_has_a_rate_of_its_own_no_rule_is_tried() -> None:
    assert [*_rules(replace(ADAMW, steps=2, rates=(0.1, 0.2)))] == []


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_cosine_that_multiplies_a_short_warm_up_as_well(warmup: int) -> None:
    rules = dict(_rules(replace(TEN_STEPS, warmup_steps=warmup)))
    for step in range(1, STEPS + 1):
        taken = rules["the cosine also multiplies the warm-up"](step)
        assert taken == pytest.approx(PEAK * cosine(step / STEPS), rel=1e-12)


def test_of_rules_that_give_the_same_all_are_told_and_the_least_that_a_step_may_advance_by() -> None:
    short = replace(TEN_STEPS, steps=3, warmup_steps=1)
    trial = replace(TRIAL, case=replace(TRIAL.case, training=short))
    shown = {(0, 1): PEAK, (0, 2): LAST * PEAK, (0, 3): LAST * PEAK}
    told = "each step advances the schedule by 2, or as with steps 2, not 3, or as with steps 1, not 3"
    assert schedule_of(trial, {(0, 2): LAST * PEAK}, shown) == told


def test_rates_of_no_schedule_are_not_named() -> None:
    assert named({step: PEAK / (2 * step + 3) for step in range(1, STEPS + 1)}) == ""
    assert named({1: PEAK, 2: PEAK}) == "as without a schedule"
    assert named({1: PEAK, 2: PEAK * (1 + 1e-6)}) == ""


def test_a_schedule_gives_the_rates_that_are_right_as_well() -> None:
    assert named({1: PEAK, 2: PEAK, 3: PEAK / 2}) == ""
    assert named({1: PEAK / 4, 2: PEAK / 2, 5: PEAK, 6: PEAK}) == "constant after the warm-up"


def test_one_wrong_rate_is_a_schedules_only_between_right_ones() -> None:
    short = replace(TEN_STEPS, steps=3, warmup_steps=2, final_lr_fraction=0.1)
    trial = replace(TRIAL, case=replace(TRIAL.case, training=short))
    shown = {(0, 1): PEAK / 2, (0, 2): PEAK / 10, (0, 3): PEAK / 10}
    assert schedule_of(trial, {(0, 2): PEAK / 10}, shown) == "each step advances the schedule by 2"
    flat = replace(trial, case=replace(TRIAL.case, training=replace(short, final_lr_fraction=1.0)))
    assert schedule_of(flat, {(0, 1): PEAK}, dict.fromkeys(((0, 1), (0, 2), (0, 3)), PEAK)) == ""
    assert named({1: PEAK}) == ""
    assert named({1: PEAK / 4, 2: PEAK / 4}) == ""


def test_ranks_that_hold_slices_of_one_model_and_take_other_rates_are_proven_slice_by_slice() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rates = {step.step: 2 * step.lr for step in trial.reference.steps}
    trial = trained_otherwise(trial, [1], rate=lambda step, fqn: rates[step])
    for step, rate in rates.items():
        trial = with_step(trial, 1, step, lr=rate, reported_lr=rate)
    told, proof = diagnosis_text(trial).splitlines()[:2]
    assert told == "learning rate of step 1 on rank 1 is 0.01 (the schedule's of step 2), requested 0.005"
    assert "2 of 2 failing checks pass" in proof


def test_of_ranks_that_take_the_same_rates_nothing_but_these_is_assumed() -> None:
    """So that it can be assumed beside gradients that are given otherwise."""
    trial = trial_of(tiny_case("fsdp_2"))
    assert [*_rates_of_ranks(trial, lambda rank, step, fqn: 0.1 * step, [0, 1])] == ["rate"]
    for differ in (
        lambda rank, step, fqn: 0.1 * (1 + rank),
        lambda rank, step, fqn: 0.1 * (1 + rank * (step == 3)),
        lambda rank, step, fqn: 0.1 * (1 + rank * (fqn == "norm.weight")),
    ):
        assert [*_rates_of_ranks(trial, differ, [0, 1])] == ["rate", "given", "left"]


def test_a_weight_decay_that_is_not_multiplied_by_the_rate_is_told_from_a_larger_one() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rates = {step.step: step.lr for step in trial.reference.steps}
    decay = trial.case.training.weight_decay

    def told(by_step: Callable[[int], float]) -> str:
        recipe = lambda step, fqn: replace(trial.case.training, weight_decay=by_step(step))  # noqa: E731
        return first_line(trained_otherwise(trial, recipe=recipe))

    assert told(lambda step: decay / rates[step]) == "weight decay is not multiplied by the learning rate"
    assert told(lambda step: 3 * decay) == f"weight decay is {3 * decay:g}, requested {decay:g}"
