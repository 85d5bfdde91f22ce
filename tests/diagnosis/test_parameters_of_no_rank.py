"""Parameters, layers and stages that are not where they should be, or are not trained, told word for word. No ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, broken, here, seen
from literal import TINY, tiny_case, trial_of, with_rank, with_step

from harness.diagnosis import assume
from harness.diagnosis.processes import incomplete, layers_lost, missing_parameters, not_trained
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference.config import ModelConfig
from harness.reference.record import ReferenceRun
from harness.spec.dims import ParallelDims

FOUR = replace(TINY, n_layers=4)
SEEN = here("completed")


def keeping(trial: Trial, rank: int, fqns: set[str]) -> Trial:
    """Of what a rank holds and trains."""

    def of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {fqn: value for fqn, value in arrays.items() if fqn in fqns}

    evidence = trial.ranks[rank]
    held = tuple(tensor for tensor in evidence.parameters if tensor.fqn in fqns)
    trial = with_rank(trial, rank, parameters=held)
    for step in evidence.steps:
        trial = with_step(trial, rank, step.step, gradients=of(step.gradients), parameters=of(step.parameters))
    return trial


def staged(*layers: tuple[int, ...]) -> Trial:
    """Ranks of a pipeline of four layers that hold these; the first has the embedding, the last norm and output."""
    of = ParallelDims(pp=len(layers))
    case = tiny_case(of, model=FOUR, schedule="1F1B", microbatches=2)
    base = trial_of(tiny_case(ParallelDims(dp_replicate=of.world_size), model=FOUR))
    trial = replace(base, case=case, plan=make_plan(case))
    ends = {0: {"tok_embeddings.weight"}, of.world_size - 1: {NORM, "output.weight"}}
    for rank, own in enumerate(layers):
        within = {fqn for fqn in base.plan.shapes if fqn.startswith(tuple(f"layers.{layer}." for layer in own))}
        trial = keeping(trial, rank, within | ends.get(rank, set()))
    return trial


# ---- stages


def test_a_pipeline_that_is_cut_as_planned_lacks_nothing() -> None:
    assert missing_parameters(staged((0, 1), (2, 3))) == ""


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (((0,), (1, 2, 3)), "rank 0 has layers 0, requested 0,1; rank 1 has layers 1-3, requested 2,3"),
        (((0, 1, 2, 3), ()), "rank 0 has layers 0-3, requested 0,1; rank 1 has layers none, requested 2,3"),
        (((2, 3), (0, 1)), "rank 0 has layers 2,3, requested 0,1; rank 1 has layers 0,1, requested 2,3"),
    ],
)
def test_stages_that_are_cut_at_other_layers_are_told_with_both(layers: tuple[tuple[int, ...], ...], told: str) -> None:
    assert missing_parameters(staged(*layers)) == f"stages are cut at other layers: {told}"


def test_ranks_of_a_pipeline_that_have_their_own_layers_are_not_told() -> None:
    told = "rank 1 has layers 1,2, requested 1; rank 2 has layers none, requested 2"
    trial = staged((0,), (1, 2), (), (3,))
    assert missing_parameters(trial) == f"stages are cut at other layers: {told}"


def test_a_layer_that_a_stage_does_not_hold_is_told_with_who_has_it() -> None:
    twice = staged((0, 1, 2), (2, 3))
    assert missing_parameters(twice).startswith(
        "rank 0 holds layers.2.attention.wk.weight, layers.2.attention.wo.weight"
    )
    assert missing_parameters(twice).endswith(" and 7 more, which belong to rank 1")
    lacks = missing_parameters(staged((0,), (2, 3)))
    assert lacks.startswith(
        "rank 0 does not hold layers.1.attention.wk.weight, layers.1.attention.wo.weight and 7 more"
    )
    assert lacks.endswith("more, requested 19 parameters")
    moved = keeping(staged((0, 1), (2, 3)), 1, {NORM})
    assert ", requested 20 parameters" in missing_parameters(moved) and "which" not in missing_parameters(moved)


def test_whole_stages_that_do_not_train_are_told_by_their_numbers() -> None:
    trial = staged((0, 1), (2, 3))
    none, why = ": none was in place as the optimizer stepped", ": frozen, unused, or in no optimizer that steps"
    first, last = (with_step(trial, rank, 2, gradients={}) for rank in (0, 1))
    both = with_step(first, 1, 2, gradients={})
    assert missing_parameters(first) == (
        "rank 0 has no gradient of tok_embeddings.weight, layers.0.attention.wq.weight and 17 more (all of stage 0) in step 2"
        + none
    )
    assert missing_parameters(last).endswith("and 18 more (all of stage 1) in step 2" + none)
    assert missing_parameters(both).startswith("ranks [0,1] have no gradient of tok_embeddings.weight")
    assert missing_parameters(both).endswith("and 37 more (all of stages 0 and 1) in step 2" + none)
    still = with_step(trial, 1, 3, parameters={NORM: trial.ranks[1].steps[2].parameters[NORM]})
    assert missing_parameters(still).startswith("rank 1 does not update layers.2.attention.wq.weight, ")
    assert missing_parameters(still).endswith("and 17 more in step 3" + why)


# ---- layers


def shallow(*gone: int, layers: int = 2) -> Trial:
    trial = trial_of(tiny_case("ddp_2", model=replace(TINY, n_layers=layers)))
    names = tuple(f"layers.{layer}." for layer in gone)
    for rank in trial.ranks:
        trial = keeping(trial, rank, {fqn for fqn in trial.plan.shapes if not fqn.startswith(names)})
    return trial


@pytest.mark.parametrize(
    ("gone", "layers", "told"),
    [
        ((1,), 2, "layers.1 is on no rank: 1 layer trains"),
        ((2,), 3, "layers.2 is on no rank: 2 layers train"),
        ((1, 2), 3, "layers.1, layers.2 are on no rank: 1 layer trains"),
    ],
)
def test_the_last_layers_that_no_rank_holds_leave_a_shallower_model(
    gone: tuple[int, ...], layers: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def retrain(model: ModelConfig, training: object, reference: ReferenceRun, **otherwise: object) -> ReferenceRun:
        trained.append((model, reference.weights))
        return reference

    monkeypatch.setattr(assume, "retrain", retrain)
    trial = shallow(*gone, layers=layers)
    (one,) = layers_lost(trial, broken("completed"))
    assert one.cause == Cause("layers lost", told, expected=str(layers))
    assert one.assume is not None
    assert one.assume(trial).case.model == replace(trial.case.model, n_layers=layers - len(gone))
    ((model, weights),) = trained
    assert model.n_layers == layers - len(gone)
    lost = tuple(f"layers.{layer}." for layer in gone)
    assert [*weights] == [fqn for fqn in trial.reference.weights if not fqn.startswith(lost)]
    np.testing.assert_array_equal(weights[NORM], trial.reference.weights[NORM])


def test_layers_that_are_there_or_not_the_last_ones_or_all_are_not_told_as_lost() -> None:
    for trial in (shallow(), shallow(0), shallow(0, 1), shallow(0, layers=3)):
        assert list(layers_lost(trial, broken("completed"))) == []
    assert list(layers_lost(shallow(1), broken("traffic"))) == []


# ---- parameters that are not trained


def untrained(trial: Trial, *fqns: str, gradients: bool) -> Trial:
    """Never updated; with gradients or without."""
    for rank, step, _ in list(trial.steps()):
        changes = {"parameters": {fqn: value for fqn, value in step.parameters.items() if fqn not in fqns}}
        if not gradients:
            changes["gradients"] = {fqn: value for fqn, value in step.gradients.items() if fqn not in fqns}
        trial = with_step(trial, rank, step.step, **changes)
    return trial


WHY = "in step 1: frozen, unused, or in no optimizer that steps"


def test_parameters_that_are_not_trained_stay_and_without_a_gradient_are_in_no_norm() -> None:
    trial = untrained(trial_of(tiny_case("ddp_2")), NORM, gradients=False)
    (one,) = not_trained(trial, broken("completed"))
    assert one.cause == Cause(
        "incomplete",
        "ranks [0,1] have no gradient of norm.weight in step 1: none was in place as the optimizer stepped",
    )
    assert one.assume is not None
    steps, usual = one.assume(trial).reference.steps, trial.reference.steps
    assert not steps[0].gradients[NORM].any() and steps[0].grad_norm < usual[0].grad_norm
    for step in steps:
        np.testing.assert_array_equal(step.parameters[NORM], trial.reference.weights[NORM])
    assert not np.array_equal(usual[0].parameters[NORM], trial.reference.weights[NORM])


def test_parameters_out_of_the_optimizers_reach_have_gradients_which_it_may_set_to_zero_or_not() -> None:
    trial = untrained(trial_of(tiny_case("ddp_2")), NORM, gradients=True)
    zeroed, kept = not_trained(trial, broken("completed"))
    told = f"ranks [0,1] do not update norm.weight {WHY}"
    more = "; nothing sets their gradients to zero either, so no optimizer has them"
    assert (zeroed.cause, kept.cause) == (Cause("incomplete", told), Cause("incomplete", told + more))
    assert zeroed.assume is not None and kept.assume is not None
    once, summed = (one.assume(trial).reference.steps for one in (zeroed, kept) if one.assume)
    np.testing.assert_array_equal(once[0].gradients[NORM], summed[0].gradients[NORM])
    assert not np.array_equal(once[1].gradients[NORM], summed[1].gradients[NORM])
    for step in (*once, *summed):
        np.testing.assert_array_equal(step.parameters[NORM], trial.reference.weights[NORM])


def test_nothing_is_supposed_not_to_be_trained_where_all_is_or_where_parameters_are_not_the_models() -> None:
    whole = trial_of(tiny_case("ddp_2"))
    frozen = untrained(whole, NORM, gradients=False)
    strange = replace(frozen.ranks[0].parameters[0], fqn="buffer")
    beside = with_rank(frozen, 0, parameters=(*frozen.ranks[0].parameters, strange))
    silent = with_rank(with_rank(frozen, 0, steps=()), 1, steps=())
    for trial in (whole, beside, silent):
        assert list(not_trained(trial, broken("completed"))) == []
    assert list(not_trained(frozen, broken("loss"))) == []


def test_what_is_incomplete_is_a_fact_with_the_checks_of_what_is_lacking() -> None:
    trial = untrained(trial_of(tiny_case("ddp_2")), NORM, gradients=False)
    found = seen(incomplete, trial, "completed", "traffic", "loss")
    assert found is not None and found.lines == (SEEN,)
    following = ("completed", "initial_weights", "checkpoint", "features", "memory", "traffic", "schedule", "resume")
    assert found.checks == following
    alone = seen(incomplete, with_rank(trial, 1, rank=0), "completed", "traffic", "loss")
    assert alone is not None and alone.checks == ("completed", "traffic", "loss")
