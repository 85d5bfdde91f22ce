"""What ran, read from literal summaries: nothing declared, nothing guessed."""

from __future__ import annotations

from literal_recording import GATHER, SUM, hsdp, summary, with_changes

from harness.core.evidence.keys import ranks_from_key, ranks_key
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Issued, Use
from harness.core.judge.observed import (
    differing_by_step,
    families_of_replicas,
    find_differing_ranks,
    groups_out_of_order,
    observed_axes,
)


def test_groups_that_do_the_same_are_one_axis_with_the_name_that_wrappers_give_it() -> None:
    found = observed_axes([hsdp(rank) for rank in range(4)])
    assert [(axis.role, axis.groups) for axis in found] == [
        ("sharded by fsdp2", ("0,1", "2,3")),
        ("replicated by fsdp2", ("0,2", "1,3")),
    ]


def test_without_a_claim_an_axis_has_no_name() -> None:
    found = observed_axes([summary(rank, uses=(Use("0-3", *GATHER),)) for rank in range(4)])
    assert [axis.role for axis in found] == [""]


def test_stages_of_a_pipeline_that_do_less_at_its_ends_are_on_one_axis() -> None:
    one = [summary(0, uses=(Use("0,1", *SUM), Use("0,1", *GATHER))), summary(2, uses=(Use("2,3", *SUM),))]
    assert [axis.groups for axis in observed_axes(one)] == [("0,1", "2,3")]


def test_replicas_that_hold_the_same_bytes_agree() -> None:
    assert differing_by_step(families_of_replicas([hsdp(rank) for rank in range(4)])) == {}


def test_a_replica_that_holds_other_bytes_is_named() -> None:
    ranks = [hsdp(rank) for rank in range(3)] + [hsdp(3, contents={1: 99})]
    assert differing_by_step(families_of_replicas(ranks)) == {1: [([1], [3])]}


def test_what_replicas_hold_before_the_first_step_is_their_own_business() -> None:
    assert (
        differing_by_step(families_of_replicas([hsdp(rank, contents={0: rank, 1: 10 + rank % 2}) for rank in range(4)]))
        == {}
    )


def test_ranks_that_nothing_claims_to_be_replicas_are_not_compared() -> None:
    assert (
        differing_by_step(families_of_replicas([summary(rank, slices=0, contents={1: rank}) for rank in range(4)]))
        == {}
    )


def test_a_member_that_issued_something_else_or_nothing_is_out_of_order() -> None:
    same = [summary(rank, issued=(Issued("g", "0-3", 5, 7),)) for rank in range(3)]
    assert groups_out_of_order([*same, summary(3, issued=(Issued("g", "0-3", 5, 7),))]) == []
    assert groups_out_of_order([*same, summary(3, issued=(Issued("g", "0-3", 5, 8),))]) == [("g", (0, 1, 2, 3))]
    assert groups_out_of_order([*same, summary(3)]) == [("g", (0, 1, 2, 3))]


def test_a_rank_that_had_no_more_inputs_under_join_is_compared_until_then() -> None:
    def rank(number: int, steps: dict[int, int], joined: int | None = None) -> Summary:
        return summary(number, 2, issued=(Issued("g", "0,1", len(steps), sum(steps.values()), steps),), joined=joined)

    long, short = rank(0, {0: 1, 1: 2, 2: 3, 3: 4}), {0: 1, 1: 2, 2: 3}
    assert groups_out_of_order([long, rank(1, short, joined=2)]) == []
    assert groups_out_of_order([long, rank(1, short)]) == [("g", (0, 1))]
    assert groups_out_of_order([long, rank(1, short | {2: 9}, joined=2)]) == [("g", (0, 1))]


def test_uneven_inputs_are_no_odd_number_of_steps_under_join() -> None:
    uneven = [summary(0, 2, steps_seen=5), summary(1, 2, steps_seen=2)]
    assert [one.what for one in find_differing_ranks(uneven)] == ["steps"]
    assert find_differing_ranks([uneven[0], with_changes(uneven[1], joined=2)]) == []


def test_a_member_without_evidence_is_not_called_out_of_order() -> None:
    assert groups_out_of_order([summary(rank, issued=(Issued("g", "0-3", 5, 7),)) for rank in range(3)]) == []


def test_the_rank_with_another_switch_is_the_odd_one() -> None:
    ranks = [summary(rank, settings={"cudnn.benchmark": "on" if rank == 2 else "off"}) for rank in range(4)]
    (odd,) = find_differing_ranks(ranks)
    assert (odd.what, odd.ranks, odd.theirs, odd.most) == ("cudnn.benchmark", (2,), "on", "off")


def test_ranks_are_written_short_and_read_again() -> None:
    for ranks in ((0, 1), tuple(range(8)), (0, 8, 16), (0, 3, 4)):
        assert ranks_from_key(ranks_key(ranks)) == ranks
    assert ranks_key((0, 8, 16)) == "0-16:8"


def test_what_moved_in_one_step_of_a_rank_that_ended_early_is_not_said_of_each_step() -> None:
    early, late = (Use("0,1", "all_reduce", "backward", "float32", 1, 8, steps=steps) for steps in ("1", ""))
    ranks = [summary(rank, 2, uses=(use,)) for rank, use in enumerate((early, late))]
    assert [moved.steps for axis in observed_axes(ranks) for moved in axis.moved] == ["1"]
