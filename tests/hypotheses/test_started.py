"""Training that starts, or goes on, from something else: which weights these are, on which ranks, and what follows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caused import cause_of, causes_of, data_of
from diagnosed import NORM, broken, fsdp_4
from literal import (
    SGD,
    last_bit,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_value,
)
from resuming import TP_2, WEIGHT, everywhere, resumed, with_resumed
from trained import RECIPE, Ran, _ran, case_of, reference  # noqa: F401

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.hypothesis import Hypothesis
from harness.core.checks import judge
from harness.core.evidence.records import HeldTensor
from harness.core.judge.contents import view_of_slice
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.hypotheses.resumed import resumed_otherwise
from harness.hypotheses.started import changed_weights, observed_weights, other_weights
from harness.reference.train import train

WQ, WO = "layers.0.attention.wq.weight", "layers.0.attention.wo.weight"
W1, W3 = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"
Held = dict[str, Any]
Change = Callable[[np.ndarray], np.ndarray]


def random(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def through(dtype: type, value: np.ndarray) -> np.ndarray:
    return value.astype(dtype).astype(np.float64)


# ---- initial weights


def starting(trial: Trial, changes: dict[str, Change], ranks: tuple[int, ...] = ()) -> Trial:
    """Each of these ranks (all) has its slice of these parameters, changed whole."""
    for rank in ranks or trial.ranks:
        for fqn in changes.keys() & trial.plan.slices[rank].keys():
            part = trial.plan.slices[rank][fqn]
            trial = with_parameter(
                trial, rank, fqn, value=view_of_slice(changes[fqn](trial.reference.weights[fqn]), part).copy()
            )
    return trial


def every(trial: Trial, change: Change) -> dict[str, Change]:
    return dict.fromkeys(trial.plan.shapes, change)


FSDP, FOUR = trial_of(tiny_case("fsdp_2")), fsdp_4()


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize(
    ("changes", "are"),
    [
        (every(FSDP, lambda value: value + 1), ""),
        (dict.fromkeys((WQ, W1), lambda value: through(np.float32, value)), "rounded to float32"),
        ({WO: lambda value: 2**0.5 * value, W1: lambda value: 2**0.5 * value}, "1.41421 times the right ones"),
        ({NORM: lambda value: 0 * value + 1}, "all 1"),
        ({WO: lambda value: FSDP.reference.weights[WQ]}, WQ),
        ({WQ: lambda value: value.T}, "transposed"),
        ({W1: lambda value: random(value.shape)}, ""),
        ({W1: last_bit}, ""),
    ],
)
def test_what_ranks_start_from_instead_of_the_seeds_weights(changes: dict[str, Change], are: str) -> None:
    whole = trial_of(tiny_case("ddp_2"))
    for trial in (starting(FSDP, changes), starting(whole, changes)):
        kind, seen = data_of(cause_of(trial), "are")
        assert kind == "other initial weights"
        assert trial.case != whole.case or (seen.endswith(are) if are else seen == "")


def test_weights_of_another_seed_explain_all_numbers(ran: Ran) -> None:
    other = train(case_of().model, replace(RECIPE, seed=99)).weights
    (cause,) = causes_of(ran(case_of(), weights=other))
    assert cause.kind == "other initial weights"
    assert {"initial_weights", "loss", "gradients"} <= {*cause.explains}


def test_random_weights_in_the_evidence_alone_do_not_explain_right_numbers(ran: Ran) -> None:
    trial = starting(ran(case_of()), {W1: lambda value: random(value.shape)})
    found = diagnose(trial, judge(trial))
    assert found is not None and "loss" not in found.causes[0].explains
    assert {"update"} <= {result.check for result in judge(trial) if result.verdict is Verdict.FAIL}


@pytest.mark.slow("many of a kind; the first run in the same way", after=1)
@pytest.mark.parametrize("runs", ["other", "same"])
def test_weights_that_each_run_draws_anew(runs: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    first, second = (starting(trial, every(trial, lambda value, by=by: value + by)) for by in (1, 2))
    repeat = second.run if runs == "other" else first.run
    (_, are) = data_of(cause_of(replace(first, repeat=repeat)), "are")
    assert bool(are) is (runs == "other")


@pytest.mark.slow("many of a kind; the first run in the same way", after=1)
@pytest.mark.parametrize("layout", ["tp_2", "fsdp_2"])
def test_ranks_that_start_from_one_shard(layout: str) -> None:
    trial = trial_of(tiny_case(layout))
    first = {tensor.fqn: tensor.value for tensor in trial.ranks[0].parameters}
    for fqn in trial.plan.shapes:
        trial = with_parameter(trial, 1, fqn, value=first[fqn])
    assert data_of(cause_of(trial), "rank", "of") == ("same shard", 1, 0)


def test_one_replica_with_other_weights_leaves_all_that_follows_untested() -> None:
    trial = starting(trial_of(tiny_case("ddp_2")), {NORM: lambda value: 3 * value}, ranks=(1,))
    trial = with_every_rank(trial, lambda t, rank: with_value(t, rank, 1, "gradients", NORM, lambda g: g + 1))
    found = diagnose(trial, judge(trial))
    assert found is not None and found.kinds[0] == "other initial weights"
    assert found.causes[0].ranks and "not tested" in dict(found.evidence)


@pytest.mark.slow("many hypotheses; test_what_ranks_start_from_instead_of_the_seeds_weights asks the same question")
def test_weights_that_are_not_finite_are_those_of_their_rank() -> None:
    cause = cause_of(with_parameter(FOUR, 2, NORM, value=np.full(1, np.nan)))
    assert (cause.kind, cause.ranks, cause.parameters) == ("other initial weights", (2,), (NORM,))


def test_weights_are_put_together_from_slices_that_fit() -> None:
    trial = starting(FSDP, {WQ: lambda value: value + 1})
    weights = observed_weights(trial)
    assert weights is not None
    np.testing.assert_array_equal(weights[WQ], trial.reference.weights[WQ] + 1)
    np.testing.assert_array_equal(weights[WO], trial.reference.weights[WO])
    assert observed_weights(with_parameter(FSDP, 1, WQ, value=np.zeros((1, 4)))) is None
    assert observed_weights(starting(trial_of(tiny_case("hsdp_2x2")), {WQ: lambda value: value + 1}, (3,))) is None
    assert not list(other_weights(trial, broken("loss")))


# ---- weights between two steps


def changed_on(step: int, change: Change, *, ranks: tuple[int, ...] = (0, 1)) -> Trial:
    trial = trial_of(tiny_case("ddp_2"))
    for rank in ranks:
        left = trial.ranks[rank].steps[step - 1].parameters
        trial = with_step(trial, rank, step, changed={fqn: change(value) for fqn, value in left.items()})
    return trial


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=2)
@pytest.mark.parametrize(
    ("change", "are"),
    [
        (lambda left: 0.9 * left, "0.9 times"),
        (lambda left: (1 - 0.1 * FSDP.reference.steps[0].lr) * left, "as weight decay makes them"),
        (np.zeros_like, "all 0"),
        (lambda left: left.astype(np.float32), "another shape"),
        (lambda left: through(np.float32, left), "rounded to float32"),
        (lambda left: through(np.float16, left), "rounded to float16"),
        (lambda left: random(left.shape), ""),
    ],
)
def test_what_was_done_to_weights_after_the_optimizer(change: Change, are: str) -> None:
    kind, step, seen = data_of(cause_of(changed_on(1, change)), "step", "are")
    assert (kind, step) == ("weights changed", 1)
    assert are in seen if are else seen == ""


@pytest.mark.slow("many hypotheses; test_what_was_done_to_weights_after_the_optimizer asks the same question")
@pytest.mark.parametrize(
    ("shares", "are"),
    [((0.25, 0.25, 0.5), ("before training x 0.25", "step 1 x 0.25", "step 2 x 0.5")), ((0, 1, 0), ("after step 1",))],
)
def test_weights_that_became_a_mean_of_earlier_ones(shares: tuple[float, ...], are: tuple[str, ...]) -> None:
    trial = changed_on(2, np.zeros_like)
    for rank, evidence in trial.ranks.items():
        starts = {tensor.fqn: tensor.value for tensor in evidence.parameters}
        each = (starts, *(step.parameters for step in evidence.steps[:2]))
        mean = {fqn: sum(by * of[fqn] for by, of in zip(shares, each, strict=True)) for fqn in starts}
        trial = with_step(trial, rank, 2, changed=mean)
    assert all(one in data_of(cause_of(trial), "are")[1] for one in are)
    odd = dict(trial.ranks[1].steps[1].changed or {})
    odd[NORM] = odd[NORM] + 1e-3
    assert data_of(cause_of(with_step(trial, 1, 2, changed=odd)), "are")[1] == ""


def test_weights_changed_after_the_last_step_are_those_of_their_rank() -> None:
    cause = cause_of(changed_on(3, lambda left: 2 * left, ranks=(1,)))
    assert (*data_of(cause, "step"), cause.ranks) == ("weights changed", 3, (1,))


def test_only_what_was_changed_is_assumed_to_be_other() -> None:
    left = FSDP.ranks[1].steps[0].parameters
    trial = with_step(FSDP, 1, 1, changed={**left, NORM: left[NORM] + 1.0})
    (one,) = changed_weights(trial, broken("update"))
    usual, assumed = trial.reference.steps[0].parameters, under(one, trial).reference.steps[0].parameters
    moved = {fqn: np.zeros_like(value) for fqn, value in usual.items()}
    view_of_slice(moved[NORM], trial.plan.slices[1][NORM])[...] = 1.0
    for fqn, value in usual.items():
        np.testing.assert_allclose(assumed[fqn], value + moved[fqn], rtol=1e-14)
    assert not list(changed_weights(trial, broken("gradients")))
    (misfit,) = changed_weights(
        with_step(FSDP, 1, 1, changed={**left, NORM: left[NORM].astype(np.float32)}), broken("update")
    )
    assert misfit.assume is None


# ---- what a checkpoint gave back


def alone() -> Trial:
    """One rank, that holds all, goes on from two of tp."""
    return resumed(after=ParallelDims())


def under(one: Hypothesis, trial: Trial) -> Trial:
    assert one.assume is not None
    return one.assume(trial)


def held_after(trial: Trial, step: int) -> Trial:
    """All parameters are those after this step, the optimizer's state is not."""
    parameters = trial.reference.steps[step - 1].parameters if step else trial.reference.weights
    return everywhere(trial, "parameters", lambda held: {fqn: parameters[fqn] for fqn in held})


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize(
    ("trial", "moment"),
    [
        (held_after(alone(), 1), "after step 1"),
        (held_after(trial_of(tiny_case(ParallelDims(), resume=(Saved(1, TP_2, until=2),))), 2), "after step 2"),
        (held_after(trial_of(tiny_case(ParallelDims(), resume=(Saved(1, TP_2), Saved(2, TP_2)))), 1), "after step 1"),
        (held_after(alone(), 0), "before training"),
        (held_after(resumed(after=ParallelDims(), training=SGD), 0), "before training"),
    ],
    ids=["older", "later", "of the launch before", "the seed's", "the seed's without state"],
)
def test_parameters_that_are_all_of_another_moment_are_one_cause(trial: Trial, moment: str) -> None:
    found = {one.kind: one for one in causes_of(trial)}
    assert data_of(found["resumed elsewhere"], "moment") == ("resumed elsewhere", moment)


