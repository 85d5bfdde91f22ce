"""Another parallel layout than the one requested, named from the slices that ranks hold. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from diagnosed import EMBEDDING, NORM, broken, dims, expect, expect_first, first_line, fsdp_4, proposed, seen, seen_text
from literal import (
    ADAMW,
    TINY,
    UNEVEN,
    tiny_case,
    trial_of,
    with_parameter,
    with_rank,
    with_step,
    with_updates_that_follow,
    without_rank,
)

from harness.checks import shard_contents
from harness.diagnosis.layout import Layout, _fsdp_over_tp, _part_text, other_layouts, other_slices, renamed
from harness.evidence.step import AfterForward
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.plan.plan import Kept, Plan
from harness.plan.slices import slices_of_rank
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

WIDE = replace(TINY, dim=16, vocab_size=16, ffn_dim=16)


# ---- layout


def ran_as(requested: ParallelDims, ran: ParallelDims) -> Trial:
    training = replace(ADAMW, global_batch=16)
    return trial_of(tiny_case(requested, training, model=WIDE), tiny_case(ran, training, model=WIDE))


def cut_as(requested: ParallelDims, ran: ParallelDims, rank_of: list[int]) -> Trial:
    """Rank r holds what rank_of[r] would hold under `ran`; tensors move as planned."""
    trial = trial_of(tiny_case(requested, model=WIDE))
    for rank, other in enumerate(rank_of):
        part = {f: cut(s) for f, s in slices_of_rank(ran, other, trial.plan.shapes).items()}
        tensors = [(t, trial.reference.weights[t.fqn][part[t.fqn]]) for t in trial.ranks[rank].parameters]
        tensors = tuple(replace(t, value=value) for t, value in tensors)
        trial = with_rank(trial, rank, parameters=tensors)
        for step in trial.reference.steps:
            gradients = {f: full[part[f]] for f, full in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=gradients)
    return with_updates_that_follow(trial)


def named(trial: Trial) -> str:
    """The first layout that is put to the test; under it every rank holds what it should."""
    first = next(other_layouts(trial, broken("shard_contents")))
    assert shard_contents.check(first.assume(trial)).verdict is Verdict.PASS
    return cause_line(first.cause)


def cut(part) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in part)


def test_hsdp_that_ran_as_fsdp() -> None:
    expect(
        ran_as(dims(2, 2), dims(1, 4)),
        """\
HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times
  assuming this: 5 of 5 failing checks pass, and no passing check fails
  shard groups: expected [0,1] [2,3]   observed [0-3]
  replicate groups: expected [0,2] [1,3]   observed none in use (the groups exist, no collective ran over them)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/2 of dim 0 [0:8], observed 1/4 of dim 0 [0:4]
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  traffic: gradients: all_reduce over dp_replicate in backward: expected 9.408 kB per step, observed 0 B
  loss, gradients: equal to the reference within 2.2e-16: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_hsdp_that_ran_as_fsdp_over_16_ranks() -> None:
    expect(
        ran_as(dims(2, 8), dims(1, 16)),
        """\
HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 8, replicated 2 times
  assuming this: 5 of 5 failing checks pass, and no passing check fails
  shard groups: expected [0-7] [8-15]   observed [0-15]
  replicate groups: expected [0,8] [1,9] .. [7,15]   observed none in use (the groups exist, no collective ran over them)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/8 of dim 0 [0:2], observed 1/16 of dim 0 [0:1]
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  traffic: gradients: all_reduce over dp_replicate in backward: expected 2.352 kB per step, observed 0 B
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_hsdp_that_ran_as_ddp() -> None:
    expect_first(
        ran_as(dims(2, 2), dims(4, 1)),
        """HSDP ran as DDP: every dp rank holds whole parameters, requested 2, replicated 2 times""",
    )


def test_fsdp_that_ran_as_ddp() -> None:
    expect(
        ran_as(dims(1, 2), dims(2, 1)),
        """\
FSDP ran as DDP: every dp rank holds whole parameters, requested 2
  assuming this: 6 of 6 failing checks pass, and no passing check fails
  shard groups: expected [0,1]   observed none in use as this axis (what ran over the same ranks is of another)
  contents: 12 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/2 of dim 0 [0:8], observed all
  traffic: parameters: all_gather over dp_shard in forward: expected 18.82 kB per step, observed 0 B
  traffic: parameters: all_gather over dp_shard in backward: expected 16.64 kB per step, observed 0 B
  traffic: gradients: reduce_scatter over dp_shard in backward: expected 18.82 kB per step, observed 0 B
  loss, gradients: equal to the reference within 2.2e-16: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_ddp_that_ran_as_fsdp() -> None:
    expect_first(
        ran_as(dims(4), dims(1, 4)),
        """DDP ran as FSDP: parameters are sharded over 4 ranks, requested whole parameters on each of 4 ranks""",
    )


def test_fsdp_that_ran_as_hsdp() -> None:
    expect_first(
        ran_as(dims(1, 4), dims(2, 2)),
        """FSDP ran as HSDP: parameters are sharded over 2 ranks and replicated 2 times, requested 4""",
    )


def test_degrees_of_replicate_and_shard_exchanged() -> None:
    expect_first(
        ran_as(dims(2, 4), dims(4, 2)),
        """dp_replicate and dp_shard are swapped: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times""",
    )


@pytest.mark.parametrize(
    ("requested", "ran", "rank_of", "told"),
    [
        (
            dims(2, 4),
            dims(4, 2),
            [0, 0, 0, 0, 1, 1, 1, 1],
            "dp_replicate and dp_shard are swapped: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times",
        ),
        (
            dims(1, 2, 2),
            dims(1, 4),
            [0, 1, 2, 3],
            "TP not applied, FSDP over dp_shard x tp in its place: parameters are sharded over 4 ranks, requested 2 and tp 2",
        ),
        (dims(tp=2), dims(), [0, 0], "TP not applied: every rank of a tp group holds whole weights, requested tp 2"),
        (
            dims(1, 2, 2),
            dims(1, 2),
            [0, 0, 1, 1],
            "TP not applied: every rank of a tp group holds whole weights, requested tp 2",
        ),
        (
            dims(1, 2, 2),
            dims(),
            [0, 0, 0, 0],
            "TP not applied: every rank of a tp group holds whole weights, requested tp 2; FSDP ran as DDP: every dp rank holds whole parameters, requested 2",
        ),
        (
            dims(1, 2, 2),
            dims(tp=2),
            [0, 1, 0, 1],
            "FSDP ran as DDP: every dp rank holds whole parameters, requested 2",
        ),
    ],
)
def test_what_ranks_hold_is_fitted_by_a_layout(requested, ran, rank_of: list[int], told: str) -> None:
    assert named(cut_as(requested, ran, rank_of)) == told


def place_in(order: tuple[str, ...], requested: ParallelDims) -> list[int]:
    """Which rank of the plan stands where each rank stands when axes are laid out in another order."""
    axes = ("dp_replicate", "dp_shard", "tp")
    degrees = [getattr(requested, axis) for axis in order]
    found = []
    for place in itertools.product(*map(range, degrees)):
        at = dict(zip(order, place, strict=True))
        found.append((at["dp_replicate"] * requested.dp_shard + at["dp_shard"]) * requested.tp + at["tp"])
    assert set(order) == set(axes)
    return found


@pytest.mark.parametrize("requested", [dims(2, 2, 2), dims(2, 1, 4), dims(1, 4, 2), dims(2, 4, 1)], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(("dp_replicate", "dp_shard", "tp")))[1:], ids="-".join)
def test_axes_in_the_wrong_order(order: tuple[str, ...], requested: ParallelDims) -> None:
    shown = [axis for axis in order if getattr(requested, axis) > 1]
    wanted = [axis for axis in ("dp_replicate", "dp_shard", "tp") if axis in shown]
    if shown == wanted or "dp_shard" not in shown and "tp" not in shown:
        return
    trial = trial_of(tiny_case(requested, model=WIDE))
    places = place_in(order, requested)
    other = renamed(trial, {place: rank for rank, place in enumerate(places)})
    assert other.ranks[1].rank == 1 and len(other.ranks) == len(trial.ranks)
    assert first_line(other) == (
        f"axes in the wrong order: parameters lie as on a mesh ({', '.join(shown)}), requested ({', '.join(wanted)})"
    )


