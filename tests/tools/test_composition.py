"""What the default tier joins, told from the cases themselves, and what is proposed where it does not."""

from __future__ import annotations

from dataclasses import replace

from literal import SGD, tiny_case

from harness.spec.case import Case, Saved
from harness.spec.dims import ParallelDims
from harness.spec.loading import load_all
from tools.composition import joins, missing, proposal_text, propose, ranks


def case(name: str, tier: str = "default", /, **dims: int) -> Case:
    return replace(tiny_case(ParallelDims(**dims)), name=name, tier=tier)


SHARDED = case("sharded", dp_shard=2)
WITH_SGD = replace(case("with_sgd", "nightly", dp_shard=2), training=SGD)


def test_the_default_tier_joins_every_kind_of_parallelism_with_every_feature() -> None:
    assert missing(load_all()) == {}, "python -m tools.composition proposes which cases to promote"


def test_a_case_joins_its_kinds_of_parallelism_with_its_options_and_with_each_other() -> None:
    found = joins(replace(case("both", dp_shard=2, tp=2), training=SGD))
    assert {("data parallel", "SGD"), ("tp", "SGD"), ("data parallel", "tp")} <= found


def test_ranks_are_those_of_all_launches_and_of_the_repeat() -> None:
    resumed = replace(SHARDED, resume=(Saved(1, ParallelDims(dp_shard=4)),), runs=2)
    assert ranks(resumed) == 4 + 2 + 2


def test_what_only_another_tier_has_is_missing_and_its_case_is_promoted() -> None:
    cases = [SHARDED, WITH_SGD]
    assert missing(cases)["data parallel", "SGD"] == ["with_sgd"]
    proposal = propose(cases, ())
    assert (proposal.promote, proposal.ranks) == ((WITH_SGD,), 4)
    assert "promote   with_sgd (2 ranks" in proposal_text(cases, proposal)


def test_of_two_cases_that_join_the_same_the_one_of_fewer_ranks_is_promoted() -> None:
    wide = replace(case("wide", "nightly", dp_shard=4), training=SGD)
    assert propose([SHARDED, wide, WITH_SGD], ()).promote == (WITH_SGD,)


def test_a_case_that_adds_nothing_is_demoted_where_ranks_are_short_unless_a_fault_needs_it() -> None:
    again = case("sharded_again", dp_shard=2)
    assert propose([SHARDED, again], (), most=2).demote == (again,)
    assert propose([SHARDED, again], ("sharded_again",), most=4).demote == ()


def test_nothing_is_moved_where_nothing_is_missing_and_ranks_are_enough() -> None:
    proposal = propose([SHARDED, replace(WITH_SGD, tier="default")], ())
    assert (proposal.promote, proposal.demote) == ((), ())


def test_what_waits_for_a_compiler_or_is_expected_to_fail_is_not_missing() -> None:
    compiled = replace(case("compiled", "compiled", dp_shard=2), training=SGD)
    assert missing([SHARDED, compiled]) == {}
