"""What ranks keep, copy and wait for in addition, told where numbers are right. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from diagnosed import broken, dims, first_line, seen, seen_text
from literal import judged, tiny_case, trial_of, with_rank, with_step

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.costs import memory_kept, of_no_plan, ranks_wait
from harness.evidence.records import Collective
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line, diagnosis_line
from harness.report.finding_text import SHOWN

LOGITS = "float64 [2, 4, 8]"


def by_step(*changes: dict[str, Any], rank: int = 1) -> Trial:
    trial = trial_of(tiny_case("fsdp_2"))
    for step, change in enumerate(changes, start=1):
        trial = with_step(trial, rank, step, **change)
    return trial


@pytest.mark.parametrize(
    ("unwaited", "more"),
    [
        ((1, 2, 3), "; torch keeps the results of 2 functional collectives that nothing waited for"),
        ((1, 2, 2), ""),
        ((None, None, None), ""),
    ],
)
def test_what_grows_is_told_with_the_collectives_that_nothing_waited_for(
    unwaited: tuple[int | None, ...], more: str
) -> None:
    changes = [{"kept": {LOGITS: 512 * step}, "unwaited": unwaited[step - 1]} for step in (1, 2, 3)]
    told = f"memory held between steps grows by 512 B a step on rank 1: {LOGITS}{more}"
    assert first_line(by_step(*changes)) == told
    assert not seen(memory_kept, by_step(*changes), "traffic")


def test_graphs_that_are_retained_are_told_with_the_first_step_and_the_reason() -> None:
    assert first_line(by_step({}, {"graphs_retained": 2}, {"graphs_retained": 1})) == (
        "activations of a pass are still there in the next forward pass on rank 1, from step 2 on: backward is"
        " called with retain_graph=True, and the loss or something else still holds the graph"
    )


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("forward", "in forward"),
        ("backward", "in backward"),
        ("optimizer", "outside forward and backward"),
        ("other", "outside forward and backward"),
    ],
)
def test_copies_of_weights_are_told_with_the_time_at_which_they_are_there(phase: str, where: str) -> None:
    told = f"936 B of copies of weights exist at once {where} in step 2 on rank 1"
    assert first_line(by_step({}, {"copied": {phase: 936}})) == told


def waiting(op: str, phase: str, steps: Sequence[int] = (2,), layout: Any = "fsdp_2") -> Trial:
    trial = trial_of(tiny_case(layout))
    for rank in trial.ranks:
        for step in steps:
            calls = trial.ranks[rank].collectives
            wait = Collective(op, tuple(trial.ranks), "all", "uint8", 0, phase, step, len(calls))
            trial = with_rank(trial, rank, collectives=(*calls, wait, wait))
    return trial


def test_more_places_than_a_report_shows_of_a_check_are_all_looked_at() -> None:
    trial = waiting("barrier", "backward", steps=(1, 2, 3), layout=dims(shard=4))
    results = judge(trial)
    (traffic,) = [result for result in results if result.verdict is Verdict.FAIL]
    assert traffic.check == "traffic" and len(traffic.findings) > SHOWN
    found = diagnose(trial, results)
    assert found and diagnosis_line(found) == (
        "ranks synchronize in backward without moving data: 2 x barrier over [0-3] (rank 0, step 1)"
    )


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_ranks_that_wait_for_each_other_inside_of_a_step_are_told_where_nothing_else_is_wrong_with_traffic(
    phase: str,
) -> None:
    trial = waiting("barrier", phase)
    results = {"traffic": judged("traffic", trial)}
    (fact,) = ranks_wait(trial, results)
    told = f"ranks synchronize in {phase} without moving data"
    assert cause_line(fact.cause) == f"{told}: 2 x barrier over [0,1] (rank 0, step 2)"
    assert fact.checks == ("traffic",)
    assert list(ranks_wait(trial, broken("traffic"))) == [], "more is wrong with it"
    assert list(ranks_wait(trial, broken("memory"))) == []
    (plain,) = of_no_plan(trial, results)
    assert plain.symptom and not seen_text(of_no_plan, trial, "traffic", "loss")
