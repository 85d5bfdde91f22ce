"""What is said of another layout: how it differs, which groups are in use, and what ranks hold. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import EMBEDDING, NORM, broken
from literal import TINY, tiny_case, trial_of, with_collectives, with_every_rank, with_parameter, with_rank

from harness.diagnosis.layout import (
    Layout,
    _differences,
    _groups_in_use,
    _lines,
    contents_line,
    other_layouts,
    renamed,
    wrong_parameters,
    wrong_parts,
)
from harness.diagnosis.words import traffic_lines
from harness.evidence.provided import RECORDED
from harness.judge.trial import Trial
from harness.plan.slices import slices_of_rank
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

WIDE = replace(TINY, dim=16, vocab_size=16, ffn_dim=16)
DP = ("pp", "dp_shard", "dp_replicate", "cp", "tp")


def dims(replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1) -> ParallelDims:
    return ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)


@pytest.mark.parametrize(
    ("requested", "layout", "told"),
    [
        (
            dims(2, 4),
            Layout(dims(2, 4), DP),
            [
                "axes in the wrong order: parameters lie as on a mesh (dp_shard, dp_replicate), requested (dp_replicate, dp_shard)"
            ],
        ),
        (
            dims(2, 4),
            Layout(dims(4, 2)),
            [
                "dp_replicate and dp_shard are swapped: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times"
            ],
        ),
        (
            dims(2, 4),
            Layout(dims(4, 2), DP),
            [
                "dp_replicate and dp_shard are swapped: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times"
            ],
        ),
        (dims(1, 4), Layout(dims(4, 1), DP), ["FSDP ran as DDP: every dp rank holds whole parameters, requested 4"]),
        (
            dims(2, 2),
            Layout(dims(2, 2), DP),
            [
                "axes in the wrong order: parameters lie as on a mesh (dp_shard, dp_replicate), requested (dp_replicate, dp_shard)"
            ],
        ),
        (
            dims(2, 2),
            Layout(dims(4, 1), DP),
            [
                "axes in the wrong order: parameters lie as on a mesh (dp_shard, dp_replicate), requested (dp_replicate, dp_shard)",
                "HSDP ran as DDP: every dp rank holds whole parameters, requested 2, replicated 2 times",
            ],
        ),
        (
            dims(2, 4, cp=2),
            Layout(dims(4, 2, cp=2)),
            [
                "dp_replicate and dp_shard are swapped: parameters are sharded over 4 ranks and replicated 4 times, requested 8, replicated 2 times"
            ],
        ),
        (
            dims(tp=2),
            Layout(dims(tp=2), without="tp"),
            ["TP not applied: every rank of a tp group holds whole weights, requested tp 2"],
        ),
        (
            dims(2, 4, tp=2),
            Layout(dims(4, 2, tp=2), without="tp"),
            [
                "TP not applied: every rank of a tp group holds whole weights, requested tp 2",
                "dp_replicate and dp_shard are swapped: parameters are sharded over 2 ranks and replicated 4 times, requested 4, replicated 2 times",
            ],
        ),
        (
            dims(1, 2, cp=2, tp=2),
            Layout(dims(1, 2, cp=2, tp=2), without="tp", folded=True),
            [
                "TP not applied, FSDP over dp_shard x cp x tp in its place: parameters are sharded over 8 ranks, requested 4 and tp 2"
            ],
        ),
        (
            dims(2, 2, tp=2),
            Layout(dims(2, 2, tp=2), without="tp", folded=True),
            [
                "TP not applied, FSDP over dp_shard x tp in its place: parameters are sharded over 4 ranks, requested 2, replicated 2 times and tp 2"
            ],
        ),
        (
            dims(1, 2, tp=2),
            Layout(dims(2, 1, tp=2), without="tp", folded=True),
            ["TP not applied, FSDP over tp in its place: parameters are sharded over 2 ranks, requested 2 and tp 2"],
        ),
        (
            dims(tp=4),
            Layout(dims(tp=4), without="tp", folded=True),
            ["TP not applied, FSDP over tp in its place: parameters are sharded over 4 ranks, requested tp 4"],
        ),
        (
            dims(1, 2, cp=2),
            Layout(dims(1, 2, cp=2), without="cp"),
            [
                "FSDP ran over dp_shard alone, cp ranks hold copies: parameters are sharded over 2 ranks along dp_shard, requested 4"
            ],
        ),
        (
            dims(2, 2, cp=2),
            Layout(dims(2, 2, cp=2), without="cp"),
            [
                "FSDP ran over dp_shard alone, cp ranks hold copies: parameters are sharded over 2 ranks along dp_shard, requested 4, replicated 2 times"
            ],
        ),
        (
            dims(1, 4, cp=2),
            Layout(dims(2, 2, cp=2), without="cp"),
            [
                "FSDP ran as HSDP: parameters are sharded over 2 ranks along dp_shard and replicated 4 times, requested 8"
            ],
        ),
        (
            dims(1, 2, cp=2),
            Layout(dims(2, 1, cp=2)),
            ["FSDP ran as HSDP: parameters are sharded over 2 ranks along cp and replicated 2 times, requested 4"],
        ),
        (
            dims(1, 2, cp=2),
            Layout(dims(2, 1, cp=2), without="cp"),
            ["FSDP ran as DDP: every dp and cp rank holds whole parameters, requested 4"],
        ),
        (
            dims(cp=2),
            Layout(dims(cp=2), without="cp"),
            ["FSDP ran as DDP: every cp rank holds whole parameters, requested 2"],
        ),
        (
            dims(cp=3),
            Layout(dims(cp=3), without="cp"),
            ["FSDP ran as DDP: every cp rank holds whole parameters, requested 3"],
        ),
        (
            dims(2, 2, cp=2),
            Layout(dims(1, 4, cp=2)),
            [
                "HSDP ran as FSDP: parameters are sharded over 8 ranks along dp_shard x cp, requested 4, replicated 2 times"
            ],
        ),
        (
            dims(4),
            Layout(dims(2, 2)),
            [
                "DDP ran as HSDP: parameters are sharded over 2 ranks and replicated 2 times, requested whole parameters on each of 4 ranks"
            ],
        ),
        (
            dims(4),
            Layout(dims(1, 4)),
            ["DDP ran as FSDP: parameters are sharded over 4 ranks, requested whole parameters on each of 4 ranks"],
        ),
        (
            dims(1, 8),
            Layout(dims(2, 4)),
            ["FSDP ran as HSDP: parameters are sharded over 4 ranks and replicated 2 times, requested 8"],
        ),
        (dims(1, 8), Layout(dims(8)), ["FSDP ran as DDP: every dp rank holds whole parameters, requested 8"]),
        (
            dims(8, 2),
            Layout(dims(4, 4)),
            [
                "HSDP ran with other degrees: parameters are sharded over 4 ranks and replicated 4 times, requested 2, replicated 8 times"
            ],
        ),
        (
            dims(8, 2),
            Layout(dims(1, 16)),
            ["HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 2, replicated 8 times"],
        ),
    ],
)
def test_a_layout_is_told_by_what_differs_from_the_one_requested(
    requested: ParallelDims, layout: Layout, told: list[str]
) -> None:
    assert list(_differences(layout, requested)) == told


# ---- which groups are in use


def right(of: ParallelDims) -> Trial:
    return trial_of(tiny_case(of, model=WIDE))


def held_as(trial: Trial, ran: ParallelDims, rank_of: Iterable[int]) -> Trial:
    """Rank r holds what rank_of[r] would hold under `ran`."""
    for rank, other in enumerate(rank_of):
        for fqn, part in slices_of_rank(ran, other, trial.plan.shapes).items():
            value = trial.reference.weights[fqn][tuple(slice(*ends) for ends in part)]
            trial = with_parameter(trial, rank, fqn, value=value)
    return trial


def told(trial: Trial, *checks: str) -> list[tuple[str, str, int, bool, tuple[tuple[str, str], ...]]]:
    found = other_layouts(trial, broken(*(checks or ("shard_contents",))))
    return [(one.cause.kind, cause_line(one.cause), one.fitted, one.renumbers, one.lines) for one in found]


def without_calls(trial: Trial, axis: str) -> Trial:
    """Nothing moves over these groups."""
    gone = trial.plan.groups[axis]
    return with_every_rank(
        trial, lambda t, rank: with_collectives(t, rank, lambda call: [call] * (call.ranks not in gone))
    )


def test_a_layout_is_told_with_the_groups_of_each_axis_what_is_held_and_what_did_not_move() -> None:
    trial = held_as(right(dims(2, 2, tp=2)), dims(2, 2), [0, 0, 1, 1, 2, 2, 3, 3])
    text = "TP not applied: every rank of a tp group holds whole weights, requested tp 2"
    groups = [
        ("shard groups", "expected [0,2] [1,3] .. [5,7]   observed [0,2] [1,3] .. [5,7]"),
        ("replicate groups", "expected [0,4] [1,5] .. [3,7]   observed [0,4] [1,5] .. [3,7]"),
        ("tp groups", "expected [0,1] [2,3] .. [6,7]   observed [0,1] [2,3] .. [6,7]"),
    ]
    contents = (
        "contents",
        "9 of 12 parameters; tok_embeddings.weight on rank 0: expected 1/4 of dim 0 [0:4], observed 1/2 of dim 0 [0:8]",
    )
    assert told(trial) == told(trial, "placements") == [("another layout", text, 1, False, (*groups, contents))]
    assert told(trial, "traffic") == told(right(dims(2, 2, tp=2))) == []
    unused = without_calls(trial, "tp")
    nothing = "expected [0,1] [2,3] .. [6,7]   observed none in use (the groups exist, no collective ran over them)"
    ((*_, lines),) = told(unused)
    assert lines == (*groups[:2], ("tp groups", nothing), contents, *traffic_lines(unused))
    assert len(list(traffic_lines(unused))) > 3 and all(label == "traffic" for label, _ in traffic_lines(unused))


def test_groups_are_told_of_the_axes_that_ran_and_by_the_numbers_that_ranks_really_have() -> None:
    trial, layout = right(dims(1, 2, tp=2)), Layout(dims(1, 2, tp=2), ("pp", "dp_replicate", "tp", "cp", "dp_shard"))
    other = renamed(trial, {0: 0, 1: 2, 2: 1, 3: 3})
    assert list(_lines(other, layout))[:2] == [
        ("shard groups", "expected [0,2] [1,3]   observed [0,1] [2,3]"),
        ("tp groups", "expected [0,1] [2,3]   observed [0,2] [1,3]"),
    ]
    over_cp = trial_of(tiny_case(dims(1, 2, cp=2)))
    as_copies = Layout(dims(1, 2, cp=2), without="cp")
    assert list(_lines(over_cp, as_copies))[:1] == [
        (
            "shard groups",
            "expected [0-3]   observed none in use as this axis (what ran over the same ranks is of another)",
        )
    ]


def test_an_order_of_axes_gives_ranks_other_numbers() -> None:
    trial = right(dims(2, 2))
    ((kind, text, fitted, renumbers, lines),) = told(renamed(trial, {0: 0, 1: 2, 2: 1, 3: 3}))
    order = "axes in the wrong order: parameters lie as on a mesh (dp_shard, dp_replicate), requested (dp_replicate, dp_shard)"
    assert (kind, text, fitted, renumbers) == ("another layout", order, 1, True)
    assert lines[:2] == (
        ("shard groups", "expected [0,1] [2,3]   observed [0,2] [1,3]"),
        ("replicate groups", "expected [0,2] [1,3]   observed [0,1] [2,3]"),
    )


def test_two_choices_are_told_as_two() -> None:
    trial = held_as(right(dims(1, 2, tp=2)), dims(), [0] * 4)
    text = "TP not applied: every rank of a tp group holds whole weights, requested tp 2; FSDP ran as DDP: every dp rank holds whole parameters, requested 2"
    assert [one[:4] for one in told(trial)] == [("another layout", text, 2, False)]


def test_of_groups_that_nothing_ran_over_it_is_told_whether_they_exist() -> None:
    trial = without_calls(right(dims(2, 2)), "dp_replicate")
    label, told_of = "replicate groups", "expected [0,2] [1,3]   observed none in use"
    layout = Layout(dims(1, 4))
    assert (label, f"{told_of} (the groups exist, no collective ran over them)") in list(_lines(trial, layout))
    gone = trial.plan.groups["dp_replicate"]
    for rank in (0, 2):
        kept = tuple(group for group in trial.ranks[rank].groups if group.ranks not in gone)
        trial = with_rank(trial, rank, groups=kept)
    assert (label, told_of) in list(_lines(trial, layout))


def test_groups_are_in_use_over_which_floats_moved_in_forward_or_backward() -> None:
    trial = right(dims(1, 2))
    (call, *_) = (call for call in trial.ranks[0].collectives if call.phase == "forward")
    assert "float" in call.dtype

    def used(**changes: str) -> set[tuple[int, ...]]:
        return _groups_in_use(
            with_rank(with_rank(trial, 0, collectives=(replace(call, **changes),)), 1, collectives=())
        )

    assert used() == used(phase="backward") == used(dtype="bfloat16") == {(0, 1)}
    assert used(phase="optimizer") == used(dtype="int64") == set()


# ---- what ranks hold


def test_what_is_held_otherwise_is_told_by_rank_and_by_a_part_that_is_not_empty_if_there_is_one() -> None:
    trial = right(dims(1, 2))
    assert (wrong_parts(trial), wrong_parameters(trial), list(contents_line(trial))) == ([], [], [])
    last = "output.weight"
    trial = with_parameter(trial, 0, NORM, value=np.empty(0))
    nothing = "1 of 12 parameters; norm.weight on rank 0: expected 1/2 of dim 0 [0:8], observed nothing"
    assert list(contents_line(trial)) == [("contents", nothing)]
    trial = with_parameter(trial, 1, last, value=trial.reference.weights[last][:8])
    trial = with_parameter(trial, 1, EMBEDDING, value=np.full((8, 16), 7.0))
    parts = [(0, NORM, 0), (1, EMBEDDING, None), (1, last, ((0, 8), (0, 16)))]
    found = [(rank, fqn, part) for rank, fqn, part in wrong_parts(trial)]
    assert [one[:2] for one in found] == [one[:2] for one in parts]
    assert found[0][2] is not None and found[1][2] is None and found[2][2] == ((0, 8), (0, 16))
    assert wrong_parameters(trial) == [EMBEDDING, NORM, last]
    assert list(contents_line(trial)) == [
        (
            "contents",
            "3 of 12 parameters; tok_embeddings.weight on rank 1: expected 1/2 of dim 0 [8:16], observed bytes that are nowhere in it",
        )
    ]


def test_a_parameter_that_the_plan_does_not_know_is_not_held_otherwise() -> None:
    trial = right(dims(1, 2))
    slices = {
        rank: {fqn: part for fqn, part in held.items() if fqn != NORM} for rank, held in trial.plan.slices.items()
    }
    other = with_parameter(trial, 0, NORM, value=np.full(8, 7.0))
    assert wrong_parts(replace(other, plan=replace(trial.plan, slices=slices))) == []
    assert wrong_parts(other) == [(0, NORM, None)]


@pytest.mark.parametrize("recorded", [True, False])
def test_where_slices_are_not_derived_other_degrees_alone_are_put_to_the_test(recorded: bool) -> None:
    trial = right(dims(2, 2, tp=2))
    run = replace(trial.run, provided=RECORDED) if recorded else trial.run
    unknown = replace(trial, run=run, plan=replace(trial.plan, slices={rank: {} for rank in trial.ranks}))
    found = [
        (
            "another layout",
            "HSDP ran as DDP: every dp rank holds whole parameters, requested 2, replicated 2 times",
            1,
            False,
        ),
        (
            "another layout",
            "HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times",
            1,
            False,
        ),
    ]
    assert [one[:4] for one in told(unknown, "placements")] == found * recorded
    assert told(unknown, "shard_contents") == []
