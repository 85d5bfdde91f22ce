"""What a trainer chose: beside a case, never instead of what it requests."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from literal import SGD, tiny_case
from literal_ranks import APART

from harness.core.case import case, traits
from harness.core.case.allowance import Allowance
from harness.core.case.case import ExpectedFailure, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.measured import MeasuredTraits, Unit
from harness.core.case.traits import TrainerTraits, with_trainer_choices
from harness.core.evidence.store import EvidenceError
from harness.core.judge.stored_trial import load_case
from harness.core.plan.make_plan import make_plan
from harness.core.plan.units import fsdp_units

ROOT_UNITS = TrainerTraits(fsdp_units="root")
EXPECTED = ExpectedFailure(because="-", script="-", checks="-", named="-")
AVERAGE = Allowance("kept", "1 x parameters", "a moving average of the weights")


def test_a_case_and_a_trainer_share_no_key_but_those_that_a_case_may_leave_open() -> None:
    shared = {f.name for f in fields(TrainerTraits)} & {f.name for f in fields(Features)}
    assert shared == {"wrapper", "fsdp_units"}


def test_units_that_a_case_requests_are_planned_whatever_the_trainer_chose() -> None:
    requested = tiny_case("fsdp_2", fsdp_units="apart")
    assert fsdp_units(requested, ROOT_UNITS) == fsdp_units(requested, APART)
    left_open = tiny_case("fsdp_2")
    assert fsdp_units(left_open, ROOT_UNITS) != fsdp_units(left_open, APART)


def test_the_plan_carries_the_traits_that_it_was_made_of() -> None:
    assert make_plan(tiny_case("fsdp_2"), ROOT_UNITS).traits == ROOT_UNITS


def test_a_wrapper_that_a_case_requests_is_not_the_trainers_choice() -> None:
    chosen = {"run": TrainerTraits(wrapper="replicate")}
    assert with_trainer_choices(tiny_case("ddp_2"), chosen).wrapper == "replicate"
    assert with_trainer_choices(tiny_case("ddp_2", wrapper="ddp"), chosen).wrapper == "ddp"
    assert with_trainer_choices(tiny_case("ddp_2"), {"run": APART}) == tiny_case("ddp_2")


def test_a_trainer_that_cannot_defer_reduces_after_every_microbatch_where_that_means_something() -> None:
    at_once = {"run": TrainerTraits(defers_sync=False)}
    wrapped_alone = {"run": TrainerTraits(defers_sync=False, wrapper="fsdp2")}
    over_replicas = {"run": TrainerTraits(defers_sync="all_reduce")}
    staged = replace(tiny_case("fsdp_2", accumulation=2), dims=ParallelDims(pp=2, dp_shard=2))
    assert not with_trainer_choices(tiny_case("fsdp_2", accumulation=2), at_once).features.defer_sync
    assert with_trainer_choices(tiny_case("fsdp_2"), at_once) == tiny_case("fsdp_2")
    assert with_trainer_choices(tiny_case("single", accumulation=2), at_once).features.defer_sync
    assert not with_trainer_choices(tiny_case("single", accumulation=2), wrapped_alone).features.defer_sync
    assert (
        with_trainer_choices(tiny_case("hsdp_2x2", accumulation=2), over_replicas).features.defer_sync == "all_reduce"
    )
    assert with_trainer_choices(tiny_case("fsdp_2", accumulation=2), over_replicas).features.defer_sync is False
    assert with_trainer_choices(staged, at_once).features.defer_sync, (
        "torch reduces after every pass of the schedule, as it is"
    )
    assert with_trainer_choices(tiny_case("fsdp_2", accumulation=2), {"run": APART}).features.defer_sync


def test_what_is_expected_to_fail_with_the_usual_wrapper_is_not_with_the_trainers() -> None:
    expected = replace(tiny_case("ddp_2"), expected_failure=EXPECTED)
    assert with_trainer_choices(expected, {"run": TrainerTraits(wrapper="replicate")}).expected_failure is None
    assert with_trainer_choices(expected, {"run": TrainerTraits(wrapper="ddp")}).expected_failure is not None


def test_what_a_trainer_gets_wrong_is_expected_of_its_cases_alone_that_say_nothing_themselves() -> None:
    own, chosen = replace(EXPECTED, because="torch"), {"run": TrainerTraits(expected_failure=EXPECTED)}
    assert with_trainer_choices(tiny_case("fsdp_2"), chosen).expected_failure == EXPECTED
    assert with_trainer_choices(replace(tiny_case("fsdp_2"), expected_failure=own), chosen).expected_failure == own


def test_every_launch_has_the_choices_that_were_made_for_it() -> None:
    saved = Saved(after=1, dims=ParallelDims(dp_replicate=2))
    requested = replace(tiny_case("ddp_2"), resume=(saved,))
    chosen = {"saved_1": TrainerTraits(wrapper="fsdp2"), "run": TrainerTraits(wrapper="replicate")}
    assert {name: one.wrapper for name, one in with_trainer_choices(requested, chosen).launches.items()} == {
        "saved_1": "fsdp2",
        "run": "replicate",
    }


MEASURED = ', "measured": {"units": null, "flat_order": [], "cut_dims": {}, "torch": ""}}}'


def test_another_model_is_judged_by_the_noise_of_another_build() -> None:
    recipe = tiny_case("fsdp_2", replace(SGD, dtype="float32"))
    assert [TrainerTraits(own_model=own).noise_key(recipe) for own in (False, True)] == [
        recipe.noise_key,
        recipe.golden_noise_key,
    ]
    assert recipe.noise_key != recipe.golden_noise_key


def test_traits_are_stored_and_read_again() -> None:
    chosen = replace(ROOT_UNITS, loss_chunks=8, own_model=True, expected_failure=EXPECTED, allow=(AVERAGE,))
    units = (Unit(("norm.weight",), 2), Unit(("output.weight",), 1, backward_gathers=False))
    observed = {0: units, 1: (), 2: units}
    chosen = replace(
        chosen,
        flat_order=("norm.weight",),
        measured=MeasuredTraits(observed, ("output.weight",), {"output.weight": 1}, "2.9.0"),
    )
    assert traits.from_json(json.loads(json.dumps(traits.to_json(chosen)))) == chosen


@pytest.mark.parametrize(("key", "value"), [("fsdp_units", "none"), ("cp_heads", "all"), ("loss_chunks", 0)])
def test_a_choice_that_there_is_not_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        TrainerTraits(**{key: value})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no such file"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "nothing of run"),
        ('{"run": {"cp_heads": "query"}}', "nothing says what was measured"),
        ('{"run": {"cp_heads": "all"' + MEASURED, "cp_heads 'all': choose one of query, key_value"),
        ('{"run": {"units": 1' + MEASURED, "unexpected keyword argument 'units'"),
    ],
)
def test_traits_that_cannot_be_read_are_said_to_be_damaged(tmp_path, text: str | None, problem: str) -> None:
    (tmp_path / "case.json").write_text(json.dumps(case.to_json(tiny_case("fsdp_2"))))
    if text is not None:
        (tmp_path / "traits.json").write_text(text)
    with pytest.raises(EvidenceError, match="traits.json: ") as refused:
        load_case(tmp_path)
    assert problem in str(refused.value)


def test_a_trainer_that_keeps_its_own_schedule_has_it_in_every_case_of_no_file() -> None:
    own, requested = TrainerTraits(rates=(0.1, 0.2, 0.3)), replace(tiny_case("single", SGD), file="cases/any.yaml")
    kept = with_trainer_choices(requested, {"run": own})
    assert (kept.training.rates, kept.file) == ((0.1, 0.2, 0.3), "")
    assert traits.from_json(json.loads(json.dumps(traits.to_json(own)))) == own
    with_rates = replace(requested, training=replace(SGD, rates=(1.0, 1.0, 1.0)))
    assert with_trainer_choices(with_rates, {"run": own}) == with_rates
    with pytest.raises(case.CaseError, match="rates: one of at least 0 is needed for each of 3 steps"):
        with_trainer_choices(requested, {"run": TrainerTraits(rates=(0.1,))})
