"""Traffic that was not as planned, in words that somebody knows who never read a plan."""

from __future__ import annotations

from dataclasses import replace

from literal import tiny_case, trial_of

from harness.diagnosis.words import traffic_lines
from harness.judge.trial import Recorded
from harness.spec.dims import ParallelDims


def test_of_a_recorded_job_what_is_expected_is_a_least() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2)), ran=tiny_case(ParallelDims(dp_shard=4)))
    (_, text), *_ = traffic_lines(trial)
    (_, least), *_ = traffic_lines(replace(trial, recorded=Recorded({})))
    assert "expected at least " in least and least.replace("at least ", "") == text


def test_groups_that_only_a_plan_has_a_name_for_are_told_by_their_ranks() -> None:
    kept = tiny_case(ParallelDims(dp_shard=4), reshard_after_forward=2)
    told = [text for _, text in traffic_lines(trial_of(kept, ran=tiny_case(ParallelDims(dp_shard=4))))]
    assert any("all_gather over [0,1] in backward" in text for text in told)
    assert not any("post_forward" in text for text in told)