SEED = alone().reference.weights
CHANGED = "parameters changed over the checkpoint"


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize(
    ("change", "kind", "detail", "value"),
    [
        (lambda held: {f: through(np.float32, v) for f, v in held.items()}, CHANGED, "are", "rounded to float32"),
        (lambda held: {WEIGHT: held[WEIGHT].T}, CHANGED, "are", "transposed"),
        (lambda held: {WEIGHT: held[WEIGHT][::-1]}, CHANGED, "are", "rows in another order"),
        (lambda held: {f: 1.5 * v for f, v in held.items()}, CHANGED, "are", "1.5 times the right ones"),
        (lambda held: {W1: held[W1] + 1}, CHANGED, "are", ""),
        (lambda held: {W1: last_bit(held[W1])}, CHANGED, "are", ""),
        (lambda held: {W1: 0 * held[W1]}, CHANGED, "are", "all 0"),
        (lambda held: {W1: random(held[W1].shape)}, CHANGED, "are", ""),
        (lambda held: {W1: alone().reference.steps[0].parameters[W1]}, CHANGED, "are", "after step 1"),
        (lambda held: {W1: held[W3], W3: held[W1]}, "parameters exchanged", "of", W3),
        (lambda held: {W1: held[W3]}, "parameters exchanged", "of", W3),
        (lambda held: {W1: SEED[W1], W3: SEED[W3]}, "parameters not loaded", "moment", "before training"),
    ],
)
def test_what_became_of_parameters_over_a_checkpoint(
    change: Callable[[Held], Held], kind: str, detail: str, value: str
) -> None:
    cause = cause_of(everywhere(alone(), "parameters", lambda held: held | change(held)))
    seen = data_of(cause, detail)
    assert seen[0] == kind
    assert seen[1].endswith(value) if value else seen[1] == ""


