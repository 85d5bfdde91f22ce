"""What is said where ZeRO cuts nothing, does not gather what it stepped on, or cuts at another place."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    broken,
    diagnosis_text,
    dims,
    first_line,
    here,
    kinds,
    seen,
)
from harness.diagnosis.zero import (
    FOLLOWING,
    _as_replicas,
    _places,
    _shifted,
    not_gathered,
    nothing_cut,
    shifted_gradients,
)
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
from harness.checks.update import observed_norm
from harness.diagnosis.engine import failing_checks
from harness.diagnosis.hypothesis import NOT_TESTED, Fact, Hypothesis
from harness.diagnosis.recipe import wrong_recipe
from harness.diagnosis.reported import norms
from harness.diagnosis.words import finding_line
from harness.evidence.records import Collective
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.plan.slices import FlatUnit, numel
from harness.spec.case import Case
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
    assert proven.endswith("6 of 6 failing checks pass, and no passing check fails")


def test_zero_beside_tensor_parallel_that_ran_as_ddp_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1"), tiny_case(dims(replicate=2, tp=2)))
    told, proven, *_ = diagnosis_text(trial).splitlines()
    assert proven.endswith("6 of 6 failing checks pass, and no passing check fails")
    assert told == "ZeRO-1 ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"


@pytest.mark.parametrize(("stage", "which"), [("zero1", "ZeRO-1"), ("zero2", "ZeRO-2"), ("zero3", ""), ("ddp", "")])
def test_only_of_zero_that_has_whole_parameters_it_is_asked_whether_it_cuts_nothing(stage: str, which: str) -> None:
    trial = trial_of(tiny_case("ddp_2" if stage == "ddp" else "fsdp_2", wrapper=stage))
    text = f"{which} ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"
    lines = (here("memory"),)
    wanted = [Hypothesis(Cause("another stage of ZeRO", text), _as_replicas, 1, lines)]
    assert list(nothing_cut(trial, broken("memory"))) == (wanted if which else [])
    assert list(nothing_cut(trial, broken("traffic"))) == []


@pytest.mark.parametrize("defer_sync", [True, False])
def test_zero_that_cuts_nothing_has_vectors_of_its_own_and_all_else_of_ddp(defer_sync: bool) -> None:
    def case_of(wrapper: str, **degrees: int) -> Case:
        training = replace(ADAMW, variable_length=True)
        return tiny_case(dims(tp=2, **degrees), training, wrapper=wrapper, accumulation=2, defer_sync=defer_sync)

    trial, ddp = trial_of(case_of("zero1", shard=2)), case_of("ddp", replicate=2)
    other, wanted = _as_replicas(trial), make_plan(ddp)
    assert other.case == ddp and other.plan.slices == trial.plan.slices and other.plan.flat == trial.plan.flat
    for key in ("dims", "groups", "gradient_slices", "state_slices", "gradient_bytes", "state_bytes"):
        assert getattr(other.plan, key) == getattr(wanted, key), key
    for rank, step in itertools.product(range(4), (1, 2)):
        of_zero, of_ddp = (Counter(plan.flows_of(rank, step)) for plan in (other.plan, wanted))
        assert of_zero == of_ddp, (rank, step)


def test_norm_gradients_not_summed_over_tp_are_named_where_a_rank_has_a_part_of_them_or_nothing() -> None:
    def share(trial: Trial, rank: int) -> Trial:
        for step in trial.ranks[rank].steps:
            parts = {fqn: part for fqn, part in step.gradients.items() if part.size}
            entries = {fqn: np.linspace(0.2, 0.7, part.size) for fqn, part in parts.items() if "norm" in fqn}
            own = {fqn: parts[fqn] * (1 - share if rank % 2 else share) for fqn, share in entries.items()}
            trial = with_step(trial, rank, step.step, gradients=parts | own)
        return trial

    assert kinds(with_every_rank(trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1")), share)) == ("norms not summed",)


@pytest.mark.parametrize("wrapper", ["zero1", None])
def test_a_norm_counts_replicas_again_only_along_axes_that_have_any(wrapper: str | None) -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper=wrapper))
    counted = {d[0][1]: number(0, 1) for d, number in norms(trial) if d[0][0] == "with replicas counted along"}
    assert {axis for axis, norm in counted.items() if not math.isclose(norm, observed_norm(trial, 1))} == {"tp"}


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
    assert "not explained" not in told and "still failing" not in told and "also seen" not in told
    assert seen(not_gathered, zero("zero1"), *OF_OLD_VALUES) is None


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
        text = f"parameters updated by other ranks are not gathered: {where}"
        lines = (here("replica_agreement"), *NOT_TESTED)
        assert fact == Fact(Cause("parameters not gathered", text), OF_OLD_VALUES, lines)
    assert seen(not_gathered, trial, "traffic") is seen(not_gathered, trial, "replica_agreement") is None


def test_elements_of_the_second_of_two_vectors_lie_too_far_behind_the_first_to_be_taken_for_its() -> None:
    norm, wq, w1 = "norm.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"
    units = (FlatUnit({norm: (3,)}, 10), FlatUnit({wq: (8,), w1: (0, 16)}, 24))
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1"))
    trial = replace(trial, plan=replace(trial.plan, flat=units))
    for fqn, part, wanted in (
        (norm, (1, 4), [4, 5, 6]),
        (wq, (2, 5), [42, 43, 44]),
        (wq, (10, 16), [42, 43, 44, 45, 46, 47]),
        (w1, (22, 27), [38, 39, 48, 49, 50]),
    ):
        found = _places(trial, fqn, (part,))
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == np.int64


def test_gradients_are_known_by_their_place_only_where_there_are_enough_of_them() -> None:
    trial, places = zero("zero2"), np.arange(17)
    vector = np.arange(20.0)
    assert _shifted(trial, vector[3:], vector[:17], places, -3)
    assert not _shifted(trial, vector[3:], vector[:17], places, 3)
    assert not _shifted(trial, vector[3:19], vector[:16], places[:16], -3)


def test_a_rate_is_told_by_the_part_that_each_rank_steps_on() -> None:
    def doubled(trial: Trial, rank: int) -> Trial:
        start, moved = trial.start_of(rank), trial.ranks[rank].steps[0].parameters
        return with_step(trial, rank, 1, parameters={fqn: 2 * value - start[fqn] for fqn, value in moved.items()})

    found = [one.cause for one in wrong_recipe(with_every_rank(zero("zero1"), doubled), broken("update"))]
    assert ("learning rate", (("lr", 0.02),)) in [(cause.kind, cause.details) for cause in found]


def test_a_part_without_gradients_tells_nothing_of_the_rate() -> None:
    trial = with_step(zero("zero1"), 0, 1, gradients={})
    assert not [one for one in wrong_recipe(trial, broken("update")) if one.cause.kind == "learning rate"]


GATED = tuple(f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w3"))
FUSED = FlatLayout(
    order=(*((fqn,) for fqn in UNEVEN.parameter_shapes() if fqn not in GATED), GATED * 2), reverse=True, starts=8
)
"""Blocks of two parameters alternate, and between tensors there is padding."""


@pytest.mark.parametrize("layout", [FlatLayout(), FUSED])
@pytest.mark.parametrize(
    ("by", "where"),
    [(1, "1 element too early"), (-3, "3 elements too late"), (8, "8 elements too early"), (-8, "8 elements too late")]
    + [(9, "")],
)
def test_parts_of_the_gradients_that_begin_at_another_place_are_named(by: int, where: str, layout: FlatLayout) -> None:
    def shifted(trial: Trial, rank: int) -> Trial:
        (unit,), held = trial.plan.flat, trial.plan.gradient_slices[rank]
        vector, place = np.zeros(unit.numel + 9), dict[str, np.ndarray]()
        for fqn, starts in unit.starts.items():
            full = trial.reference_step(1).gradients[fqn]
            place[fqn] = np.concatenate([start + np.arange(full.size // len(starts)) for start in starts])
            vector[place[fqn] + by] = full
        parts = {fqn: vector[place[fqn]][start:stop] for fqn, ((start, stop),) in held.items()}
        return with_step(trial, rank, 1, gradients=parts)

    traits = TrainerTraits(zero_layout=layout)
    trial = with_every_rank(replace(zero("zero2"), plan=make_plan(zero_case("zero2"), traits)), shifted)
    failed = failing_checks(judge(trial))
    text = f"each rank takes its part of ZeRO's gradient vector {where}"
    lines = (finding_line(failed["gradients"]), *NOT_TESTED)
    told = Fact(Cause("gradients shifted", text), ("gradients", *FOLLOWING), lines)
    assert list(shifted_gradients(trial, failed)) == ([told] if where else [])
    assert list(shifted_gradients(zero("zero2"), failed)) == []
    assert list(shifted_gradients(trial_of(tiny_case("ddp_2")), failed)) == []
    assert seen(shifted_gradients, trial, "loss") is None
    held = trial.ranks[1].steps[0].gradients
    fqn = next(fqn for fqn, part in trial.plan.gradient_slices[1].items() if numel(part))
    for fewer in ({**held, fqn: held[fqn][1:]}, {f: g for f, g in held.items() if f != fqn}):
        assert seen(shifted_gradients, with_step(trial, 1, 1, gradients=fewer), "gradients") is None
