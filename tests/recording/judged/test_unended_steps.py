"""Recorded jobs of which a rank raised: of a step that never ended nothing is judged, and who ended early issued less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal import LAYOUTS, tiny_case, trial_of
from test_recorded import record_of

from harness.core.checks import all_checks, run_check
from harness.core.evidence.glance import summary_from_values
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.summary import summary_of
from harness.core.judge.result import Result, Verdict
from harness.core.judge.separate_models import connected_rank_sets
from harness.recording.judged import recorded

STRUCTURE = ("collective_order", "memory", "placements", "process_groups", "traffic")


def raised(rank: int, record: RankRecord, *, steps_seen: int) -> RankRecord:
    return replace(record, ended="raised", error=f"ValueError: of rank {rank}", steps_seen=steps_seen)


def judged(records: dict[int, RankRecord]) -> dict[str, Result]:
    trial = recorded.trial_of(records, LAYOUTS["ddp_2"], "run", len(records))
    return {name: run_check(name, module.check, trial) for name, module in all_checks().items()}


def one_step_that_moved_nothing(steps_seen: int) -> dict[int, RankRecord]:
    """As of ranks that raise in the optimizer's step, before it reduces gradients."""
    records = {}
    for rank, evidence in trial_of(tiny_case("ddp_2")).ranks.items():
        bare = replace(evidence, steps=evidence.steps[:1], collectives=())
        records[rank] = raised(rank, record_of(bare), steps_seen=steps_seen)
    return records


def test_a_step_that_never_ended_is_no_step_of_which_all_is_on_record() -> None:
    for steps_seen, whole in ((0, ()), (1, (1,))):
        summaries = [summary_of(one) for one in one_step_that_moved_nothing(steps_seen).values()]
        assert {(one.shown, one.traffic.whole, one.saw_a_step) for one in summaries} == {(1, whole, bool(whole))}
        assert bool(connected_rank_sets(summaries)) is bool(whole)


def test_what_a_step_that_never_ended_did_not_move_is_not_missed() -> None:
    never, ended = judged(one_step_that_moved_nothing(0)), judged(one_step_that_moved_nothing(1))
    assert {never[name].verdict for name in STRUCTURE} == {Verdict.UNKNOWN}
    assert (never["completed"].verdict, ended["traffic"].verdict) == (Verdict.FAIL, Verdict.FAIL)


def test_of_steps_that_ended_the_one_that_is_shown_is_one_of_these() -> None:
    records = {rank: record_of(evidence) for rank, evidence in trial_of(tiny_case("ddp_2")).ranks.items()}
    assert [summary_of(raised(0, records[0], steps_seen=seen)).shown for seen in (0, 1, 2, 3)] == [2, 1, 2, 2]


def test_steps_of_a_run_that_resumed_are_not_counted_from_1() -> None:
    evidence = trial_of(tiny_case("ddp_2")).ranks[0]
    later = replace(evidence, steps=tuple(replace(step, step=step.step + 10) for step in evidence.steps))
    assert summary_from_values(later).saw_a_step and summary_from_values(evidence).saw_a_step


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_ended_early_is_compared_as_far_as_it_came(ended: bool) -> None:
    records = {rank: record_of(evidence) for rank, evidence in trial_of(tiny_case("ddp_2")).ranks.items()}
    fewer = replace(records[1].evidence, collectives=records[1].evidence.collectives[:-1])
    records[1] = replace(records[1], evidence=fewer)
    if not ended:
        records[1] = raised(1, records[1], steps_seen=3)
    assert judged(records)["collective_order"].verdict == (Verdict.FAIL if ended else Verdict.PASS)
    other = tuple(replace(call, dtype="int32") for call in fewer.collectives)
    records[1] = replace(records[1], evidence=replace(fewer, collectives=other))
    assert judged(records)["collective_order"].verdict == Verdict.FAIL


def test_parameters_without_a_gradient_are_named_as_many_as_a_line_holds() -> None:
    ran = trial_of(tiny_case("fsdp_2"))
    for names in (("norm.weight",), ("norm.weight", "output.weight")):
        records = {rank: record_of(evidence) for rank, evidence in ran.ranks.items()}
        records = {
            rank: replace(one, steps=tuple(replace(step, ungraded=names) for step in one.steps))
            for rank, one in records.items()
        }
        trial = recorded.trial_of(records, LAYOUTS["fsdp_2"], "run", 2)
        note = run_check("traffic", all_checks()["traffic"].check, trial).note
        assert all(name in note for name in names) and f"{len(names)} parameter" in note