@pytest.mark.slow("many hypotheses; test_what_became_of_parameters_over_a_checkpoint has all ranks")
def test_parameters_that_came_back_otherwise_on_some_ranks_are_those_of_these() -> None:
    trial = resumed(TP_2, TP_2)
    older = {rank: evidence.steps[0].parameters for rank, evidence in trial.saved[0].ranks.items()}
    cause = cause_of(with_resumed(trial, 1, "parameters", lambda held: older[1]))
    assert (*data_of(cause, "are"), cause.ranks) == (CHANGED, "those after step 1", (1,))
    swapped = with_resumed(resumed(), 1, "parameters", lambda held: {**held, W1: held[W3], W3: held[W1]})
    assert (*data_of(cause_of(swapped), "parameter", "of"), cause_of(swapped).ranks) == (
        *("parameters exchanged", W1, W3),
        (1,),
    )


@pytest.mark.slow("many hypotheses; test_what_ranks_start_from_instead_of_the_seeds_weights asks the same question")
def test_a_slice_of_another_place_is_said_to_be_one() -> None:
    trial, first = resumed(TP_2, TP_2), resumed(TP_2, TP_2).ranks[0].resumed
    assert first is not None
    cause = cause_of(with_resumed(trial, 1, "parameters", lambda held: {**held, W1: first.parameters[W1]}))
    assert (data_of(cause, "moment"), cause.ranks) == (("slices mixed", "after step 2"), (1,))
    state = with_resumed(trial, 1, "optimizer_state", lambda held: {**held, W1: first.optimizer_state[W1]})
    assert "rank 1 has 1/2 of dim 0" in cause_of(state).hint


