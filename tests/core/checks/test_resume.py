"""The check `resume`, and how all checks judge a case of several launches, on literal evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caused import cause_of, data_of
from checked import like, where
from literal import ADAMW, SGD, UNEVEN, judged, tiny_case, trial_of, with_rank, with_step, with_value, without_rank
from literal_ranks import microbatch_of
from resuming import FSDP_4, TP_2, WEIGHT, everywhere, resumed, with_resumed

from harness.core.case.case import Case, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.checks.resume import PARAMETER, assemble_state
from harness.core.evidence.records import Resumed
from harness.core.judge.received_samples import step_of_samples
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial

LAYOUTS = {
    "the same": (FSDP_4, FSDP_4),
    "fsdp to hsdp": (FSDP_4, ParallelDims(dp_replicate=2, dp_shard=2)),
    "tp to fsdp": (TP_2, ParallelDims(dp_shard=2)),
    "fsdp and tp to tp": (ParallelDims(dp_shard=2, tp=2), TP_2),
    "ddp to single": (ParallelDims(dp_replicate=2), ParallelDims()),
}


def trained_on() -> Trial:
    """Saved after step 2, went on to step 3, was lost, and is continued from what it saved."""
    dims = ParallelDims(dp_shard=2)
    return trial_of(tiny_case(dims, resume=(Saved(2, dims, until=3),)))


# ---- right


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_run_that_continues_passes_every_check_in_any_layout(layouts: Any, training: Any) -> None:
    for model in ({}, {"model": UNEVEN}):
        results = judge(resumed(*layouts, training, **model))
        assert not [result for result in results if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)]
        assert next(r for r in results if r.check == "resume").verdict is Verdict.PASS


def test_every_tensor_that_a_rank_resumed_with_is_examined() -> None:
    trial = resumed()
    parameters = len(trial.plan.shapes)
    assert judged("resume", trial).examined == 4 * parameters * 4  # ranks; parameter, two moments, a counter


def test_through_three_launches_both_checkpoints_are_examined() -> None:
    case = tiny_case(FSDP_4, resume=(Saved(1, TP_2), Saved(2, ParallelDims())))
    result = next(r for r in judge(trial_of(case)) if r.check == "resume")
    parameters = len(case.model.parameter_shapes())
    assert (result.verdict, result.examined) == (Verdict.PASS, (1 + 4) * parameters * 4)


def test_a_launch_that_trains_on_after_saving_is_judged_to_its_end_and_resumed_from_where_it_saved() -> None:
    trial = trained_on()
    results = judge(trial)
    assert not [result for result in results if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)]
    assert [step.step for step in trial.saved[0].ranks[0].steps] == [1, 2, 3]
    assert [step.step for step in trial.ranks[0].steps] == [3]


def test_what_saving_does_to_the_weights_that_train_on_is_named() -> None:
    trial = trained_on()
    saved = trial.saved[0]
    (kept,) = [step.parameters for step in saved.ranks[0].steps if step.step == 2]
    rounded = {fqn: value.astype(np.float32).astype(np.float64) for fqn, value in kept.items()}
    trial = replace(trial, saved=(with_step(saved, 0, 2, changed=rounded),))
    found = diagnose(trial, judge(trial))
    assert found is not None
    assert (found.launch, data_of(found.causes[0], "step")) == ("saved_1", ("weights changed", 2))


def test_moments_are_judged_where_they_are_saved_too() -> None:
    saved = trained_on().saved[0]
    (kept,) = [step.optimizer_state for step in saved.ranks[0].steps if step.step == 2]
    wrong = {fqn: state | {"exp_avg": state["exp_avg"] * 1.01} for fqn, state in kept.items()}
    found = judged("update", with_step(saved, 0, 2, optimizer_state=wrong)).findings
    assert (found[0].rank, found[0].step) == (0, 2)


def test_a_case_that_resumes_nothing_has_nothing_to_judge() -> None:
    result = judged("resume", trial_of(tiny_case("fsdp_2")))
    assert (result.verdict, result.note) == (Verdict.NOT_APPLICABLE, "nothing is resumed")


# ---- wrong


def test_one_bit_of_one_parameter_on_one_rank_is_enough() -> None:
    def next_float(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        value = parameters[WEIGHT].copy()
        value.flat[1] = np.nextafter(value.flat[1], np.inf)
        return parameters | {WEIGHT: value}

    result = judged("resume", with_resumed(resumed(), 2, "parameters", next_float))
    assert result.findings == (
        like(
            2,
            0,
            1,
            name=WEIGHT,
            unit="of 4 entries differ",
            note="saved after step 2, 1/4 of dim 0 [2:3]",
            quantity="value",
        ),
    )


def test_a_nan_is_not_what_was_saved() -> None:
    trial = everywhere(resumed(), "parameters", lambda held: held | {WEIGHT: np.full_like(held[WEIGHT], np.nan)})
    assert judged("resume", trial).verdict is Verdict.FAIL


def test_optimizer_state_of_zeros_is_named() -> None:
    trial = everywhere(
        resumed(),
        "optimizer_state",
        lambda held: {fqn: {key: np.zeros_like(value) for key, value in state.items()} for fqn, state in held.items()},
    )
    assert judged("resume", trial).findings[0].observed == "zeros"
    assert data_of(cause_of(trial), "state", "are") == (
        "optimizer state lost",
        ("exp_avg", "exp_avg_sq"),
        "zero",
    )


def test_optimizer_state_that_is_not_there_is_named() -> None:
    trial = everywhere(resumed(), "optimizer_state", lambda held: {fqn: {} for fqn in held})
    assert data_of(cause_of(trial), "are") == ("optimizer state lost", "missing")


def test_optimizer_state_of_another_parameter_is_named() -> None:
    other = "layers.0.attention.wo.weight"
    trial = everywhere(resumed(), "optimizer_state", lambda held: held | {WEIGHT: held[other], other: held[WEIGHT]})
    assert data_of(cause_of(trial), "state", "are") == (
        "optimizer state lost",
        ("exp_avg", "exp_avg_sq"),
        f"that of {other} for {WEIGHT}",
    )


def test_a_counter_that_starts_anew_is_named() -> None:
    lost = {"step": np.array(0.0, np.float32)}
    trial = everywhere(resumed(), "optimizer_state", lambda held: {fqn: s | lost for fqn, s in held.items()})
    assert judged("resume", trial).findings[0] == like(
        0, 2.0, 0.0, name="tok_embeddings.weight", quantity="step", note="saved after step 2"
    )
    assert data_of(cause_of(trial), "state", "are") == ("optimizer state lost", ("step",), "zero")


def test_a_parameter_that_was_not_loaded_is_named_with_its_ranks() -> None:
    trial = resumed()
    for rank in (0, 1):
        seed = next(tensor.value for tensor in trial.ranks[rank].parameters if tensor.fqn == WEIGHT)
        trial = with_resumed(trial, rank, "parameters", lambda held, seed=seed: held | {WEIGHT: seed})
    found = cause_of(trial)
    assert data_of(found, "moment") == ("parameters not loaded", "before training")
    assert {WEIGHT} <= {*found.parameters}
    assert {finding.ranks for finding in judged("resume", trial).findings} == {(0,), (1,)}


def test_training_from_scratch_is_named() -> None:
    trial = resumed()
    for rank, evidence in trial.ranks.items():
        seed = {tensor.fqn: tensor.value for tensor in evidence.parameters}
        trial = with_resumed(trial, rank, "parameters", lambda _, seed=seed: seed)
        trial = with_resumed(trial, rank, "optimizer_state", lambda _: {})
    assert data_of(cause_of(trial), "moment") == ("resumed elsewhere", "before training")


def test_an_older_checkpoint_is_named_with_its_step() -> None:
    trial = trial_of(tiny_case(FSDP_4, resume=(Saved(1, TP_2), Saved(2, TP_2))))
    older = trial_of(tiny_case(FSDP_4, resume=(Saved(1, TP_2),)))
    for rank in trial.ranks:
        trial = with_rank(trial, rank, resumed=older.ranks[rank].resumed)
    assert data_of(cause_of(trial), "moment") == ("resumed elsewhere", "after step 1")


def test_a_schedule_that_starts_anew_is_named() -> None:
    trial = resumed()
    for rank in trial.ranks:
        trial = with_step(trial, rank, 3, lr=trial.reference.steps[0].lr, reported_lr=trial.reference.steps[0].lr)
    assert judged("resume", trial).findings[0] == like(0, 0.0075, 0.005, step=3, quantity="learning rate")
    assert data_of(cause_of(trial), "step", "of_step") == ("schedule starts anew", 3, 1)


def test_samples_of_another_step_are_named() -> None:
    trial, whole = resumed(), trial_of(tiny_case(FSDP_4))
    for rank in trial.ranks:
        trial = with_step(trial, rank, 3, microbatches=whole.ranks[rank].steps[0].microbatches)
    assert judged("resume", trial).findings[0] == like(
        0, 0, 2, step=3, quantity="samples of another step", unit="of 2 samples", note="all are of step 1"
    )
    assert data_of(cause_of(trial), "step", "of_step") == ("data position", 3, 1)


def test_without_a_ranks_account_of_what_it_resumed_nothing_passes() -> None:
    result = judged("resume", with_rank(resumed(), 1, resumed=None))
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        "a rank did not record what it held after resuming",
    )


# ---- several launches


def test_a_mistake_before_the_checkpoint_is_found_by_its_check_and_told_with_its_launch() -> None:
    trial = resumed()
    before = with_value(trial.saved[0], 0, 1, "gradients", "norm.weight", lambda gradient: 2 * gradient)
    trial = replace(trial, saved=(before,))
    results = {result.check: result for result in judge(trial)}
    assert results["gradients"].verdict is Verdict.FAIL
    assert where(results["gradients"].findings[0]) == (0, 1, "norm.weight")
    assert results["gradients"].findings[0].launch == "saved_1"
    found = diagnose(trial, judge(trial))
    assert found is not None and found.launch == "saved_1"


def test_a_rank_missing_before_the_checkpoint_leaves_no_check_passing() -> None:
    trial = resumed()
    results = judge(replace(trial, saved=(without_rank(trial.saved[0], 1),)))
    assert {result.verdict for result in results} == {Verdict.FAIL, Verdict.UNKNOWN}
    assert next(r for r in results if r.check == "loss").note == "saved_1: no evidence from rank 1; see `completed`"


def test_steps_of_before_the_checkpoint_are_not_asked_of_the_resumed_launch() -> None:
    trial = resumed()
    assert [step.step for step in trial.ranks[0].steps] == [3]
    again = replace(trial.ranks[0].steps[0], step=2)
    result = judged("completed", with_rank(trial, 0, steps=(again, *trial.ranks[0].steps)))
    assert result.findings == (like(0, (3,), (2, 3), quantity="optimizer steps"),)


def test_launches_are_cases_of_their_own_layout_and_steps() -> None:
    case = tiny_case(FSDP_4, resume=(Saved(1, TP_2), Saved(2, ParallelDims(dp_shard=2), Features(accumulation=2))))
    told = {
        name: (launch.dims, launch.features.accumulation, list(launch.steps)) for name, launch in case.launches.items()
    }
    assert told == {
        "saved_1": (TP_2, 1, [1]),
        "saved_2": (ParallelDims(dp_shard=2), 2, [2]),
        "run": (FSDP_4, 1, [3]),
    }
    assert isinstance(case.launches["run"], Case)


def test_rows_that_change_places_are_named_also_among_parameters_of_other_shapes() -> None:
    names = ("tok_embeddings.weight", WEIGHT)

    def other_way_round(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return held | {fqn: held[fqn][::-1].copy() for fqn in names}

    trial = everywhere(resumed(after=ParallelDims()), "parameters", other_way_round)
    found = cause_of(trial)
    assert found.kind == "parameters changed over the checkpoint"
    assert {*names} <= {*found.parameters}


# ---- the edges of the check


def test_flattened_parameters_resume_in_their_own_shapes_and_the_other_way_round() -> None:
    flat = Features(wrapper="fsdp1")
    for case in (
        tiny_case(FSDP_4, resume=(Saved(2, ParallelDims(dp_shard=2), flat),), model=UNEVEN),
        tiny_case(ParallelDims(dp_shard=2), resume=(Saved(2, FSDP_4),), wrapper="fsdp1", model=UNEVEN),
    ):
        result = judged("resume", trial_of(case))
        assert (result.verdict, result.findings) == (Verdict.PASS, ())


def test_a_rank_that_holds_nothing_of_a_parameter_need_keep_no_state_of_it() -> None:
    trial = resumed(model=UNEVEN)
    empty = {fqn for fqn, value in trial.ranks[3].steps[0].parameters.items() if not value.size}
    assert empty

    def lose(fqns: set[str]) -> Trial:
        return with_resumed(trial, 3, "optimizer_state", lambda held: {f: s for f, s in held.items() if f not in fqns})

    assert judged("resume", lose(empty)).verdict is Verdict.PASS
    full = next(fqn for fqn in trial.plan.shapes if fqn not in empty)
    missing = judged("resume", lose({full})).findings
    assert [(f.rank, f.name, f.quantity, f.observed) for f in missing] == [
        (3, full, name, None) for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def test_what_was_saved_keeps_its_dtype_and_what_nobody_held_is_no_number() -> None:
    launch = resumed().saved[0]  # tp 2: rows of wq lie on both ranks
    halves = {rank: launch.ranks[rank].steps[-1].parameters[WEIGHT].astype(np.float32) for rank in (0, 1)}
    held = {rank: Resumed({WEIGHT: half, "a.buffer": np.ones(3)}, {}) for rank, half in halves.items()}
    whole = assemble_state(launch, held)
    assert list(whole) == [(PARAMETER, WEIGHT)]
    assert whole[PARAMETER, WEIGHT].tobytes() == np.concatenate([halves[0], halves[1]]).tobytes()
    (half,) = assemble_state(launch, {1: held[1]}).values()
    assert np.isnan(half[:2]).all() and half[2:].tobytes() == halves[1].tobytes()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rate_off_by_one_part_in_1e_11_does_not_continue_the_schedule(rank: int) -> None:
    rounded = 0.0075 * (1 + 1e-11)
    assert judged("resume", with_step(resumed(), rank, 3, lr=rounded)).findings == (
        like(rank, 0.0075, rounded, step=3, quantity="learning rate"),
    )
    assert judged("resume", with_step(resumed(), rank, 3, lr=0.0075 * (1 + 2e-13))).verdict is Verdict.PASS


def test_samples_of_several_steps_are_of_no_one_step() -> None:
    trial = resumed(after=ParallelDims())
    strange = (microbatch_of(trial.reference, (16, 17, 18, 19, 4, 5, 6, 7)),)
    assert judged("resume", with_step(trial, 0, 3, microbatches=strange)).findings == (
        like(0, 0, 4, step=3, quantity="samples of another step", unit="of 8 samples"),
    )
    whole = (microbatch_of(trial.reference, range(8, 16)),)
    assert judged("resume", with_step(trial, 0, 3, microbatches=whole)).findings == (
        like(0, 0, 8, step=3, quantity="samples of another step", unit="of 8 samples", note="all are of step 2"),
    )
    assert step_of_samples(trial, []) is None


def test_the_launch_that_saved_must_have_left_all_its_evidence() -> None:
    trial = resumed()
    result = judged("resume", replace(trial, saved=(without_rank(trial.saved[0], 1),)))
    assert result == Result("resume", Verdict.UNKNOWN, note="the launch that saved left no complete evidence")


def test_the_first_launch_of_several_resumes_nothing_and_says_so() -> None:
    result = judged("resume", resumed().saved[0])
    assert (result.verdict, result.note) == (Verdict.NOT_APPLICABLE, "this launch starts at step 1")
