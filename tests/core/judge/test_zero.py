"""ZeRO cuts optimizer state, gradients and parameters apart: literal evidence of each stage, and of what goes wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked import findings, where
from literal import (
    ADAMW,
    APART,
    SGD,
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_value,
)

from harness.core.case.case import Case, CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.features import ZERO
from harness.core.case.traits import FlatLayout, TrainerTraits
from harness.core.case.validation import validate
from harness.core.checks import judge
from harness.core.evidence.records import Collective
from harness.core.judge.finding import Limit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import FlatUnit, flat_slices

THREE = replace(ADAMW, global_batch=9)
LATE = replace(APART, zero_gathers_late=True)
OTHER_RANKS = "layers.0.feed_forward.w3.weight"
"""Of which rank 0's optimizer steps on nothing."""


def zero_case(stage: str, **changes: object) -> Case:
    return tiny_case(ParallelDims(dp_shard=3), THREE, wrapper=stage, model=UNEVEN, **changes)


def broken(trial: Trial) -> set[str]:
    return {result.check for result in judge(trial) if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)}


@pytest.mark.parametrize("stage", ZERO)
def test_a_stage_that_cuts_what_it_should_fails_no_check(stage: str) -> None:
    trial = trial_of(zero_case(stage))
    assert broken(trial) == set()
    examined = {result.check: result.examined for result in judge(trial)}
    assert min(examined[check] for check in ("gradients", "update", "memory", "traffic", "shard_contents")) > 0


def test_what_another_rank_steps_on_must_be_the_same_on_all() -> None:
    """Each rank's own part is right; what rank 0 received of another's is old."""
    trial = trial_of(zero_case("zero1"))
    trial = with_value(trial, 0, 2, "parameters", OTHER_RANKS, lambda value: 0 * value)
    assert judged("update", trial).verdict is Verdict.PASS
    assert judged("replica_agreement", trial).verdict is Verdict.FAIL


def test_what_a_rank_steps_on_is_judged_within_the_whole_parameter() -> None:
    trial = trial_of(zero_case("zero2"))
    trial = with_every_rank(
        trial, lambda t, r: with_value(t, r, 2, "parameters", OTHER_RANKS, lambda value: 1.01 * value)
    )
    assert judged("replica_agreement", trial).verdict is Verdict.PASS
    assert {finding.rank for finding in judged("update", trial).findings} == {2}


def test_gradients_of_a_part_that_is_another_ranks_are_a_finding() -> None:
    """As large as it should be, and one place further on."""
    trial = trial_of(zero_case("zero2"))
    full = trial.reference_step(1).gradients[OTHER_RANKS]
    ((start, stop),) = trial.plan.gradient_slices[2][OTHER_RANKS]
    shifted = trial.ranks[2].steps[0].gradients | {OTHER_RANKS: full[[*range(start + 1, stop), start]]}
    trial = with_step(trial, 2, 1, gradients=shifted)
    assert judged("gradients", trial).verdict is Verdict.FAIL


def test_gradients_that_are_kept_whole_are_too_much_for_zero2_and_not_for_zero1() -> None:
    for stage, verdict in (("zero1", Verdict.PASS), ("zero2", Verdict.FAIL)):
        trial = trial_of(zero_case(stage))
        memory = trial.ranks[0].steps[0].memory
        trial = with_step(trial, 0, 1, memory=memory | {"gradients": memory["parameters"]})
        assert judged("memory", trial).verdict is verdict, stage


def test_optimizer_state_that_is_kept_whole_is_a_finding() -> None:
    trial = trial_of(zero_case("zero1"))
    memory = trial.ranks[1].steps[0].memory
    trial = with_step(trial, 1, 1, memory=memory | {"optimizer_state": 2 * memory["parameters"]})
    assert [where(finding) for finding in judged("memory", trial).findings] == [(1, 1, "optimizer_state")]


def test_parameters_that_are_not_gathered_behind_the_optimizer_are_missed() -> None:
    trial = trial_of(zero_case("zero1"))
    kept = tuple(call for call in trial.ranks[0].collectives if (call.op, call.step) != ("all_gather", 2))
    (finding,) = findings("traffic", with_rank(trial, 0, collectives=kept))
    assert where(finding) == (0, 2, "all_gather")
    assert (finding.axis, finding.group, finding.phase) == ("dp_shard", (0, 1, 2), "outside")
    assert (finding.expected, finding.observed, finding.unit) == (Limit(least=1536), 0, "bytes")