def test_renamed_twice_is_as_it_was() -> None:
    trial = trial_of(tiny_case(dims(2, 2, 2)))
    names = dict(enumerate(place_in(("tp", "dp_shard", "dp_replicate"), trial.case.dims)))
    again = renamed(renamed(trial, names), {new: old for old, new in names.items()})
    for rank, evidence in trial.ranks.items():
        other = again.ranks[rank]
        assert (other.rank, other.groups, other.collectives) == (rank, evidence.groups, evidence.collectives)
        assert other.structure == evidence.structure
        assert [tensor.mesh for tensor in other.parameters] == [tensor.mesh for tensor in evidence.parameters]


def test_a_module_that_fsdp_left_out() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in (0, 1):
        trial = with_parameter(trial, rank, NORM, value=trial.reference.weights[NORM])
    assert named(trial) == (
        "FSDP is not applied to 1 of 12 parameters (norm.weight): every rank of a group holds them whole"
    )


def test_what_fsdp_left_out_is_in_no_unit_and_whole_after_forward() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in (0, 1):
        trial = with_parameter(trial, rank, NORM, value=trial.reference.weights[NORM])
    plan = next(other_layouts(trial, broken("shard_contents"))).assume(trial).plan
    (size,) = trial.plan.shapes[NORM]
    assert NORM in trial.plan.units[0][-1] and all(NORM not in unit for unit in plan.units[0])
    assert plan.after_forward[0][NORM] == Kept(2, 8 * size)
    assert reduced(trial.plan) - reduced(plan) == 8 * size


