"""Traffic that was not as planned, in words that somebody knows who never read a plan."""

from __future__ import annotations

from dataclasses import replace

from literal import tiny_case, trial_of, with_collectives

from harness.diagnosis.words import traffic_lines
from harness.evidence.provided import RECORDED
from harness.spec.dims import ParallelDims


def test_of_a_recorded_job_what_is_expected_is_a_least() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2)), ran=tiny_case(ParallelDims(dp_shard=4)))
    (_, text), *_ = traffic_lines(trial)
    (_, least), *_ = traffic_lines(replace(trial, run=replace(trial.run, provided=RECORDED)))
    assert "expected at least " in least and least.replace("at least ", "") == text


def test_groups_that_only_a_plan_has_a_name_for_are_told_by_their_ranks() -> None:
    kept = tiny_case(ParallelDims(dp_shard=4), reshard_after_forward=2)
    told = [text for _, text in traffic_lines(trial_of(kept, ran=tiny_case(ParallelDims(dp_shard=4))))]
    assert any("all_gather over [0,1] in backward" in text for text in told)
    assert not any("post_forward" in text for text in told)


def test_what_should_run_outside_of_passes_is_told_with_what_ran_there() -> None:
    """ZeRO gathers behind the optimizer what each rank has stepped on."""
    trial = trial_of(tiny_case(ParallelDims(dp_shard=2), wrapper="zero1"))
    assert [*traffic_lines(trial)] == []
    told = "parameters: all_gather over dp_shard outside of forward and backward: expected 1.888 kB per step, observed"
    for seen, part in (("0 B", 0), ("944 B", 2)):
        half = lambda call, by=part: [replace(call, bytes=call.bytes // by)] if by else []  # noqa: E731
        changed = with_collectives(trial, 0, lambda call, to=half: to(call) if call.op == "all_gather" else [call])
        ((_, text),) = traffic_lines(changed)
        assert text == f"{told} {seen}"