def gathered_late(*, but: int = 0) -> Trial:
    """What was gathered behind each step but the last, and but one, is gathered in the next one's forward pass."""
    trial = trial_of(zero_case("zero1"), traits=LATE)
    kept = (but, trial.case.steps[-1])

    def moved(call: Collective) -> Collective:
        stays = call.op != "all_gather" or call.step in kept
        return call if stays else replace(call, step=call.step + 1, phase="forward")

    return with_every_rank(trial, lambda t, r: with_rank(t, r, collectives=tuple(map(moved, t.ranks[r].collectives))))


def test_parameters_may_be_gathered_in_the_next_steps_forward_pass_and_behind_the_last_step() -> None:
    assert broken(gathered_late()) == set()


def test_parameters_that_are_gathered_at_once_where_that_is_to_be_late_are_found() -> None:
    places = [where(finding) for finding in judged("traffic", gathered_late(but=1)).findings if finding.rank == 0]
    assert places == [(0, 1, "bytes moved"), (0, 2, "all_gather")]


def test_parameters_that_are_not_gathered_behind_the_last_step_are_missed() -> None:
    trial = gathered_late()
    kept = tuple(call for call in trial.ranks[0].collectives if (call.op, call.phase) != ("all_gather", "other"))
    (finding,) = findings("traffic", with_rank(trial, 0, collectives=kept))
    assert (*where(finding), finding.group) == (0, trial.case.steps[-1], "all_gather", (0, 1, 2))


def test_a_rank_that_gives_no_gradient_of_its_part_is_missing_one() -> None:
    trial = trial_of(zero_case("zero1"))
    gradients = dict(trial.ranks[2].steps[0].gradients)
    assert all(part.size for fqn, part in gradients.items() if fqn == OTHER_RANKS)
    del gradients[OTHER_RANKS]
    assert judged("completed", with_step(trial, 2, 1, gradients=gradients)).verdict is Verdict.FAIL
    of_others = {fqn: part for fqn, part in trial.ranks[0].steps[0].gradients.items() if part.size}
    assert judged("completed", with_step(trial, 0, 1, gradients=of_others)).verdict is Verdict.PASS


def test_a_vector_may_begin_with_the_last_parameter_and_have_larger_parts() -> None:
    """As Megatron lays its buffer: 192 elements in parts of 64 become parts of 128 with a multiple of 128."""
    traits = TrainerTraits(zero_layout=FlatLayout(reverse=True, starts=8, parts=128))
    plan = make_plan(zero_case("zero1"), traits)
    (unit,) = plan.flat
    assert unit.starts["output.weight"] == (0,) and unit.starts["norm.weight"] == (32,)
    assert plan.gradient_slices[0]["output.weight"] == ((0, 28),)
    assert plan.gradient_slices[2]["tok_embeddings.weight"] == ((28, 28),)
    assert plan.state_bytes[0][1] == 128 * 8


def test_a_part_of_a_fused_tensor_is_cut_in_its_own_order() -> None:
    """Two blocks of 8 elements of w1, and between them one of w3, half of which each of two ranks has."""
    unit, shapes = FlatUnit({"w1": (0, 16), "w3": (8,)}, 24), {"w1": (16,), "w3": (8,)}
    cut = [flat_slices([unit], shapes, 2, index) for index in range(2)]
    assert cut == [{"w1": ((0, 8),), "w3": ((0, 4),)}, {"w1": ((8, 16),), "w3": ((4, 8),)}]


