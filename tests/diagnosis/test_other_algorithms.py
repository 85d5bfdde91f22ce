"""Which optimizers are supposed, and what each makes of gradients: by hand, of a few numbers. No ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import trained_as
from literal import ADAMW, SGD, TINY, tiny_case, trial_of, with_step
from resuming import resumed

from harness.diagnosis.algorithms import (
    BETAS,
    EPSILONS,
    _changed,
    _changes,
    _given,
    _of_adamw,
    _of_sgd,
    _one_step_late,
    _with_few_parameters,
    by_recipes,
    kinds_of_parameters,
    other_algorithms,
    other_numbers,
)
from harness.evidence.records import Resumed
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig

NORM = "norm.weight"
CLIPPED = replace(SGD, weight_decay=0.5, max_norm=1.0)


def of(number: float) -> dict[str, np.ndarray]:
    return {NORM: np.array([number])}


# ---- what is given to the optimizer


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_adds_decayed_and_clipped_gradients_up(nesterov: bool) -> None:
    trial = trial_of(tiny_case("single", CLIPPED))
    cause = Cause("momentum", "x")
    found = _given(trial, cause, 0.5, nesterov=nesterov, copies=1)
    assert (found.cause, found.assumed.copies) == (cause, 1)
    whole = found.trained["given"]
    first, second = 3.0 / (2.0 + 1e-6) + 0.5 * 10, 1.0 + 0.5 * 20
    sums = [first, 0.5 * first + second]
    wanted = [first + 0.5 * sums[0], second + 0.5 * sums[1]] if nesterov else sums
    told = [whole(1, of(3.0), 2.0, of(10.0)), whole(2, of(1.0), 0.5, of(20.0))]
    assert [each[NORM][0] for each in told] == pytest.approx(wanted, rel=1e-14)
    for recipe in (found.assumed.recipe, found.trained["recipe"]):
        assert recipe is not None and recipe(2, NORM) == replace(CLIPPED, weight_decay=0.0)


def test_decay_that_is_added_to_gradients_is_of_what_there_was_before_each_step() -> None:
    trial = trial_of(tiny_case("single", CLIPPED))
    found = _given(trial, Cause("x", "x"), 0.0)
    assert found.assumed.copies == 0 and found.assumed.given is not None
    start = trial.ranks[0].parameters[[t.fqn for t in trial.ranks[0].parameters].index(NORM)].value
    steps = trial.ranks[0].steps
    for number, before in ((1, start), (2, steps[0].parameters[NORM]), (3, steps[1].parameters[NORM])):
        step = steps[number - 1]
        wanted = step.gradients[NORM] * min(1.0, 1.0 / (step.grad_norm + 1e-6)) + 0.5 * before
        assert found.assumed.given(0, number, NORM, step.gradients[NORM]) == pytest.approx(wanted, rel=1e-12)


def test_an_optimizer_that_is_one_step_late_begins_with_nothing() -> None:
    trial = trial_of(tiny_case("single", CLIPPED))
    found = _one_step_late(trial)
    whole, given, steps = found.trained["given"], found.assumed.given, trial.ranks[0].steps
    told = [whole(1, of(3.0), 2.0, {}), whole(2, of(1.0), 0.5, {}), whole(3, of(7.0), 7.0, {})]
    assert [each[NORM][0] for each in told] == pytest.approx([0.0, 3.0 / (2.0 + 1e-6), 1.0], rel=1e-14)
    assert given is not None
    before = steps[0].gradients[NORM] * min(1.0, 1.0 / (steps[0].grad_norm + 1e-6))
    assert given(0, 1, NORM, steps[0].gradients[NORM]) == pytest.approx(0 * before)
    assert given(0, 2, NORM, steps[1].gradients[NORM]) == pytest.approx(before, rel=1e-12)


# ---- which are supposed

L2 = Cause(
    "weight decay in the gradients",
    "weight decay is added to the gradients (L2, as Adam does)",
    "",
    "decoupled (AdamW)",
)
UNCORRECTED = Cause("bias correction", "bias correction of the averages is missing", "", "Adam's")
LARGEST = Cause(
    "amsgrad", "the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by it)", "", "AdamW without it"
)


def with_largest(trial: Trial) -> Trial:
    """It keeps what AMSGrad keeps."""
    state = trial.ranks[0].steps[-1].optimizer_state
    kept = {fqn: {**of, "max_exp_avg_sq": of["exp_avg_sq"]} for fqn, of in state.items()}
    return with_step(trial, 0, 3, optimizer_state=kept)


def test_what_adamw_may_be_by_mistake_follows_from_the_recipe_and_from_what_it_keeps() -> None:
    trial = trial_of(tiny_case("single"))
    assert [one.cause for one in _of_adamw(trial)] == [L2, UNCORRECTED]
    assert [one.cause for one in _of_adamw(with_largest(trial))] == [LARGEST, L2, UNCORRECTED]
    plain = trial_of(tiny_case("single", replace(ADAMW, weight_decay=0.0)))
    assert [one.cause for one in _of_adamw(plain)] == [UNCORRECTED]


def test_averages_that_are_not_corrected_are_those_of_a_step_that_is_very_late() -> None:
    trial = trial_of(tiny_case("single"))
    *_, found = _of_adamw(trial)
    assert found.assumed.counter is not None and found.assumed.counter(3, NORM) == 10**9 + 3
    state, shapes = found.trained["state"], trial.plan.shapes
    assert state(2) is None and state(1).keys() == shapes.keys()
    for fqn, shape in shapes.items():
        step, *averages = (state(1)[fqn][name] for name in ("step", "exp_avg", "exp_avg_sq"))
        assert step == 1e9 and [(each.shape, each.any()) for each in averages] == [(shape, False)] * 2


def test_amsgrad_is_supposed_where_its_state_is_kept_and_costs_one_choice() -> None:
    trial = with_largest(trial_of(tiny_case("single")))
    first = next(other_algorithms(trial))
    assert (first.cause, first.fitted) == (LARGEST, 1)
    assert first.assume.keywords == {"assumed": AssumedOptimizer(amsgrad=True, copies=1), "amsgrad": True}


def test_sgd_may_have_momentum_and_keeps_one_number_more_then() -> None:
    found = list(_of_sgd(trial_of(tiny_case("single", SGD))))
    assert [one.cause for one in found[:4]] == [
        Cause("momentum", "SGD has momentum 0.9", "", "none"),
        Cause("momentum", "SGD has Nesterov momentum 0.9", "", "none"),
        Cause("momentum", "SGD has momentum 0.95", "", "none"),
        Cause("momentum", "SGD has Nesterov momentum 0.95", "", "none"),
    ]
    assert [one.cause.observed.split()[-1] for one in found[::2]] == ["0.9", "0.95", "0.99", "0.8", "0.5"]
    assert {one.assumed.copies for one in found} == {1}


def test_numbers_of_a_recipe_are_tried_alone_and_those_of_adamw_in_pairs() -> None:
    clipped = list(_changes(replace(SGD, max_norm=4.0)))
    assert clipped == [{"max_norm": limit} for limit in (1.0, 0.1, 0.5, 2.0, 5.0, 10.0, 8.0)]
    assert list(_changes(replace(SGD, max_norm=None))) == []
    assert list(_changes(replace(SGD, max_norm=8.0)))[-2:] == [{"max_norm": 16.0}, {"max_norm": 4.0}]
    both = list(_changes(replace(ADAMW, max_norm=4.0)))
    assert [name for name, _ in itertools.groupby(next(iter(one)) for one in both)] == [
        *("beta1", "beta2", "eps", "max_norm", "beta1")
    ]
    plain = replace(ADAMW, max_norm=None)
    beta1, beta2, eps = plain.beta1, plain.beta2, plain.eps
    assert list(_changes(plain)) == [
        *({"beta1": value} for value in BETAS if value != beta1),
        *({"beta2": value} for value in BETAS if value != beta2),
        *({"eps": value} for value in EPSILONS if value != eps),
        {"beta1": 0.95, "beta2": 0.9},
        {"beta1": 0.95, "beta2": 0.99},
        {"beta1": 0.95, "beta2": 0.999},
    ]


def test_two_numbers_that_are_exchanged_are_told_so_and_others_are_not() -> None:
    assert _changed(ADAMW, {"beta1": 0.95, "beta2": 0.9}) == Cause(
        "beta1", "beta1 is 0.95 and beta2 is 0.9 in the optimizer", "", "0.9 and 0.95", "the two are swapped"
    )
    assert _changed(replace(ADAMW, max_norm=0.3), {"max_norm": 0.6}) == Cause(
        "max_norm", "the gradient norm's limit is 0.6 in the optimizer", "", "0.3", ""
    )


def test_a_number_that_explains_the_first_step_alone_costs_two_choices_more() -> None:
    def supposed(trial: Trial) -> dict[str, int]:
        last = trial.ranks[0].steps[2].parameters
        trial = with_step(trial, 0, 3, parameters={fqn: value + 0.01 for fqn, value in last.items()})
        return {one.cause.observed: one.fitted for one in other_numbers(trial)}

    assert supposed(trained_as(replace(ADAMW, eps=1e-3))) == {"eps is 0.001 in the optimizer": 4}
    assert supposed(trial_of(tiny_case("fsdp_2"))) == {}


def test_a_launch_that_resumes_is_not_supposed_to_be_late_or_without_correction() -> None:
    trial = resumed()
    assert [one.cause for one in _of_adamw(trial)] == [L2]
    first = trial.ranks[0].steps[0]
    given = next(_of_adamw(trial)).assumed.given
    assert given is not None and not np.array_equal(given(0, 3, NORM, first.gradients[NORM]), first.gradients[NORM])
    assert list(other_algorithms(trial)) == []


def test_decay_as_adam_adds_it_has_no_memory() -> None:
    trial = trial_of(tiny_case("single", replace(ADAMW, weight_decay=0.5, max_norm=None)))
    whole = next(_of_adamw(trial)).trained["given"]
    assert [whole(step, of(3.0), 2.0, of(10.0))[NORM][0] for step in (1, 2)] == [8.0, 8.0]


def test_other_recipes_are_assumed_of_ranks_and_of_the_reference_from_this_launch_on() -> None:
    trial = resumed()

    def recipe(step: int, fqn: str) -> TrainingConfig:
        return ADAMW

    assumed = by_recipes(recipe, trial)
    assert assumed.assumption.optimizer == AssumedOptimizer(recipe=recipe)
    assert assumed.assumption.reference == {"recipe": recipe, "since": 3}


# ---- of which parameters


def test_kinds_of_parameters_are_those_that_an_optimizer_has_groups_for() -> None:
    names = set(trial_of(tiny_case("single")).plan.shapes)
    norms = {NORM, "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"}
    assert kinds_of_parameters(trial_of(tiny_case("single"))) == {
        "norm weights": norms,
        "matrices": names - norms,
        "embedding and output": {"tok_embeddings.weight", "output.weight"},
    }


def test_hypotheses_are_tried_on_one_parameter_of_each_kind() -> None:
    trial = trial_of(tiny_case("single", model=replace(TINY, n_layers=2)))
    wanted = {
        "tok_embeddings.weight",
        "layers.0.attention.wq.weight",
        "layers.0.attention_norm.weight",
        "layers.0.ffn_norm.weight",
        NORM,
        "output.weight",
    }
    few = _with_few_parameters(trial.ranks[0])
    assert {tensor.fqn for tensor in few.parameters} == wanted and few.resumed is None
    held = {tensor.fqn: tensor.value for tensor in trial.ranks[0].parameters}
    assert len(held) > len(wanted)
    resumed = Resumed(parameters=held, optimizer_state={})
    again = _with_few_parameters(replace(trial.ranks[0], resumed=resumed)).resumed
    assert again == replace(resumed, parameters={fqn: held[fqn] for fqn in held if fqn in wanted})