def test_what_tp_left_out_is_gathered_by_fsdp_as_ever() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    for rank in trial.ranks:
        half = trial.reference.weights["output.weight"][4 * (rank // 2) :][:4]
        trial = with_parameter(trial, rank, "output.weight", value=half)
    plan = next(other_layouts(trial, broken("shard_contents"))).assume(trial).plan
    assert plan.units == trial.plan.units
    assert plan.slices[3]["output.weight"] == ((4, 8), (0, 4))


def reduced(plan: Plan) -> int:
    return sum(flow.bytes for flow in plan.flows[0] if flow.op == "reduce_scatter")


def test_a_module_that_tp_left_out() -> None:
    trial = trial_of(tiny_case("tp_2"))
    for rank in (0, 1):
        trial = with_parameter(trial, rank, "output.weight", value=trial.reference.weights["output.weight"])
    assert named(trial) == (
        "TP is not applied to 1 of 12 parameters (output.weight): every rank of a group holds them whole"
    )


def test_rows_dealt_out_over_dp_shard_first_are_strided_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", model=WIDE))
    full = trial.reference.weights["output.weight"]
    for rank in range(4):  # rank = 2 * dp_shard + tp
        trial = with_parameter(trial, rank, "output.weight", value=full[4 * rank : 4 * rank + 4])
    first = next(other_layouts(trial, broken("shard_contents")))
    assert cause_line(first.cause) == (
        "1 of 12 parameters (output.weight) are cut by dp_shard first and by tp inside, requested tp first (strided shards)"
    )


def test_a_rank_that_holds_its_neighbours_slice() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.ranks[0].parameters[0].value)
    expect_first(
        trial,
        """ranks along dp_shard start from the same shard: rank 1 holds the values of rank 0 in 1 of 12 parameters (tok_embeddings.weight)""",
    )


def test_uneven_shards_of_hsdp_that_ran_as_fsdp() -> None:
    training = replace(ADAMW, global_batch=16)
    requested, ran = (tiny_case(d, training, model=UNEVEN) for d in (dims(2, 8), dims(1, 16)))
    expect_first(
        trial_of(requested, ran),
        """HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 8, replicated 2 times""",
    )


# ---- layout and processes


def test_slices_of_no_known_layout_are_told_with_their_ranks_and_the_first_of_them() -> None:
    trial = fsdp_4()
    full = trial.reference.weights["output.weight"]
    trial = with_parameter(trial, 2, "output.weight", value=full[1:3])
    found = seen(other_slices, trial, "shard_contents")
    assert (
        found is not None
        and cause_line(found.cause)
        == "ranks hold other slices than planned in 1 of 12 parameters (output.weight) on rank 2"
    )
    assert found.lines == (
        (
            "contents",
            "1 of 12 parameters; output.weight on rank 2: expected 1/4 of dim 0 [4:6], observed 1/4 of dim 0 [1:3]",
        ),
    )
    assert not proposed(other_layouts, trial, "shard_contents")
    assert not seen_text(other_slices, trial, "traffic")
    assert not seen_text(other_slices, trial, "shard_contents", "initial_weights")


def test_flattened_slices_are_told_in_elements() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    value = next(t.value for t in trial.ranks[2].parameters if t.fqn == NORM)
    found = seen(other_slices, with_parameter(trial, 1, NORM, value=value), "shard_contents")
    assert found is not None and found.lines[0][1].endswith(
        "expected 1/2 of its elements [0:2], observed 1/2 of its elements [2:4]"
    )


def test_fsdp1_without_units_is_told_as_that_and_not_as_another_policy() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    everything = tuple(trial.plan.shapes)
    for rank, evidence in trial.ranks.items():
        (*_, wrapper) = evidence.structure.values()
        steps = tuple(
            replace(step, after_forward=tuple(_all_gathered(trial, record) for record in step.after_forward))
            for step in evidence.steps
        )
        trial = with_rank(trial, rank, structure={"": replace(wrapper, parameters=everything)}, steps=steps)
    assert first_line(trial) == ("the whole model is one fsdp1 unit: parameters are gathered in 1 piece, requested 2")


def test_parameters_that_fsdp1_ignores_are_told_as_left_out_and_not_as_finer_units() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    for rank, evidence in trial.ranks.items():
        structure = {
            fqn: replace(wrapper, parameters=tuple(name for name in wrapper.parameters if "norm" not in name))
            for fqn, wrapper in evidence.structure.items()
        }
        trial = with_rank(trial, rank, structure=structure)
    assert first_line(trial) == (
        "fsdp1 leaves out 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): no"
        " unit shards them or reduces their gradients"
    )


def _all_gathered(trial: Trial, record: AfterForward) -> AfterForward:
    return replace(record, bytes={fqn: 8 * math.prod(shape) for fqn, shape in trial.plan.shapes.items()})


def test_a_layout_is_not_looked_for_where_a_rank_left_no_evidence() -> None:
    trial = without_rank(ran_as(dims(2, 2), dims(1, 4)), 3)
    assert first_line(trial) == "rank 3 left no evidence: its process ended with code 0 and wrote no file"


# ---- layout


def test_a_part_that_is_nothing_or_all_is_told_as_such() -> None:
    trial = fsdp_4()
    assert _part_text(trial, NORM, ((0, 0),)) == "nothing"
    assert _part_text(trial, NORM, ((0, 4),)) == "all"
    assert _part_text(trial, NORM, ((1, 2),)) == "1/4 of dim 0 [1:2]"
    assert _part_text(trial, NORM, None) == "bytes that are nowhere in it"


@pytest.mark.parametrize(
    ("requested", "told"),
    [
        (dims(tp=2), "tp 2"),
        (dims(shard=2, tp=2), "2 and tp 2"),
        (dims(replicate=2, tp=2), "whole parameters on each of 2 ranks and tp 2"),
        (ParallelDims(dp_shard=2, cp=2, tp=2), "4 and tp 2"),
        (ParallelDims(cp=2, tp=2), "2 and tp 2"),
    ],
)
def test_what_was_requested_in_place_of_fsdp_over_tp(requested: ParallelDims, told: str) -> None:
    text = _fsdp_over_tp(Layout(requested, without="tp", folded=True), requested)
    assert text.endswith(f", requested {told}")
