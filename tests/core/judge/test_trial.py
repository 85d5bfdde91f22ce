"""What a Trial derives from stored evidence: slices found by their bytes, rows in a trainer's order, flattened parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from literal import ADAMW, TINY, tiny_case, trial_of, with_parameter
from literal_reference import reference_of

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.checks import judge
from harness.core.evidence.records import RankEvidence, Resumed, Run
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.contents import find_slice
from harness.core.judge.order import flatten_trial, reorder_reference
from harness.core.judge.places import first_stage_peer, first_stage_ranks, last_stage_ranks
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

TWO_LAYERS = dataclasses.replace(TINY, n_layers=2)


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2"])
@pytest.mark.parametrize("told", [True, False])
def test_rows_in_another_order_are_judged_in_that_order_and_only_if_the_adapter_names_it(
    layout: str, told: bool
) -> None:
    fqn, order = "layers.0.attention.wq.weight", np.array([2, 0, 3, 1])
    theirs = trial_of(tiny_case(layout))
    ours = reorder_reference(theirs.reference, {fqn: np.argsort(order)})
    assert np.array_equal(theirs.reference.weights[fqn], ours.weights[fqn][[2, 0, 3, 1]])
    stored = reorder_reference(ours, {fqn: order} if told else {})
    assert stored.rows.keys() == ({fqn} if told else set())
    results = {result.check: result.verdict for result in judge(dataclasses.replace(theirs, reference=stored))}
    for check in ("initial_weights", "shard_contents", "gradients"):
        assert results[check] is (Verdict.PASS if told else Verdict.FAIL), check


def test_everything_that_has_rows_is_put_in_the_trainers_order_and_nothing_else() -> None:
    fqn, order = "layers.0.attention.wq.weight", np.array([2, 0, 3, 1])
    reference = trial_of(tiny_case("single")).reference
    theirs = reorder_reference(reference, {fqn: order})
    for before, after in zip(reference.steps, theirs.steps, strict=True):
        for what in ("gradients", "parameters"):
            for name, value in getattr(before, what).items():
                assert np.array_equal(getattr(after, what)[name], value[order] if name == fqn else value)
        assert after.optimizer_state.keys() == before.optimizer_state.keys()
        for name, state in before.optimizer_state.items():
            for key, value in state.items():
                assert np.array_equal(after.optimizer_state[name][key], value[order] if name == fqn else value)
    assert theirs.samples == reference.samples


def test_vectors_and_what_was_resumed_are_flattened_with_all_else() -> None:
    whole = {"layers.0.attention.wq.weight": np.arange(16.0).reshape(4, 4)}
    square_step = {"parameters": whole, "gradients": whole}
    trial = trial_of(tiny_case("fsdp_2", ADAMW, wrapper="fsdp1"))
    evidence = trial.ranks[0]
    (first, *_) = evidence.parameters
    square = dataclasses.replace(first, value=first.value.reshape(-1, 4))
    counter = {"step": np.array(2.0), "exp_avg": np.ones((2, 2))}
    steps = tuple(dataclasses.replace(step, **square_step) for step in evidence.steps)
    held = dataclasses.replace(evidence, parameters=(square,), steps=steps, resumed=Resumed(whole, {"a": counter}))
    run = dataclasses.replace(trial.run, ranks={0: held})
    flat = flatten_trial(dataclasses.replace(trial, run=run, repeat=run, reference=trial.reference))
    shapes = flat.ranks[0]
    assert {
        value.shape
        for step in shapes.steps
        for arrays in (step.parameters, step.gradients)
        for value in arrays.values()
    } == {(16,)}
    assert flat.repeat is not None
    assert flat.repeat.ranks[0].steps[0].gradients["layers.0.attention.wq.weight"].shape == (16,)
    assert [t.value.shape for t in shapes.parameters] == [first.value.shape]
    assert shapes.resumed is not None
    assert shapes.resumed.parameters["layers.0.attention.wq.weight"].shape == (16,)
    assert {key: value.shape for key, value in shapes.resumed.optimizer_state["a"].items()} == {
        "step": (),
        "exp_avg": (4,),
    }


def test_a_slice_is_found_where_its_bytes_are_and_an_empty_one_where_it_is_planned() -> None:
    full = np.arange(12.0).reshape(6, 2)
    assert find_slice(full[2:4], full) == ((2, 4), (0, 2))
    assert find_slice(full[2:4], full, ((4, 6), (0, 2))) == ((2, 4), (0, 2))  # planned elsewhere
    assert find_slice(full[:0], full, ((6, 6), (0, 2))) == ((6, 6), (0, 2))
    assert find_slice(full[:0], full, ((0, 6), (0, 2))) == ((0, 0), (0, 2))
    assert find_slice(full[2:4] + 0.5, full) is None
    assert find_slice(full.ravel(), full) is None
    with pytest.raises(ValueError):
        find_slice(full[2:4], full, ((2, 4),))  # a plan of fewer dims


def test_a_parameter_that_the_reference_does_not_know_lies_nowhere() -> None:
    trial = with_parameter(trial_of(tiny_case("ddp_2")), 0, "norm.weight", fqn="norm.scale")
    assert trial.local_slices[0]["norm.scale"] is None
    assert trial.local_slices[1]["norm.weight"] == ((0, 4),)


def test_a_last_stage_is_fed_by_the_first_stage_of_its_own_pipeline() -> None:
    case = tiny_case(ParallelDims(pp=2, dp_shard=2), schedule="1F1B", microbatches=2, model=TWO_LAYERS)
    ranks = {rank: RankEvidence(rank, 4, (), (), (), ()) for rank in range(4)}
    trial = Trial(case, make_plan(case), Run("run", 4, (), ranks), reference_of(case))
    assert (first_stage_ranks(trial), last_stage_ranks(trial)) == ([0, 1], [2, 3])
    assert [first_stage_peer(trial, rank) for rank in trial.ranks] == [0, 1, 0, 1]


def test_launches_are_told_in_order_and_the_first_step_is_the_launchs_own() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()), Saved(2, ParallelDims(tp=2)))))
    assert [launch.first_step for launch in trial.launches] == [1, 2, 3]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12345, "12.35 kB"), (10**6, "1 MB"), (10**9, "1 GB")],
)
def test_bytes_are_told_in_thousands(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3, 2], "[2,3]"), ((4, 2, 3), "[2-4]"), ([0, 1, 2], "[0-2]"), ([0, 2, 4], "[0,2,4]"), ([], "[]")],
)
def test_three_neighbours_are_told_as_a_range(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(("before", "after"), [("fsdp2", "fsdp1"), ("fsdp1", "fsdp2")])
def test_a_launch_whose_parameters_are_flat_continues_one_whose_are_not_and_the_other_way_round(
    before: str, after: str
) -> None:
    shards = ParallelDims(dp_shard=2)
    saved = Saved(2, shards, Features(wrapper=before))
    trial = trial_of(tiny_case(shards, ADAMW, resume=(saved,), wrapper=after))
    results = {result.check: result.verdict for result in judge(trial)}
    assert [results[check] for check in ("initial_weights", "shard_contents", "resume")] == [Verdict.PASS] * 3
