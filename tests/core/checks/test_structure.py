"""The checks of who holds what: process_groups, placements, shard_contents, and FSDP's units. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import EMBEDDING, findings, like
from literal import (
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
)

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.words import first_finding
from harness.core.checks import judge
from harness.core.evidence.records import Collective, Group, Wrapper
from harness.core.judge.contents import find_slice
from harness.core.judge.finding import Part
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

# ---- process_groups


def with_groups(trial, rank: int, *groups: tuple[int, ...]):
    return with_rank(trial, rank, groups=tuple(Group(str(ranks), ranks, "gloo") for ranks in groups))


def test_ranks_in_the_wrong_tp_groups_are_named() -> None:
    """tp strided over the world instead of innermost: [0,2] [1,3] where [0,1] [2,3] is requested."""
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    for rank, groups in enumerate([((0, 2), (0, 1)), ((1, 3), (0, 1)), ((0, 2), (2, 3)), ((1, 3), (2, 3))]):
        trial = with_groups(trial, rank, *groups)
    assert judged("process_groups", trial).verdict == Verdict.PASS  # the same set of groups: why this check is weak
    for rank, groups in enumerate([((0, 3),), ((1, 2),), ((1, 2),), ((0, 3),)]):
        trial = with_groups(trial, rank, *groups, (0, 2) if rank in (0, 2) else (1, 3))
    assert findings("process_groups", trial) == tuple(
        like(
            rank,
            "a group of these ranks",
            None,
            kind="group",
            axis="tp",
            group=wanted,
            note=f"groups of that size: {near}",
        )
        for rank, wanted, near in (
            (0, (0, 1), "[0,2] [0,3]"),
            (1, (0, 1), "[1,2] [1,3]"),
            (2, (2, 3), "[0,2] [1,2]"),
            (3, (2, 3), "[0,3] [1,3]"),
        )
    )


@pytest.mark.parametrize(("member", "other"), [(0, 1), (1, 0)])
def test_a_group_that_only_one_of_its_members_knows_is_named(member: int, other: int) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    odd = Group("odd", (0, 1), "gloo")
    trial = with_rank(trial, member, groups=(*trial.ranks[member].groups, odd))
    assert findings("process_groups", trial) == (
        like(tuple({member, other}), f"the same group on rank {other}", None, kind="group", name="odd", group=(0, 1)),
    )


# ---- placements


def test_a_parameter_claimed_whole_on_one_rank_is_named() -> None:
    trial = with_parameter(trial_of(tiny_case("hsdp_2x2")), 3, EMBEDDING, placements=("Replicate", "Replicate"))
    assert findings("placements", trial) == (like(3, "dim 0 over [2,3]", "whole on every rank", name=EMBEDDING),)


def test_a_row_parallel_weight_cut_by_columns_is_named() -> None:
    fqn = "layers.0.attention.wo.weight"
    trial = with_parameter(trial_of(tiny_case("tp_2")), 1, fqn, placements=("Shard(0)",))
    assert findings("placements", trial) == (like(1, "dim 1 over [0,1]", "dim 0 over [0,1]", name=fqn),)


def test_swapped_mesh_axes_are_named_by_the_ranks_they_join() -> None:
    trial = with_parameter(trial_of(tiny_case("hsdp_2x2")), 0, EMBEDDING, mesh=[[0, 2], [1, 3]])
    assert findings("placements", trial) == (like(0, "dim 0 over [0,1]", "dim 0 over [0,2]", name=EMBEDDING),)


def test_a_mesh_that_lists_ranks_in_another_order_claims_slices_that_others_hold() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4)))
    trial = with_every_rank(trial, lambda t, rank: with_parameter(t, rank, EMBEDDING, mesh=[0, 2, 1, 3]))
    assert [(found.rank, found.name) for found in judged("placements", trial).findings] == [
        (1, EMBEDDING),
        (2, EMBEDDING),
    ]
    same = np.ones_like(trial.reference.weights[EMBEDDING])  # whose slices are all alike
    trial = replace(trial, reference=replace(trial.reference, weights=trial.reference.weights | {EMBEDDING: same}))
    for rank in trial.ranks:
        trial = with_parameter(trial, rank, EMBEDDING, value=np.ones_like(value_of(trial, rank)))
    assert judged("placements", trial).verdict is Verdict.PASS


def value_of(trial: Trial, rank: int) -> np.ndarray:
    return next(one.value for one in trial.ranks[rank].parameters if one.fqn == EMBEDDING)


def test_a_mesh_axis_of_one_rank_claims_nothing() -> None:
    claim = {"mesh": [[[0], [1]]], "placements": ("Shard(0)", "Shard(0)", "Shard(1)")}
    trial = with_parameter(trial_of(tiny_case("fsdp_2")), 0, EMBEDDING, **claim)
    assert judged("placements", trial).verdict == Verdict.PASS


def test_a_wrapper_that_replicates_over_nothing_is_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    trial = with_rank(trial, 2, structure={"layers.0": Wrapper("fsdp2", (2, 3))})
    assert findings("placements", trial) == (
        like(2, (0, 2), (2,), name="layers.0", quantity="fsdp2 replicate_ranks", unit="ranks"),
    )


def test_a_replicate_axis_that_nothing_claims_is_named() -> None:
    trial = with_every_rank(trial_of(tiny_case("ddp_2")), lambda trial, rank: with_rank(trial, rank, structure={}))
    assert findings("placements", trial) == (
        like(0, "a wrapper or parameter that is replicated", None, kind="group", axis="dp_replicate", group=(0, 1)),
        like(1, "a wrapper or parameter that is replicated", None, kind="group", axis="dp_replicate", group=(0, 1)),
    )


# ---- shard_contents


def test_a_rank_that_holds_its_neighbours_slice_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    value = trial.ranks[0].parameters[0].value
    assert findings("shard_contents", with_parameter(trial, 1, EMBEDDING, value=value)) == (
        like(1, Part(((4, 8), (0, 4)), (8, 4)), Part(((0, 4), (0, 4)), (8, 4)), name=EMBEDDING, quantity="slice"),
    )


def test_a_rank_that_holds_the_whole_tensor_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.reference.weights[EMBEDDING])
    assert findings("shard_contents", trial) == (
        like(1, Part(((4, 8), (0, 4)), (8, 4)), Part(((0, 8), (0, 4)), (8, 4)), name=EMBEDDING, quantity="slice"),
    )


def test_one_element_in_the_place_of_another_is_named_and_a_parameter_that_is_not_held_hides_no_other() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4)))  # norm weights have one element a rank
    value = next(t.value for t in trial.ranks[0].parameters if t.fqn == "norm.weight")
    trial = with_parameter(trial, 1, "norm.weight", value=value)
    assert findings("shard_contents", trial) == (
        like(1, Part(((1, 2),), (4,)), Part(((0, 1),), (4,)), name="norm.weight", quantity="slice"),
    )
    without_first = with_rank(trial, 1, parameters=trial.ranks[1].parameters[1:])
    assert findings("shard_contents", without_first) == findings("shard_contents", trial)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.astype(np.float32),
        lambda value: value.astype(np.float32).astype(np.float64),
        lambda value: value * (1 + 1e-15),
        lambda value: value[::-1],
        lambda value: value.reshape(-1),
        lambda value: np.full_like(value, np.nan),
    ],
    ids=["float32", "rounded to float32", "scaled", "reversed", "flat", "NaN"],
)
def test_other_bytes_than_the_seeds_are_found_nowhere(change) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=change(trial.ranks[1].parameters[0].value))
    assert findings("shard_contents", trial) == (
        like(
            1,
            Part(((4, 8), (0, 4)), (8, 4)),
            "bytes that are nowhere in the seed weight",
            name=EMBEDDING,
            quantity="slice",
        ),
    )


def test_minus_zero_is_another_weight_than_zero() -> None:
    assert find_slice(np.array([-0.0, 2.0]), np.array([0.0, 2.0, 3.0])) is None
    assert find_slice(np.array([0.0, 2.0]), np.array([3.0, 0.0, 2.0])) == ((1, 3),)


def test_an_empty_slice_where_there_should_be_rows_is_named() -> None:
    trial = with_parameter(trial_of(tiny_case("fsdp_2")), 1, EMBEDDING, value=np.zeros((0, 4)))
    assert findings("shard_contents", trial) == (
        like(1, Part(((4, 8), (0, 4)), (8, 4)), Part(((0, 0), (0, 4)), (8, 4)), name=EMBEDDING, quantity="slice"),
    )


def test_ranks_that_rightly_hold_nothing_pass() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=8), model=UNEVEN))  # 8 ranks, at most 7 rows
    assert trial.ranks[7].parameters[0].value.shape == (0, 4)
    for check in ("shard_contents", "initial_weights", "gradients", "update", "memory", "traffic"):
        assert judged(check, trial).verdict == Verdict.PASS, check


# ---- FSDP units


def gathering(trial: Trial, rank: int, *units: tuple[str, ...]) -> Trial:
    wrapper = next(iter(trial.ranks[rank].structure.values()))
    return with_rank(trial, rank, structure={unit[0]: replace(wrapper, parameters=unit) for unit in units})


def test_units_that_are_finer_than_requested_are_found_and_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    first, block, last = trial.plan.units[1]
    finer = gathering(trial, 1, first, block[:1], block[1:], last)
    told = like(
        1, "its 9 parameters gathered together, and no others", "in 2 units", name="layers.0.attention.wq.weight"
    )
    assert findings("placements", finer) == (told,)
    named = diagnose(finer, judge(finer))
    assert named is not None and named.kinds == ("other units",) and named.causes[0].finding == told


def test_units_of_other_parameters_are_found_wherever_they_are_claimed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    first, block, last = trial.plan.units[0]
    coarser = gathering(trial, 0, first + block, last)
    assert [finding.observed for finding in findings("placements", coarser)] == [
        "in 1 units, together with 9 others",
        "in 1 units, together with 1 others",
    ]
    named = diagnose(coarser, judge(coarser))
    assert named is not None and named.kinds == ("other units",)
    assert judged("placements", gathering(trial, 0, last, first, tuple(reversed(block)))).verdict == Verdict.PASS


@pytest.mark.parametrize(
    ("op", "size", "phase", "wrong"),
    [
        ("barrier", 0, "forward", True),
        ("all_reduce", 0, "backward", True),
        ("barrier", 0, "optimizer", True),
        ("barrier", 0, "other", False),
    ],
)
def test_ranks_do_not_wait_for_each_other_inside_of_a_pass(op: str, size: int, phase: str, wrong: bool) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in trial.ranks:
        calls = trial.ranks[rank].collectives
        waiting = Collective(op, (0, 1), "(0, 1)", "uint8", size, phase, 2, len(calls))
        trial = with_rank(trial, rank, collectives=(*calls, waiting))
    result = judged("traffic", trial)
    expected = like(0, 0, 1, step=2, kind="collective", name=op, phase=phase, group=(0, 1), quantity="without data")
    assert (result.findings[:1] == (expected,)) is wrong
    told = diagnose(trial, [result])
    assert (told.kinds if told else ()) == (("ranks wait",) if wrong else ())
    assert not told or told.causes[0].finding == first_finding(result.findings)


def test_fsdp_units_of_which_no_wrapper_tells_are_unknown() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    mute = {fqn: replace(wrapper, parameters=()) for fqn, wrapper in trial.ranks[1].structure.items()}
    result = judged("placements", with_rank(trial, 1, structure=mute))
    told = "no wrapper of rank 1 claims which parameters it gathers"
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, told)
