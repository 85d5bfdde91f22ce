"""What is said where ZeRO cuts nothing, does not gather what it stepped on, or cuts at another place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import broken, diagnosis_text, dims, first_line, seen
from literal import (
    ADAMW,
    UNEVEN,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
    with_value,
)

from harness.checks import judge
from harness.diagnosis.engine import broken_laws
from harness.diagnosis.hypothesis import NOT_TESTED
from harness.diagnosis.norms import other_norms
from harness.diagnosis.optimizer import _rates_and_decays
from harness.diagnosis.zero import _places, not_gathered, nothing_cut, shifted_gradients
from harness.evidence.records import Collective
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.plan.slices import numel
from harness.spec.traits import FlatLayout, TrainerTraits

NINE = replace(ADAMW, global_batch=9)


def zero(stage: str) -> Trial:
    return trial_of(zero_case(stage))


def zero_case(stage: str):
    return tiny_case(dims(shard=3), NINE, wrapper=stage, model=UNEVEN)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_zero_that_ran_as_ddp_is_named(stage: str) -> None:
    ran = tiny_case(dims(replicate=3), NINE, model=UNEVEN)
    told, proven, *_ = diagnosis_text(trial_of(zero_case(f"zero{stage}"), ran)).splitlines()
    assert told == f"ZeRO-{stage} ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"
    assert proven.endswith("6 of 6 broken laws hold, and none that held breaks")


def test_no_other_wrapper_may_have_run_as_zero_0_and_zero_only_where_memory_is_otherwise() -> None:
    (one,) = nothing_cut(zero("zero2"), broken("memory"))
    assert (one.fitted, one.lines) == (1, (("memory", "here: expected this, observed that"),))
    assert list(nothing_cut(zero("zero2"), broken("traffic"))) == []
    assert list(nothing_cut(trial_of(tiny_case("ddp_2")), broken("memory"))) == []


def test_places_of_a_part_are_those_of_its_vector_behind_the_vectors_before() -> None:
    trial = zero("zero2")
    (unit,) = trial.plan.flat
    fqn = "layers.0.attention.wq.weight"
    size, (start,) = numel(tuple((0, end) for end in trial.plan.shapes[fqn])), unit.starts[fqn]
    two = replace(trial, plan=replace(trial.plan, flat=(replace(unit, starts={}), unit)))
    assert _places(trial, fqn, ((3, 5),)).tolist() == [start + 3, start + 4]
    assert _places(trial, fqn, ((size - 1, size),)).tolist() == [start + size - 1]
    assert _places(two, fqn, ((3, 5),)).tolist() == [unit.numel + 8 + start + at for at in (3, 4)]


def test_zero_beside_tensor_parallel_that_ran_as_ddp_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1"), tiny_case(dims(replicate=2, tp=2)))
    told, proven, *_ = diagnosis_text(trial).splitlines()
    assert proven.endswith("6 of 6 broken laws hold, and none that held breaks")
    assert told == "ZeRO-1 ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"


def test_norm_gradients_not_summed_over_tp_are_named_where_a_rank_has_a_part_of_them_or_nothing() -> None:
    def share(trial: Trial, rank: int) -> Trial:
        for step in trial.ranks[rank].steps:
            parts = {fqn: part for fqn, part in step.gradients.items() if part.size}
            entries = {fqn: np.linspace(0.2, 0.7, part.size) for fqn, part in parts.items() if "norm" in fqn}
            own = {fqn: parts[fqn] * (1 - share if rank % 2 else share) for fqn, share in entries.items()}
            trial = with_step(trial, rank, step.step, gradients=parts | own)
        return trial

    told = first_line(with_every_rank(trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1")), share))
    assert told == "gradients of norm weights are not summed over tp: 3 parameters wrong, all others right"


def test_a_norm_counts_replicas_again_only_along_axes_that_have_any() -> None:
    def along(wrapper: str | None) -> set[str]:
        trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper=wrapper))
        return {text.split()[-1] for text, _ in other_norms(trial) if "counts every replica" in text}

    assert along("zero1") == {"tp"}
    assert along(None) == {"tp"}


def test_a_stage_that_ran_as_another_is_named() -> None:
    case = replace(zero_case("zero2"), training=replace(NINE, global_batch=12))
    case = replace(case, features=replace(case.features, accumulation=2))
    ran = replace(case, features=replace(case.features, wrapper="zero1"))
    assert first_line(trial_of(case, ran)) == "wrapper zero2 is requested, zero1 is observed"


def test_parameters_that_stay_with_the_rank_that_stepped_on_them_are_named() -> None:
    def alone(trial: Trial, rank: int) -> Trial:
        left = tuple(call for call in trial.ranks[rank].collectives if call.op != "all_gather")
        trial = with_rank(trial, rank, collectives=left)
        fqn = next(fqn for fqn, part in trial.plan.state_slices[rank].items() if not numel(part))
        return with_value(trial, rank, 3, "parameters", fqn, lambda value: value + 1)

    told = diagnosis_text(with_every_rank(zero("zero1"), alone))
    gathered = "parameters updated by other ranks are not gathered: no all_gather ran over [0-2]"
    assert told.startswith(gathered + " after the optimizer\n")
    assert "not explained" not in told and "also seen" not in told


OF_OLD_VALUES = ("replica_agreement", "traffic", "loss", "gradients", "grad_norm", "reported_loss")


@pytest.mark.parametrize(("lost", "told"), [((2,), True), ((2, 3), True), ((3,), False), ((), False)])
def test_parameters_are_not_gathered_late_where_the_forward_pass_of_the_second_step_gathers_none(
    lost: tuple[int, ...], told: bool
) -> None:
    def late(call: Collective) -> Iterator[Collective]:
        if call.op == "all_gather" and call.step + 1 not in lost:
            yield replace(call, step=call.step + 1, phase="forward")
        elif call.op != "all_gather":
            yield call

    plan = make_plan(zero_case("zero1"), TrainerTraits(zero_gathers_late=True))
    trial = with_every_rank(replace(zero("zero1"), plan=plan), lambda t, rank: with_collectives(t, rank, late))
    fact = seen(not_gathered, trial, *OF_OLD_VALUES)
    assert (fact is not None) == told
    if fact is not None:
        where = "no all_gather ran over [0-2] in the next step's forward pass"
        assert fact.cause.text == f"parameters updated by other ranks are not gathered: {where}"
        assert fact.laws == OF_OLD_VALUES and [*fact.lines][-1] == NOT_TESTED[0]
    assert seen(not_gathered, trial, "traffic") is seen(not_gathered, trial, "replica_agreement") is None


def test_a_rate_is_told_by_the_part_that_each_rank_steps_on() -> None:
    def doubled(trial: Trial, rank: int) -> Trial:
        start, moved = trial.start_of(rank), trial.ranks[rank].steps[0].parameters
        return with_step(trial, rank, 1, parameters={fqn: 2 * value - start[fqn] for fqn, value in moved.items()})

    assert [one.cause.text for one in _rates_and_decays(with_every_rank(zero("zero1"), doubled))] == [
        "the learning rate of every parameter is 0.01 in step 1, the peak, as without a schedule, requested 0.005",
        "every optimizer step is 2 times what it should be, as with 2 times the learning rate",
    ]


def test_a_part_without_gradients_tells_nothing_of_the_rate() -> None:
    trial = zero("zero1")
    assert list(_rates_and_decays(with_step(trial, 0, 1, gradients={}))) == []


GATED = tuple(f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w3"))
FUSED = FlatLayout(
    order=(*((fqn,) for fqn in UNEVEN.parameter_shapes() if fqn not in GATED), GATED * 2), reverse=True, starts=8
)
"""Blocks of two parameters alternate, and between tensors there is padding."""


@pytest.mark.parametrize("layout", [FlatLayout(), FUSED])
@pytest.mark.parametrize(
    ("by", "where"),
    [(1, "1 element too early"), (-3, "3 elements too late"), (8, "8 elements too early"), (-8, "8 elements too late")],
)
def test_parts_of_the_gradients_that_begin_at_another_place_are_named(by: int, where: str, layout: FlatLayout) -> None:
    def shifted(trial: Trial, rank: int) -> Trial:
        (unit,), held = trial.plan.flat, trial.plan.gradient_slices[rank]
        vector, place = np.zeros(unit.numel + 8), dict[str, np.ndarray]()
        for fqn, starts in unit.starts.items():
            full = trial.reference_step(1).gradients[fqn]
            place[fqn] = np.concatenate([start + np.arange(full.size // len(starts)) for start in starts])
            vector[place[fqn] + by] = full
        parts = {fqn: vector[place[fqn]][start:stop] for fqn, ((start, stop),) in held.items()}
        return with_step(trial, rank, 1, gradients=parts)

    traits = TrainerTraits(zero_layout=layout)
    trial = with_every_rank(replace(zero("zero2"), plan=make_plan(zero_case("zero2"), traits)), shifted)
    (fact,) = shifted_gradients(trial, failed := broken_laws(judge(trial)))
    assert fact.cause.text == f"each rank takes its part of ZeRO's gradient vector {where}"
    assert fact.laws == ("gradients", "loss", "gradients", "grad_norm", "reported_loss")
    assert [*fact.lines][-1] == NOT_TESTED[0]
    assert list(shifted_gradients(zero("zero2"), failed)) == []
    assert seen(shifted_gradients, trial, "loss") is None
    held = trial.ranks[1].steps[0].gradients
    fqn = next(fqn for fqn, part in trial.plan.gradient_slices[1].items() if numel(part))
    for fewer in ({**held, fqn: held[fqn][1:]}, {f: g for f, g in held.items() if f != fqn}):
        assert seen(shifted_gradients, with_step(trial, 1, 1, gradients=fewer), "gradients") is None