def test_the_vector_follows_the_trainers_tensors_and_is_padded_as_a_whole() -> None:
    """As Megatron: of what is fused the parts alternate, and 192 elements become a multiple of 128 and of the ranks' number."""
    case = zero_case("zero1")
    names = list(case.model.parameter_shapes())
    gated = tuple(f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w3"))
    order = (*((name,) for name in names if name not in gated), gated * 2)
    plan = make_plan(case, TrainerTraits(zero_layout=FlatLayout(order=order, whole=128)))
    (unit,) = plan.flat
    assert unit.starts[gated[0]] == (unit.numel - 40, unit.numel - 20)
    assert unit.starts[gated[1]] == (unit.numel - 30, unit.numel - 10)
    assert [unit.elements_per_rank(degree) * degree for degree in (2, 3)] == [256, 384]


WO = "layers.0.attention.wo.weight"


def with_tp(**changes: object) -> Case:
    return tiny_case(ParallelDims(dp_shard=2, tp=2), wrapper="zero1", **changes)


def test_each_tensor_parallel_rank_cuts_a_vector_of_what_it_has() -> None:
    """Of 16 elements of wo each tp rank has 8, one's behind the other's, and 4 of the norm; of those 12 a rank cuts 6."""
    unit, shapes = FlatUnit({WO: (0,), "norm.weight": (8,)}, 12), {WO: (16,), "norm.weight": (4,)}
    cut = {(tp, index): flat_slices([unit], shapes, 2, index, (2, tp)) for tp in range(2) for index in range(2)}
    assert cut == {
        (0, 0): {WO: ((0, 6),), "norm.weight": ((0, 0),)},
        (0, 1): {WO: ((6, 8),), "norm.weight": ((0, 4),)},
        (1, 0): {WO: ((8, 14),), "norm.weight": ((0, 0),)},
        (1, 1): {WO: ((14, 16),), "norm.weight": ((0, 4),)},
    }
    plan = make_plan(with_tp())
    assert [plan.slices[rank][WO] for rank in range(4)] == [((0, 8),), ((8, 16),)] * 2


def test_stages_one_of_tensor_parallel_ranks_fails_no_check() -> None:
    trial = trial_of(with_tp())
    assert broken(trial) == set()
    examined = {result.check: result.examined for result in judge(trial)}
    assert (
        min(examined[check] for check in ("gradients", "update", "memory", "traffic", "shard_contents", "placements"))
        > 0
    )


def test_columns_of_a_row_parallel_weight_in_another_tp_ranks_place_are_a_finding() -> None:
    """As large as they should be, of the right parameter, and those of the other tp rank."""
    trial = trial_of(with_tp())
    other = trial.ranks[1].steps[0].gradients
    trial = with_step(trial, 0, 1, gradients=trial.ranks[0].steps[0].gradients | {WO: other[WO]})
    assert {where(finding) for finding in judged("gradients", trial).findings} == {(0, 1, WO)}


def test_a_weight_that_claims_to_be_whole_on_tensor_parallel_ranks_is_a_finding() -> None:
    trial = with_parameter(trial_of(with_tp()), 1, WO, mesh=None, placements=())
    (finding,) = findings("placements", trial)
    assert (where(finding), finding.expected, finding.observed) == (
        (1, WO),
        "dim 1 over [0,1]",
        "whole on every rank",
    )


def test_master_weights_are_a_copy_of_the_ranks_part() -> None:
    plain, copied = (make_plan(zero_case("zero1"), TrainerTraits(master_weights=kept)) for kept in (False, True))
    assert copied.spare_bytes[0] - plain.spare_bytes[0] == plain.state_bytes[0][1] == 512


@pytest.mark.parametrize(
    ("dims", "changes", "reason"),
    [
        (ParallelDims(dp_shard=2, dp_replicate=2), {"wrapper": "zero1"}, "with dp_replicate 2"),
        (ParallelDims(dp_shard=2, tp=2), {"wrapper": "zero2"}, "with tp 2"),
        (ParallelDims(dp_shard=2, tp=2), {"wrapper": "zero1", "model": UNEVEN}, "vectors of unequal ranks"),
        (ParallelDims(dp_replicate=2), {"wrapper": "zero3"}, "with dp_replicate 2"),
        (ParallelDims(dp_shard=2), {"wrapper": "zero2", "accumulation": 2, "defer_sync": False}, "leave it out"),
    ],
)
def test_what_zero_is_not_planned_with_is_refused(dims: ParallelDims, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CaseError, match=reason):
        validate(tiny_case(dims, SGD, **changes), None, "zero.yaml")
