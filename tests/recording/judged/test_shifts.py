"""Figures of two jobs: what each is, which differ, which of these lie within the spread of steps, and in which order."""

from __future__ import annotations

import dataclasses

import pytest
from literal import tiny_case, trial_of, with_collectives, with_step

from harness.core.case.dims import ParallelDims
from harness.core.judge.measures import measures_of
from harness.core.judge.trial import Trial
from harness.recording.judged.figures import (
    EXPOSED,
    MEMORY,
    STEP,
    TRAFFIC,
    WAITS,
    Figure,
    Figures,
    figures_by_name,
    figures_of_recording,
    find_shifts,
)
from harness.recording.judged.run_as_recording import recording_of_run

HSDP = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2)))
SUM = (TRAFFIC, "all_reduce in backward, over 2 ranks")


def blocked_for(trial: Trial, *seconds: float) -> Trial:
    """Each call of a step blocks for as many seconds."""
    for rank in trial.ranks:
        trial = with_collectives(
            trial,
            rank,
            lambda call: [dataclasses.replace(call, began=1.0, blocked=seconds[call.step - 1])],
        )
    return trial


def took(trial: Trial, *seconds: float) -> Trial:
    for rank in trial.ranks:
        for step, each in enumerate(seconds, start=1):
            trial = with_step(trial, rank, step, seconds=each + rank / 1000)
    return trial


def of_figures(*found: Figure) -> Figures:
    return figures_by_name(found)


def test_figures_are_the_slowest_rank_s_steps_bytes_by_axis_and_the_mean_time_in_calls() -> None:
    found = figures_of_recording(recording_of_run(took(blocked_for(HSDP, 9.0, 2.0, 4.0), 7.0, 1.0, 2.0).run))
    assert found[STEP, "slowest rank"].values == pytest.approx((1.003, 2.003))  # the first step sets groups up
    name = next(of for kind, of in found if kind == WAITS and of.startswith("all_reduce in backward"))
    sums = [
        call for call in HSDP.ranks[0].collectives if (call.op, call.step, call.phase) == ("all_reduce", 2, "backward")
    ]
    assert found[WAITS, name].values == (2.0 * len(sums), 4.0 * len(sums))
    assert found[TRAFFIC, name].values == (sum(call.bytes for call in sums),)
    assert {of for kind, of in found if kind == MEMORY} >= {"parameters", "gradients", "optimizer state"}


def test_a_call_that_was_not_timed_leaves_no_time_of_its_kind() -> None:
    assert not [of for kind, of in figures_of_recording(recording_of_run(HSDP.run)) if kind == WAITS]
    assert not [name for name in measures_of(HSDP) if name.startswith("seconds blocked")]


def test_a_verdict_keeps_the_time_in_calls_by_axis() -> None:
    per_axis = {
        name: value for name, value in measures_of(blocked_for(HSDP, 9.0, 2.0, 4.0)).items() if "blocked" in name
    }
    of_sums = [call for call in HSDP.ranks[0].collectives if call.op == "all_reduce" and call.step == 2]
    assert set(per_axis) == {"seconds blocked over dp_replicate", "seconds blocked over dp_shard"}
    assert per_axis["seconds blocked over dp_replicate"] == 3.0 * sum(call.phase == "backward" for call in of_sums)


def test_what_differs_comes_by_its_size_and_what_is_within_the_spread_of_steps_last() -> None:
    one = of_figures(
        Figure(STEP, "slowest rank", (1.0, 1.2, 1.1, 1.2)),
        Figure(EXPOSED, "all_gather", (0.1, 0.2, 0.3)),
        Figure(TRAFFIC, "all_gather", (100.0,)),
        Figure(TRAFFIC, "all_reduce", (50.0,)),
        Figure(MEMORY, "peak", (7.0,)),
    )
    other = of_figures(
        Figure(STEP, "slowest rank", (1.3, 1.5, 1.4, 1.3)),
        Figure(EXPOSED, "all_gather", (0.3, 0.9, 0.9)),
        Figure(TRAFFIC, "all_gather", (200.0,)),
        Figure(MEMORY, "peak", (7.0,)),
    )
    assert [(one.kind, one.of, one.within) for one in find_shifts(one, other)] == [
        (TRAFFIC, "all_reduce", False),
        (TRAFFIC, "all_gather", False),
        (STEP, "slowest rank", False),
        (EXPOSED, "all_gather", True),
    ]
    assert find_shifts(one, one) == []


@pytest.mark.parametrize(("steps", "within"), [(1, None), (2, None), (3, None), (4, False)])
def test_few_steps_show_no_noise(steps: int, within: bool | None) -> None:
    """With four steps each, chance alone separates one of 35 pairs."""
    one, other = (of_figures(Figure(STEP, "slowest rank", (value,) * steps)) for value in (1.0, 1.5))
    assert [shift.within for shift in find_shifts(one, other)] == [within]


def test_what_a_job_does_not_show_is_not_compared() -> None:
    one = of_figures(Figure(STEP, "slowest rank", (1.0,)))
    assert find_shifts(one, of_figures(Figure(MEMORY, "peak", (7.0,)), Figure(EXPOSED, "all_gather", (0.5,)))) == []


def test_calls_of_few_steps_alone_whose_middle_one_is_none_are_within_the_spread() -> None:
    one, other = (of_figures(Figure(WAITS, "broadcast", (0.0, 0.0, 0.0, seconds))) for seconds in (0.1, 0.2))
    assert [(each.one, each.other, each.within) for each in find_shifts(one, other)] == [(0.0, 0.0, True)]