def state(change: Callable[[str, np.ndarray], np.ndarray | None], *fqns: str) -> Callable[[Held], Held]:
    """What the optimizer keeps of these parameters (all), by its name for it; None: nothing."""

    def changed(held: Held) -> Held:
        made = {f: {n: change(n, v) for n, v in of.items()} for f, of in held.items() if not fqns or f in fqns}
        return {**held, **{f: {n: v for n, v in of.items() if v is not None} for f, of in made.items()}}

    return changed


BOTH = ("exp_avg", "exp_avg_sq")
OTHER = {BOTH[0]: BOTH[1], BOTH[1]: BOTH[0]}


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize(
    ("change", "names", "are"),
    [
        (state(lambda name, value: None if name in BOTH else value), BOTH, "missing"),
        (state(lambda name, value: None if name == "exp_avg" else value, W1, W3), BOTH[:1], "missing"),
        (state(lambda name, value: 0 * value if name in BOTH else value), BOTH, "zero"),
        (state(lambda name, value: 0 * value if name == "exp_avg_sq" else value, W1), BOTH[1:], "zero"),
        (state(lambda name, value: through(np.float32, value) if name in BOTH else value), BOTH, "rounded to float32"),
        (state(lambda name, value: 2 * value if name == "exp_avg" else value, W1), BOTH[:1], "2 times"),
        (state(lambda name, value: value + 1 if name in BOTH else value, W1), BOTH, ""),
        (lambda held: held | {W1: held[W3], W3: held[W1]}, BOTH, f"of {W3}"),
        (lambda held: {f: o | {n: o[OTHER[n]] for n in BOTH} for f, o in held.items()}, BOTH, "of exp_avg_sq"),
        (state(lambda name, value: value + 1 if name == "step" else value, W1), ("step",), ""),
        (state(lambda name, value: None if name == "step" else value, W1), ("step",), "missing"),
    ],
)
def test_what_became_of_the_optimizers_state(change: Callable[[Held], Held], names: tuple[str, ...], are: str) -> None:
    kind, seen, became = data_of(cause_of(everywhere(alone(), "optimizer_state", change)), "state", "are")
    assert (kind, seen) == ("optimizer state lost", names)
    assert are in became if are else became == ""


