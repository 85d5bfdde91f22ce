"""What one torch does and another does not, and who says which one ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal import SGD, judged, tiny_case, trial_of, with_collectives

from harness.core.case import releases
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import find_case, load_all
from harness.core.case.measured import MeasuredTraits
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.records import Collective, Run
from harness.core.judge.measured import torch_release
from harness.core.plan.make_plan import make_plan


@pytest.mark.parametrize(
    ("condition", "release", "holds"),
    [
        ("<2.15", "2.14.1+cpu", True),
        ("<2.15", "2.15.0", False),
        (">=2.15", "2.15.0a0+git1234", True),
        (">=2.15", "2.9.1", False),
        ("<2.15", "", True),
        (">=2.15", "", False),
    ],
)
def test_releases_are_compared_as_numbers_and_an_unknown_one_is_old(condition: str, release: str, holds: bool) -> None:
    assert releases.condition_holds(condition, release) is holds


@pytest.mark.parametrize("condition", ["2.15", "~=2.15", "<2", "<2.15.1"])
def test_a_condition_that_is_none_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match='expected "<" or ">=" and a release'):
        releases.parse_condition(condition)


def test_norm_gradients_are_summed_over_tp_as_computed_and_from_2_15_on_as_they_are_reduced() -> None:
    case = find_case("bf16_fsdp_2_tp_2", load_all())

    def summed(torch: str) -> list[int]:
        flows = make_plan(case, TrainerTraits(measured=MeasuredTraits(torch=torch))).flows_of(0, 1)
        return [flow.bytes for flow in flows if flow.role == "norm gradients"]

    assert (summed("2.13.0+cpu"), summed("2.14.1"), summed("2.15.0")) == ([640], [640], [1280])


def test_the_release_that_ran_is_the_one_that_ranks_tell_of() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    ranks = {0: trial.ranks[0], 1: replace(trial.ranks[1], environment={"torch": "2.15.0"})}
    assert torch_release(replace(trial.run, ranks=ranks, made={"torch": "2.13.0"})) == "2.15.0"
    assert torch_release(Run("", 2, (), {}, made={"torch": "2.13.0"})) == "2.13.0"


def test_as_many_elements_in_another_dtype_of_the_recipe_are_told_as_that() -> None:
    dims = ParallelDims(dp_shard=2)
    case = tiny_case(dims, replace(SGD, dtype="float32", compute_dtype="bfloat16"), wrapper="fsdp2")
    case = replace(case, features=replace(case.features, reduce_dtype="float32"))
    trial = trial_of(case)

    def narrow(call: Collective) -> list[Collective]:
        return [replace(call, dtype="bfloat16", bytes=call.bytes // 2) if call.op == "reduce_scatter" else call]

    note = judged("traffic", with_collectives(trial, 0, narrow)).findings[0].note
    assert note.endswith("elements of bfloat16; expected as many of float32")
