"""What is named where ZeRO cuts nothing, or ran as another stage. Literal evidence, no ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from diagnosed import broken, dims, kinds, proven
from literal import ADAMW, UNEVEN, tiny_case, trial_of, with_every_rank, with_step

from harness.core.causes.reported import norm_sources
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.trial import Trial
from harness.hypotheses.recipe import wrong_recipe

NINE = replace(ADAMW, global_batch=9)
ZERO_1 = trial_of(tiny_case(dims(shard=3), NINE, wrapper="zero1", model=UNEVEN))


@pytest.mark.slow("many of a kind; the first run in the same way", after=1)
@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_zero_that_ran_as_ddp_is_named(stage: str) -> None:
    ran = tiny_case(dims(replicate=3), NINE, model=UNEVEN)
    trial = trial_of(tiny_case(dims(shard=3), NINE, wrapper=stage, model=UNEVEN), ran)
    assert proven(trial)[0] == "another stage of ZeRO"


def test_zero_beside_tensor_parallel_that_ran_as_ddp_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1"), tiny_case(dims(replicate=2, tp=2)))
    assert proven(trial)[0] == "another stage of ZeRO"


@pytest.mark.parametrize(("requested", "ran"), [("zero2", "zero1"), ("zero1", "zero2")])
def test_a_stage_that_ran_as_another_is_named(requested: str, ran: str) -> None:
    first, second = (
        tiny_case(dims(shard=3), replace(ADAMW, global_batch=12), wrapper=stage, model=UNEVEN, accumulation=2)
        for stage in (requested, ran)
    )
    assert kinds(trial_of(first, second)) == ("another feature",)


@pytest.mark.parametrize("wrapper", ["zero1", None])
def test_a_norm_counts_replicas_again_only_along_axes_that_have_any(wrapper: str | None) -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper=wrapper))
    counted = {d[0][1]: number(0, 1) for d, number in norm_sources(trial) if d[0][0] == "with replicas counted along"}
    assert {axis for axis, norm in counted.items() if not math.isclose(norm, norm_of_slices(trial, 1))} == {"tp"}


def test_a_rate_is_named_by_the_part_that_each_rank_steps_on() -> None:
    def doubled(trial: Trial, rank: int) -> Trial:
        start, moved = trial.initial_parameters(rank), trial.ranks[rank].steps[0].parameters
        return with_step(trial, rank, 1, parameters={fqn: 2 * value - start[fqn] for fqn, value in moved.items()})

    found = [one.cause for one in wrong_recipe(with_every_rank(ZERO_1, doubled), broken("update"))]
    assert any(cause.kind == "learning rate" and ("lr", 0.02) in cause.details for cause in found)


def test_a_part_without_gradients_says_nothing_of_the_rate() -> None:
    trial = with_step(ZERO_1, 0, 1, gradients={})
    assert not [one for one in wrong_recipe(trial, broken("update")) if one.cause.kind == "learning rate"]
