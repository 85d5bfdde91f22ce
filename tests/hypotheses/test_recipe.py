"""Another recipe than the requested one: what is named, and that it is proven. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, broken, is_listed, proven, trained_as
from literal import ADAMW, SGD, tiny_case, trained_otherwise, trial_of, with_step, with_value
from literal_reference import clip
from resuming import resumed

from harness.core.causes import diagnose
from harness.core.causes.engine import explain
from harness.core.checks import judge
from harness.core.judge.result import Cause, Verdict
from harness.core.judge.trial import Trial
from harness.hypotheses.recipe import FIRST_STEP_CHOICES, wrong_recipe
from harness.reference.config import TrainingConfig

Arrays = dict[str, np.ndarray]
LOW = replace(SGD, max_norm=0.25)
LITTLE = replace(LOW_CLIP, max_norm=0.01)
RATES = (0.025, 0.05, 0.0375)  # of SGD


def named(trial: Trial) -> Cause:
    """The only cause, under which all failing checks pass."""
    results = judge(trial)
    found = diagnose(trial, results)
    assert found is not None and len(found.causes) == 1 and is_listed(found.kinds[0]), found
    failing = {result.check for result in results if result.verdict is Verdict.FAIL}
    assert found.kinds == ("not explained",) or {*found.causes[0].explains} == failing, found.causes[0]
    return found.causes[0]


def kind(trial: Trial) -> str:
    return named(trial).kind


def proposed(trial: Trial) -> dict[str, int]:
    """By kind, of how many choices the simplest is."""
    found = [(one.fitted_count, one.cause.kind) for one in wrong_recipe(trial, broken("update"))]
    return {kind: fitted for fitted, kind in sorted(found, reverse=True)}


def moved(rate: Callable[[int, str], float], layout: str = "fsdp_2", training: TrainingConfig = LOW) -> Trial:
    return trained_otherwise(trial_of(tiny_case(layout, training)), rate=rate)


def given(by: Callable[[int, str, Arrays, float], Any], training: TrainingConfig, layout: str = "fsdp_2") -> Trial:
    """The optimizer receives gradients times by(step, fqn, gradients, norm); not at all where that is None."""

    def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        made = {fqn: (by(step, fqn, gradients, norm), g) for fqn, g in gradients.items()}
        return {fqn: times * g for fqn, (times, g) in made.items() if times is not None}

    return trained_otherwise(trial_of(tiny_case(layout, training)), given=those)


# ---- fields


MATRICES, UNCLIPPED = replace(ADAMW, decay="matrices"), replace(ADAMW, max_norm=None)


@pytest.mark.slow("many of a kind; the first run in the same way", after=4)
@pytest.mark.parametrize(
    ("requested", "kind", "changes"),
    [
        (ADAMW, "weight decay", {"weight_decay": 0.0}),
        (SGD, "weight decay", {"weight_decay": 0.0}),
        (ADAMW, "weight decay", {"weight_decay": 0.01}),
        (ADAMW, "weight decay", {"weight_decay": 0.123456}),
        (replace(ADAMW, lr=0.03), "weight decay", {"weight_decay": 3.0}),
        (ADAMW, "weight decay", {"decay": "matrices"}),
        (MATRICES, "weight decay", {"decay": "all"}),
        (ADAMW, "beta1", {"beta1": 0.95}),
        (ADAMW, "beta2", {"beta2": 0.999}),
        (ADAMW, "eps", {"eps": 1e-5}),
        (LOW_CLIP, "max_norm", {"max_norm": 0.5}),
        (replace(LOW_CLIP, max_norm=0.3), "max_norm", {"max_norm": 0.6}),
        (UNCLIPPED, "max_norm", {"max_norm": 1.0}),
        (ADAMW, "beta1", {"beta1": 0.95, "beta2": 0.9}),
        (ADAMW, "beta2", {"beta2": 0.999, "weight_decay": 0.01}),
        (LOW_CLIP, "beta2", {"beta2": 0.99, "max_norm": 0.5}),
    ],
)
def test_fields_that_are_otherwise_are_named_with_their_values(
    requested: TrainingConfig, kind: str, changes: dict[str, Any]
) -> None:
    cause = named(trained_as(replace(requested, **changes), requested=requested))
    assert (cause.kind, dict(cause.details)) == (kind, changes)
    assert bool(cause.hint) == (changes == {"beta1": 0.95, "beta2": 0.9}), "swapped"
    assert not cause.where


def test_matrices_that_are_cut_as_vectors_decay_all_the_same() -> None:
    changed = trained_as(replace(MATRICES, beta2=0.999), requested=MATRICES, wrapper="fsdp1")
    assert dict(named(changed).details) == {"beta2": 0.999}
    spared = trained_as(MATRICES, requested=ADAMW, wrapper="fsdp1")
    assert dict(named(spared).details) == {"decay": "matrices"}


def test_of_two_fields_that_are_wrong_together_none_alone_is_proven() -> None:
    trial = trained_as(replace(ADAMW, beta1=0.95, beta2=0.999))
    assert proposed(trial) == {"beta1": 3}
    assert proposed(trained_as(replace(ADAMW, beta2=0.999))) == {"beta2": 2}


@pytest.mark.slow("many of a kind; the first run in the same way", after=2)
@pytest.mark.parametrize("factor", [1.5, 3.0, 1 / 3, 10.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_moves_that_are_a_multiple_are_named_by_the_rate(factor: float, optimizer: str) -> None:
    recipe = replace(LOW, optimizer=optimizer)
    cause = named(moved(lambda step, fqn: factor * RATES[step - 1], training=recipe))
    assert cause.kind == "learning rate" and dict(cause.details)["lr"] == pytest.approx(factor * recipe.lr)


@pytest.mark.parametrize(("chosen", "count"), [("norm", 3), ("output", 1), ("attention.w", 4)])
def test_parameters_with_another_rate_or_decay_are_named(chosen: str, count: int) -> None:
    cause = named(moved(lambda step, fqn: (1.5 if chosen in fqn else 1.0) * RATES[step - 1]))
    assert (cause.kind, len(cause.parameters)) == ("learning rate", count) and f"{count} of 12" in cause.where
    trial = trial_of(tiny_case("fsdp_2", LOW))
    spared = trained_otherwise(trial, recipe=lambda step, fqn: replace(LOW, weight_decay=0.3 if chosen in fqn else 0.1))
    cause = named(spared)
    assert (cause.kind, dict(cause.details)) == ("weight decay", {"weight_decay": 0.3})
    assert f"{count} of 12" in cause.where


@pytest.mark.slow("every field is tried; test_fields_that_are_otherwise_are_named_with_their_values tries them")
def test_a_number_that_nobody_uses_and_noise_are_explained_by_nothing() -> None:
    assert kind(trained_as(replace(ADAMW, beta1=0.876))) == "not explained"
    draw = np.random.default_rng(1)

    def left(step: int, parameters: Arrays) -> Arrays:
        return {fqn: p + 1e-3 * draw.standard_normal(p.shape) for fqn, p in parameters.items()}

    for layout in ("ddp_2", "fsdp_2", "fsdp_2_tp_2"):
        for recipe in (ADAMW, LOW, LOW_CLIP):
            trial = trained_otherwise(trial_of(tiny_case(layout, recipe)), left=left)
            assert [*wrong_recipe(trial, broken("update"))] == []
    one = with_value(trial_of(tiny_case("fsdp_2")), 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    assert explain(one, judge(one), (wrong_recipe,), ()).unexplained == ("update",)


def test_what_takes_too_much_of_a_weight_is_no_decay() -> None:
    def decaying(by: float) -> Trial:
        return trained_as(replace(LOW, weight_decay=by), requested=LOW)

    assert "weight decay" in proposed(decaying(7.9)) and "weight decay" not in proposed(decaying(8.1))


def test_a_number_that_explains_the_first_step_alone_costs_more() -> None:
    trial = trained_as(replace(ADAMW, eps=1e-3))
    for rank in (0, 1):
        last = trial.ranks[rank].steps[2].parameters
        trial = with_step(trial, rank, 3, parameters={fqn: value + 0.01 for fqn, value in last.items()})
    assert proposed(trial) == {"eps": 2 + FIRST_STEP_CHOICES}
    assert proposed(trial_of(tiny_case("fsdp_2"))) == {}


def test_a_launch_that_resumes_is_judged_from_its_first_step_on() -> None:
    trial = resumed(training=LOW_CLIP)
    for rank, evidence in trial.ranks.items():
        held, (last,) = evidence.resumed, evidence.steps
        assert held is not None
        left, state, rate = {}, {}, trial.reference.steps[2].lr
        for fqn, gradient in last.gradients.items():
            before = {key: held.optimizer_state[fqn][key] for key in ("exp_avg", "exp_avg_sq")}
            g = clip(trial.reference.steps[2].grad_norm, LOW_CLIP) * gradient
            first, second = 0.9 * before["exp_avg"] + 0.1 * g, 0.99 * before["exp_avg_sq"] + 0.01 * g**2
            step = rate * first / (1 - 0.9**3) / (np.sqrt(second / (1 - 0.99**3)) + ADAMW.eps)
            left[fqn] = held.parameters[fqn] * (1 - rate * ADAMW.weight_decay) - step
            state[fqn] = {"exp_avg": first, "exp_avg_sq": second}
        trial = with_step(trial, rank, 3, parameters=left, optimizer_state=state)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("beta2", {"beta2": 0.99})


# ---- algorithms


def test_a_decay_that_is_not_multiplied_by_the_rate() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW))
    recipe = lambda step, fqn: replace(LOW, weight_decay=0.1 / RATES[step - 1])  # noqa: E731
    assert kind(trained_otherwise(trial, recipe=recipe)) == "weight decay"


def test_rates_of_some_parameters_in_some_steps() -> None:
    trial, other = trial_of(tiny_case("fsdp_2", LOW)), {2: 0.55, 3: 0.3}

    def rate(step: int, fqn: str) -> float:
        return RATES[step - 1] * (other.get(step, 1.0) if fqn == NORM else 1.0)

    cause = named(trained_otherwise(trial, rate=rate))
    assert (cause.kind, NORM in cause.where) == ("learning rate", True)
    assert dict(cause.details) == {"factors": ((2, 0.55), (3, 0.3))}


def test_weights_that_are_decayed_twice() -> None:
    def recipe(step: int, fqn: str) -> TrainingConfig:
        twice = 1 - (1 - RATES[step - 1] * LOW.weight_decay) ** 2
        return replace(LOW, weight_decay=twice / RATES[step - 1]) if fqn == NORM else LOW

    cause = named(trained_otherwise(trial_of(tiny_case("fsdp_2", LOW)), recipe=recipe))
    assert (cause.kind, NORM in cause.where, cause.details) == ("weight decay", True, ())


@pytest.mark.slow("many of a kind; the first run in the same way", after=1)
@pytest.mark.parametrize("requested", [ADAMW, MATRICES])
def test_weight_decay_in_the_gradients_is_told_from_another_weight_decay(requested: TrainingConfig) -> None:
    trial = trial_of(tiny_case("fsdp_2", requested))

    def adding(decay: float) -> Trial:
        def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
            own = {fqn: decay * (requested is ADAMW or "norm" not in fqn) for fqn in gradients}
            return {fqn: clip(norm, ADAMW) * g + own[fqn] * parameters[fqn] for fqn, g in gradients.items()}

        return trained_otherwise(trial, given=those, recipe=lambda step, fqn: replace(requested, weight_decay=0.0))

    assert kind(adding(0.1)) == "weight decay in the gradients"
    assert kind(adding(0.05)) == "not explained"


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_that_was_not_requested(nesterov: bool) -> None:
    held: Arrays = {}

    def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        decayed = {fqn: clip(norm, SGD) * g + SGD.weight_decay * parameters[fqn] for fqn, g in gradients.items()}
        held.update({fqn: 0.9 * held.get(fqn, 0.0) + g for fqn, g in decayed.items()})
        return {fqn: g + 0.9 * held[fqn] if nesterov else held[fqn] for fqn, g in decayed.items()}

    undecayed = replace(SGD, weight_decay=0.0)
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", SGD)), given=those, recipe=lambda step, fqn: undecayed)
    for rank, step, _ in list(trial.steps_with_reference()):
        kept = step.memory | {"optimizer_state": step.memory["parameters"]}
        trial = with_step(trial, rank, step.step, memory=kept)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("momentum", {"momentum": 0.9, "nesterov": nesterov})


def test_an_optimizer_that_is_a_step_late() -> None:
    held: Arrays = {}

    def late(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        before = {fqn: held.get(fqn, 0 * g) for fqn, g in gradients.items()}
        held.update({fqn: clip(norm, ADAMW) * g for fqn, g in gradients.items()})
        return before

    assert kind(trained_otherwise(trial_of(tiny_case("fsdp_2")), given=late)) == "one step late"


@pytest.mark.parametrize("details", [{}, {"counter": "begins 1 too high"}, {"counter": "counts microbatches"}])
def test_averages_that_are_not_corrected_or_by_another_counter(details: dict[str, str]) -> None:
    trial = trial_of(tiny_case("fsdp_2", accumulation=2))
    rates = [step.lr for step in trial.reference.steps]
    counter = {"begins 1 too high": lambda step: step + 1, "counts microbatches": lambda step: 2 * step}
    count = counter.get(details.get("counter", ""), lambda step: 10**9)
    for rank, evidence in trial.ranks.items():
        value, first, second = {t.fqn: t.value for t in evidence.parameters}, Arrays(), Arrays()
        for step in evidence.steps:
            by, rate = clip(trial.reference.steps[step.step - 1].grad_norm, ADAMW), rates[step.step - 1]
            one, other = (1 - beta ** count(step.step) for beta in (0.9, 0.95))
            for fqn, g in step.gradients.items():
                first[fqn] = 0.9 * first.get(fqn, 0.0) + 0.1 * by * g
                second[fqn] = 0.95 * second.get(fqn, 0.0) + 0.05 * (by * g) ** 2
                moved = first[fqn] / one / (np.sqrt(second[fqn] / other) + ADAMW.eps)
                value[fqn] = value[fqn] * (1 - 0.1 * rate) - rate * moved
            kept = {fqn: {"exp_avg": first[fqn], "exp_avg_sq": second[fqn]} for fqn in first} if step.step == 3 else {}
            trial = with_step(trial, rank, step.step, parameters=dict(value), optimizer_state=kept)
    assert proven(trial) == ("bias correction", details)


def test_amsgrad_is_blamed_only_where_updates_are_wrong() -> None:
    def keeping(trial: Trial) -> Trial:
        state = trial.ranks[0].steps[2].optimizer_state
        kept = {fqn: arrays | {"max_exp_avg_sq": arrays["exp_avg_sq"]} for fqn, arrays in state.items()}
        return with_step(trial, 0, 3, optimizer_state=kept)

    right = trial_of(tiny_case("fsdp_2"))
    wrong = with_value(right, 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    assert kind(keeping(wrong)) == "not explained"
    assert proposed(keeping(wrong)) == {"amsgrad": 1} and proposed(wrong) == {}
    assert diagnose(keeping(right), judge(keeping(right))) is None
