"""A start from a checkpoint's weights alone, on literal evidence: what is new there, and what is told where it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from caused import cause_of, data_of
from checked import like
from diagnosed import broken
from literal import ADAMW, judged, tiny_case, trial_of, with_step
from resuming import FSDP_4, TP_2, WEIGHT, everywhere

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.checks import judge
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.hypotheses.resumed import copies_not_loaded


def started(before: ParallelDims = TP_2, after: ParallelDims = FSDP_4, *, step: int = 2) -> Trial:
    """Trained in one layout, and begun anew with those weights in another."""
    return trial_of(tiny_case(after, resume=(Saved(step, before, model_only=True),)))


def saved_moments(trial: Trial, step: int = 2) -> Trial:
    """Each rank's optimizer has what was saved."""
    state = trial.saved[-1].reference.steps[step - 1].optimizer_state
    for rank in trial.ranks:
        part = {fqn: tuple(slice(*pair) for pair in trial.plan.slices[rank][fqn]) for fqn in state}
        own = {fqn: {name: value[part[fqn]] for name, value in held.items()} for fqn, held in state.items()}
        trial = _with_state(trial, rank, own)
    return trial


def _with_state(trial: Trial, rank: int, own: dict[str, dict[str, np.ndarray]]) -> Trial:
    held = trial.ranks[rank].resumed
    assert held is not None
    evidence = replace(trial.ranks[rank], resumed=replace(held, optimizer_state=own))
    return replace(trial, run=replace(trial.run, ranks={**trial.run.ranks, rank: evidence}))


def test_its_steps_count_from_1_and_its_reference_begins_with_the_weights_that_were_saved() -> None:
    trial = started()
    assert list(trial.case.steps) == [1, 2, 3]
    assert list(trial.saved[0].case.steps) == [1, 2]
    before = trial.saved[0].reference
    assert np.array_equal(trial.reference.weights[WEIGHT], before.steps[1].parameters[WEIGHT])
    assert np.array_equal(trial.seed_weights[WEIGHT], before.weights[WEIGHT])


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("after", [FSDP_4, TP_2, ParallelDims(dp_replicate=2, dp_shard=2)])
def test_a_right_start_passes_every_check(after: ParallelDims, step: int) -> None:
    results = judge(started(FSDP_4, after, step=step))
    assert not [result for result in results if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)]


def test_moments_of_zero_are_as_good_as_none() -> None:
    trial = saved_moments(started())
    trial = everywhere(
        trial, "optimizer_state", lambda own: {f: {k: 0 * v for k, v in held.items()} for f, held in own.items()}
    )
    assert judged("resume", trial).verdict is Verdict.PASS


def test_an_optimizer_that_is_not_new_is_named_with_whose_state_it_has() -> None:
    trial = saved_moments(started())
    finding = next(one for one in judged("resume", trial).findings if one.name == WEIGHT)
    assert (finding.rank, finding.quantity, finding.observed) == (0, "exp_avg", 4)
    assert finding.note.endswith("what was saved after step 2")
    kind, are = data_of(cause_of(trial), "are")
    assert (kind, are) == ("optimizer state kept", "saved after step 2")


def test_of_another_state_it_is_not_said_that_it_was_saved() -> None:
    trial = everywhere(
        saved_moments(started()),
        "optimizer_state",
        lambda own: {f: {k: 2 * v for k, v in held.items()} for f, held in own.items()},
    )
    assert data_of(cause_of(trial), "are") == ("optimizer state kept", "")


def test_a_schedule_that_goes_on_is_named() -> None:
    trial = started(step=1)
    rates = [step.lr for step in trial.reference.steps]
    for rank in trial.ranks:
        for number, rate in enumerate((*rates[1:], rates[-1]), start=1):
            trial = with_step(trial, rank, number, lr=rate, reported_lr=rate)
    assert judged("resume", trial).findings[0] == like(0, rates[0], rates[1], step=1, quantity="learning rate")
    assert data_of(cause_of(trial), "step", "of_step") == ("schedule goes on", 1, 2)


def test_weights_that_did_not_arrive_are_those_before_training() -> None:
    trial = started(FSDP_4, FSDP_4)
    seed = {rank: {one.fqn: one.value for one in evidence.parameters} for rank, evidence in trial.ranks.items()}
    for rank in trial.ranks:
        held = trial.ranks[rank].resumed
        assert held is not None
        evidence = replace(trial.ranks[rank], resumed=replace(held, parameters=seed[rank]))
        trial = replace(trial, run=replace(trial.run, ranks={**trial.run.ranks, rank: evidence}))
    assert data_of(cause_of(trial), "moment") == ("resumed elsewhere", "before training")


def test_its_bounds_hold_the_roundings_of_the_steps_before() -> None:
    trial, alone = started(), trial_of(tiny_case(FSDP_4, ADAMW))
    assert len(trial.steps_before) == 2
    assert trial.bounds.loss[1] > alone.bounds.loss[1]
    assert trial.bounds.gradient[1] > alone.bounds.gradient[1]


def test_a_first_step_that_is_made_from_the_weights_before_training_is_named() -> None:
    trial = started(FSDP_4, FSDP_4)
    rate, decay = trial.reference.steps[0].lr, trial.case.training.weight_decay
    for rank, evidence in trial.ranks.items():
        held = evidence.resumed
        assert held is not None
        seed = {one.fqn: one.value for one in evidence.parameters}
        moved = {f: (seed[f] - held.parameters[f]) * (1 - rate * decay) for f in seed}
        first = {f: value + moved[f] for f, value in evidence.steps[0].parameters.items()}
        trial = with_step(trial, rank, 1, parameters=first)
    assert "copies not loaded" in {one.cause.kind for one in copies_not_loaded(trial, broken("update"))}


def test_a_first_step_from_what_was_loaded_is_not_named_so() -> None:
    assert not list(copies_not_loaded(started(), broken("update")))