def with_rates(trial: Trial, rates: dict[int, float | None]) -> Trial:
    for rank in trial.ranks:
        for step, lr in rates.items():
            trial = with_step(trial, rank, step, lr=lr)
    return trial


HALF, WHOLE = 0.005, 0.01


@pytest.mark.parametrize(
    ("rates", "step"),
    [
        *(({2: HALF, 3: WHOLE}, 2), ({3: WHOLE}, 3), ({2: None, 3: WHOLE}, 3), ({2: HALF, 3: None}, 2)),
        *(({2: HALF}, None), ({2: HALF, 3: HALF}, None), ({3: HALF}, None), ({3: WHOLE * (1 + 1e-10)}, None)),
    ],
)
def test_a_schedule_restarts_where_all_rates_from_some_step_on_are_those_of_the_beginning(
    rates: dict[int, float | None], step: int | None
) -> None:
    trial = with_rates(trial_of(tiny_case(ParallelDims(dp_shard=4), resume=(Saved(1, TP_2),))), rates)
    found = [data_of(one.cause, "step", "of_step") for one in resumed_otherwise(trial, broken("resume"))]
    assert found == ([("schedule starts anew", step, step - 1)] if step else [])


def test_each_of_what_is_wrong_may_be_all_and_what_else_it_is_stands_below_the_first() -> None:
    trial = everywhere(alone(), "parameters", lambda held: held | {W1: held[W1] + 1})
    trial = everywhere(trial, "optimizer_state", state(lambda name, value: 0 * value))
    trial = with_rates(trial, {3: trial.reference.steps[0].lr})
    found = list(resumed_otherwise(trial, broken("resume")))
    assert [one.cause.kind for one in found] == [CHANGED, "optimizer state lost", "schedule starts anew"]
    assert [set(under(one, trial).assumption.reference) for one in found] == [{"left"}, {"state"}, {"rate"}]
    assert [label for label, _ in found[0].lines if label == "also"] == ["also", "also"]
    assert [one.seen_by for one in found] == [("resume",), (), ()]


@pytest.mark.parametrize("beyond", [False, True])
def test_what_starts_from_scratch_has_one_cause(beyond: bool) -> None:
    """beyond: it trains as many steps as from the beginning."""
    trial = everywhere(held_after(alone(), 0), "optimizer_state", lambda held: {fqn: {} for fqn in held})
    trial = with_rates(trial, {3: trial.reference.steps[0].lr})
    if beyond:
        (last,) = trial.ranks[0].steps
        trial = with_rank(trial, 0, steps=(last, replace(last, step=4), replace(last, step=5)))
    (one,) = resumed_otherwise(trial, broken("resume"))
    assert data_of(one.cause, "moment") == ("resumed elsewhere", "before training")
    assert one.seen_by == (("resume", "completed") if beyond else ("resume",))
    assumed = under(one, trial).assumption
    assert {"left", "state"} == set(assumed.reference) and assumed.optimizer.counter is not None
    assert [assumed.optimizer.counter(step, W1) for step in (3, 4)] == [1, 2]


@pytest.mark.slow("many hypotheses; test_what_became_of_parameters_over_a_checkpoint tries them on one launch")
def test_what_an_earlier_launch_keeps_beside_does_not_explain_what_is_resumed_wrongly() -> None:
    right = resumed()
    keeping = with_rank(right.saved[0], 0, held=(HeldTensor((900,), "float64", 7200),))
    assert cause_of(replace(right, saved=(keeping,))).kind == "retained"
    wrong = with_resumed(right, 1, "parameters", lambda held: {**held, WEIGHT: held[WEIGHT] + 1})
    assert cause_of(replace(wrong, saved=(keeping,))).kind == CHANGED
    worse = with_step(keeping, 0, 1, reported_loss=99.0)
    assert cause_of(replace(wrong, saved=(worse,))).kind != CHANGED
