"""What was seen before and after the commit that is found, side by side."""

from __future__ import annotations

import dataclasses

from literal import tiny_case, trial_of

from harness.core.case.dims import ParallelDims
from harness.nights.bisect.side_by_side import first_step_facts


def test_what_was_seen_of_rank_0_tells_hsdp_from_fsdp_and_the_losses_do_not() -> None:
    hsdp, fsdp = tiny_case(ParallelDims(dp_replicate=2, dp_shard=2)), tiny_case(ParallelDims(dp_shard=4))
    right, wrong = first_step_facts(trial_of(hsdp)), first_step_facts(trial_of(hsdp, ran=fsdp))
    assert (right["it shards over"], wrong["it shards over"]) == ("[0,1]", "[0-3]")
    assert (right["it replicates over"], wrong.get("it replicates over")) == ("[0,2]", None)
    assert right["its tok_embeddings.weight"].startswith("1/2 of dim 0")
    assert wrong["its tok_embeddings.weight"].startswith("1/4 of dim 0")
    assert right["losses reported"] == wrong["losses reported"]


def test_gradients_and_norms_are_told_side_by_side() -> None:
    case = tiny_case(ParallelDims(dp_shard=2))
    right = trial_of(case)
    evidence = right.ranks[1]
    gradients = {name: 2 * array for name, array in evidence.steps[0].gradients.items()}
    step = dataclasses.replace(evidence.steps[0], gradients=gradients)
    ranks = right.ranks | {1: dataclasses.replace(evidence, steps=(step, *evidence.steps[1:]))}
    wrong = dataclasses.replace(right, run=dataclasses.replace(right.run, ranks=ranks))
    assert first_step_facts(right)["gradients of all ranks"].startswith("the reference's, within ")
    assert first_step_facts(wrong)["gradients of all ranks"].startswith("off by 1.0e+00 at worst: rank 1, step 1, ")
    assert len(first_step_facts(right)["norms reported"].split()) == len(right.case.steps)


def test_a_side_whose_rank_0_left_nothing_is_told_as_that() -> None:
    right = trial_of(tiny_case(ParallelDims(dp_shard=2)))
    without = dataclasses.replace(right, run=dataclasses.replace(right.run, ranks={1: right.ranks[1]}))
    assert first_step_facts(without) == {"rank 0": "left no evidence"}


def test_facts_of_a_stage_of_zero_are_of_flattened_parameters() -> None:
    case = tiny_case(ParallelDims(dp_shard=2), wrapper="zero1")
    found = first_step_facts(trial_of(case))
    assert (found["its tok_embeddings.weight"], found["it shards over"]) == ("whole", "[0,1]")
    cut = first_step_facts(trial_of(tiny_case(ParallelDims(dp_shard=2), wrapper="zero3")))
    assert cut["its tok_embeddings.weight"] == "1/2 of its elements [0:16]"
