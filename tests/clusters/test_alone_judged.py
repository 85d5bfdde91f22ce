"""Ranks that ran alone, judged on literal evidence: what is proven of how many, and what is not judged."""

from __future__ import annotations

from dataclasses import replace

from literal import tiny_case, trial_of

from harness.clusters.judging import run_of_lone_ranks
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.checks import all_checks, applicable_checks, run_check
from harness.core.evidence.provided import SINGLE_RANKS
from harness.core.evidence.text import ranks_text
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.recording.judged.recorded import NO_REFERENCE


def alone(case: Case, ran: Case | None = None, *, ranks: tuple[int, ...] = (0, 3), left: tuple[int, ...] = ()) -> Trial:
    """Of these ranks; those in `left` left nothing."""
    whole = trial_of(case, ran)
    exits = tuple(exit for exit in whole.run.exits if exit.rank in ranks)
    run = replace(whole.run, exits=exits, ranks={r: whole.ranks[r] for r in ranks if r not in left})
    return replace(whole, run=run_of_lone_ranks(run, ranks, {}), reference=NO_REFERENCE)


def results(trial: Trial) -> dict[str, Result]:
    return {name: run_check(name, module.check, trial) for name, module in all_checks().items()}


def test_checks_of_structure_judge_the_ranks_that_ran_and_no_others() -> None:
    found = results(alone(tiny_case("hsdp_2x2")))
    passed = {name for name, result in found.items() if result.verdict is Verdict.PASS}
    assert passed >= {"completed", "process_groups", "placements", "traffic", "memory", "reshard"}
    assert not {name for name, result in found.items() if result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)} - {
        "features"
    }


def test_checks_that_need_numbers_are_not_applicable_and_say_so() -> None:
    found = results(alone(tiny_case("hsdp_2x2")))
    of_numbers = {name: found[name] for name in found if name not in applicable_checks(SINGLE_RANKS)}
    assert {result.verdict for result in of_numbers.values()} == {Verdict.NOT_APPLICABLE}
    assert of_numbers["loss"].note == "needs numbers: ranks alone have no data"


def test_the_order_of_collectives_is_not_judged_where_no_group_is_wholly_there() -> None:
    result = results(alone(tiny_case("hsdp_2x2"), ranks=(0, 3)))["collective_order"]
    assert (result.verdict, result.note) == (
        Verdict.NOT_APPLICABLE,
        "no group is wholly among the ranks that ran",
    )


def test_a_group_that_is_wholly_there_is_compared() -> None:
    trial = alone(tiny_case("hsdp_2x2"), ranks=(0, 1))
    assert results(trial)["collective_order"].verdict is Verdict.PASS
    first = trial.ranks[1]
    less = replace(first, collectives=tuple(c for c in first.collectives if c.phase != "backward"))
    broken = replace(trial, run=replace(trial.run, ranks=trial.ranks | {1: less}))
    assert results(broken)["collective_order"].verdict is Verdict.FAIL


def test_a_rank_that_left_nothing_is_no_pass() -> None:
    found = results(alone(tiny_case("hsdp_2x2"), left=(3,)))
    assert found["completed"].verdict is Verdict.FAIL
    assert found["traffic"].verdict is Verdict.UNKNOWN


def test_hsdp_that_ran_as_fsdp_is_caught_on_one_rank() -> None:
    asked = tiny_case("hsdp_2x2")
    ran = replace(asked, dims=replace(asked.dims, dp_replicate=1, dp_shard=4))
    found = results(alone(asked, ran, ranks=(3,)))
    assert {name for name, result in found.items() if result.verdict is Verdict.FAIL} >= {"placements", "traffic"}


def test_of_a_long_line_of_ranks_the_ends_are_named() -> None:
    assert ranks_text(tuple(range(0, 1024, 8))) == "[0,8,..,1016]"
    assert ranks_text((0, 2, 4, 6)) == "[0,2,4,6]"


def test_two_members_that_disagree_break_the_order_of_a_group_that_is_not_wholly_there() -> None:
    whole = alone(tiny_case(ParallelDims(dp_shard=4)), ranks=(0, 1))
    assert results(whole)["collective_order"].verdict is Verdict.NOT_APPLICABLE
    first = whole.ranks[1]
    other = tuple(replace(c, dtype="int32") if c.op == "all_reduce" else c for c in first.collectives)
    less = replace(first, collectives=tuple(c for c in other if c.phase != "backward"))
    broken = replace(whole, run=replace(whole.run, ranks=whole.ranks | {1: less}))
    result = results(broken)["collective_order"]
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].observed.endswith(" on rank 1")
