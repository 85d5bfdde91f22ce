"""What is said, word for word, of units that are not those requested and of what stays gathered. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import broken, dims, here, proposed, seen
from literal import tiny_case, trial_of, with_collectives, with_rank, with_step, with_step_1_gradients

from harness.diagnosis.differences import consequences
from harness.diagnosis.hypothesis import NOT_TESTED, Fact
from harness.diagnosis.units import (
    _in_no_unit,
    _kept_text,
    _other_policies,
    _units_text,
    kept_otherwise,
    left_by_evaluation,
    other_flat_units,
    other_units,
    units_disagree,
)
from harness.evidence.step import AfterEvaluation
from harness.judge.measured import measured
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims
from harness.spec.measured import Measured

NORMS = ("layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight")


def claiming(trial: Trial, rank: int, *units: tuple[str, ...]) -> Trial:
    """Each with what is kept of its first parameter by the plan."""
    wrappers = {fqn: wrapper for wrapper in trial.ranks[rank].structure.values() for fqn in wrapper.parameters}
    return with_rank(trial, rank, structure={unit[0]: replace(wrappers[unit[0]], parameters=unit) for unit in units})


def less_gathered(trial: Trial) -> Trial:
    """In forward, on rank 0."""
    return with_collectives(trial, 0, lambda call: [] if (call.op, call.phase) == ("all_gather", "forward") else [call])


GATHERED = "parameters: all_gather over dp_shard in forward: expected 1.888 kB per step, observed 0 B"

# ---- units


def test_units_as_they_are_claimed_are_proposed_with_the_traffic_that_is_wrong() -> None:
    trial = less_gathered(trial_of(tiny_case("fsdp_2")))
    trial = claiming(trial, 1, *((fqn,) for fqn in trial.plan.shapes))
    text = "fsdp2 units are finer than requested: parameters are gathered in 12 pieces, requested 3 on rank 1"
    for checks, lines in ((("placements",), ()), (("placements", "traffic"), (("traffic", GATHERED),))):
        (one,) = other_units(trial, broken(*checks))
        assert (one.cause, one.fitted, one.lines) == (Cause("other units", text), 2, lines)
    assert proposed(other_units, replace(trial, case=tiny_case("ddp_2")), "placements") == []
    assert proposed(other_units, with_rank(trial, 0, structure={}), "placements") == []


def test_a_policy_that_was_in_force_is_proposed_with_the_traffic_that_is_wrong() -> None:
    trial = less_gathered(trial_of(*(tiny_case("fsdp_2", reshard_after_forward=way) for way in ("always", "never"))))
    told = (
        "after forward: tok_embeddings, layers.0, norm and 1 more still gathered, should be freed;"
        " reshard_after_forward always is requested, never is observed"
    )
    for checks, lines in ((("reshard",), ()), (("reshard", "traffic"), (("traffic", GATHERED),))):
        first = next(other_units(trial, broken(*checks)))
        assert (first.cause, first.fitted, first.lines[:1]) == (
            Cause("another policy after forward", told),
            1,
            lines,
        )


def test_what_units_keep_is_assumed_as_they_claim_it_whatever_is_requested() -> None:
    never, always = (tiny_case("fsdp_2", reshard_after_forward=way) for way in ("never", "always"))
    trial = trial_of(never, always)
    trial = replace(trial, plan=replace(trial.plan, traits=replace(trial.traits, measured=Measured(torch="2.99"))))
    *_, claimed = other_units(trial, broken("reshard"))
    assert claimed.assume is not None and claimed.cause.kind == "other units"
    plan = claimed.assume(trial).plan
    assert plan.after_forward == trial_of(always).plan.after_forward != trial.plan.after_forward
    assert plan.torch == "2.99"


@pytest.mark.parametrize(
    ("wrapper", "kinds"), [("fsdp1", []), ("fsdp2", ["another policy after forward", "other units"])]
)
def test_of_units_of_fsdp1_that_are_wrong_no_policy_is_tried(wrapper: str, kinds: list[str]) -> None:
    ways = (tiny_case("fsdp_2", wrapper=wrapper, reshard_after_forward=way) for way in ("default", "never"))
    trial = trial_of(*ways)
    policy = ["another policy after forward"]
    assert [one.cause.kind for one in other_units(trial, broken("reshard"))][:1] == policy
    wrong = claiming(trial, 1, *((fqn,) for fqn in trial.plan.shapes))
    assert [one.cause.kind for one in other_units(wrong, broken("reshard"))] == kinds


def test_where_units_are_the_trainers_choice_no_default_is_supposed() -> None:
    trial = trial_of(tiny_case(dims(shard=4), fsdp_units="observed"), tiny_case(dims(shard=4)))
    assert list(_other_policies(trial)) == ["always", "never", 2]


def test_units_of_one_rank_are_compared_with_those_planned_for_it() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    everything = tuple(trial.plan.shapes)
    alone = claiming(trial, 1, everything)
    assert _units_text(alone) == (
        "the whole model is one fsdp2 unit on rank 1: parameters are gathered in 1 piece, requested 3 on rank 1"
    )
    one = replace(trial.plan, units={rank: [everything] for rank in (0, 1)})
    part = claiming(claiming(replace(trial, plan=one), 0, everything), 1, everything[:-1])
    assert _units_text(part) == (
        "fsdp2 units are finer than requested: parameters are gathered in 1 piece, requested 1 on rank 1"
    )


def test_what_another_stage_has_is_not_left_out_of_units() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    *units, _ = trial.plan.units[0]
    stage = replace(trial, plan=replace(trial.plan, units={rank: units for rank in range(4)}))
    planned = [fqn for fqn in trial.plan.shapes if any(fqn in unit for unit in units)]
    claimed = claiming(stage, 0, tuple(fqn for fqn in planned if fqn not in NORMS))
    assert _in_no_unit(claimed, 0) == [fqn for fqn in planned if fqn in NORMS] != []
    assert _in_no_unit(with_rank(stage, 0, structure={}), 0) == []


def without_norms(trial: Trial) -> Trial:
    for rank, evidence in trial.ranks.items():
        structure = {
            name: replace(of, parameters=tuple(fqn for fqn in of.parameters if fqn not in NORMS))
            for name, of in evidence.structure.items()
        }
        trial = with_rank(trial, rank, structure=structure)
    return trial


LEFT_OUT = (
    "fsdp1 leaves out 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more):"
    " no unit shards them or reduces their gradients"
)
FLAT = ("placements", "shard_contents", "reshard", "traffic", "memory")


@pytest.mark.parametrize(("wrong", "explains"), [(NORMS, True), (NORMS[:1], True), ((*NORMS, "output.weight"), False)])
def test_gradients_of_what_fsdp1_leaves_out_follow_from_it_and_others_do_not(
    wrong: tuple[str, ...], explains: bool
) -> None:
    trial = without_norms(trial_of(tiny_case(dims(shard=4), wrapper="fsdp1")))
    trial = with_step_1_gradients(trial, lambda _, fqn: (1 + (fqn in wrong)) * trial.reference.steps[0].gradients[fqn])
    line = here("placements")
    assert seen(other_flat_units, trial, "placements") == Fact(
        Cause("other units", LEFT_OUT), FLAT, (line, *NOT_TESTED)
    )
    follow = consequences(trial, 1) if explains else ()
    assert not explains or {"gradients", "grad_norm"} <= set(follow)
    assert seen(other_flat_units, trial, "placements", "gradients") == Fact(
        Cause("other units", LEFT_OUT), FLAT + follow, (line, *NOT_TESTED)
    )
    assert seen(other_flat_units, trial, "gradients") is None


def test_units_that_fsdp1_left_out_explain_no_gradients_where_none_is_wrong() -> None:
    trial = without_norms(trial_of(tiny_case(dims(shard=4), wrapper="fsdp1")))
    found = seen(other_flat_units, trial, "placements", "gradients")
    assert found is not None and found.checks == FLAT
    assert seen(other_flat_units, replace(trial, case=tiny_case(dims(shard=4))), "placements") is None


def test_ranks_that_disagree_on_units_of_their_own_choice_are_told_by_what_they_have() -> None:
    case = tiny_case("hsdp_2x2", fsdp_units="observed")
    trial = trial_of(case, tiny_case("hsdp_2x2"))
    first, block, last = trial.plan.units[0]
    for rank in (2, 3):
        trial = claiming(trial, rank, first, block[:4], block[4:], last)
    plan = replace(trial.plan, traits=measured(case, trial.traits, trial.run))
    fact = seen(units_disagree, replace(trial, plan=plan), "placements")
    assert fact is not None and (fact.checks, fact.lines) == (("placements",), (here("placements"),))
    first = fact.cause.finding
    assert fact.cause.kind == "ranks disagree on units" and first is not None
    assert (first.ranks, first.expected) == ((2, 3), "layers.0 (9) freed") and "[0,1]" in first.note
    assert first.observed == "layers.0 (4) freed; layers.0 (5) freed"
    assert seen(units_disagree, replace(trial, plan=plan), "reshard") is None


def test_units_that_are_claimed_otherwise_than_planned_are_a_fact_of_their_own() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    finer = claiming(trial, 0, *((fqn,) for fqn in trial.plan.shapes))
    text = "fsdp2 units are finer than requested: parameters are gathered in 12 pieces, requested 3 on rank 0"
    assert seen(units_disagree, finer, "placements") == Fact(
        Cause("other units", text), ("placements",), (here("placements"),)
    )
    assert seen(units_disagree, finer, "reshard") is None
    assert seen(units_disagree, trial, "placements") is None


# ---- what stays gathered


def left(step: int, *fqns: str) -> AfterEvaluation:
    held = {fqn: 8 * 8 * 4 for fqn in fqns}
    return AfterEvaluation(step, held, sum(held.values()), tuple(held))


def test_what_evaluation_left_is_told_with_the_ranks_the_time_and_the_traffic() -> None:
    trial = less_gathered(trial_of(tiny_case("fsdp_2")))
    checks, lines = ("reshard", "traffic"), (here("reshard"), ("traffic", GATHERED))
    one = with_rank(trial, 1, after_evaluation=(left(1, "tok_embeddings.weight"),))
    told = "evaluation left tok_embeddings.weight gathered between steps 1 and 2 on rank 1"
    why = ": no backward follows that would reshard them"
    cause = Cause("left gathered by evaluation", told + why)
    assert seen(left_by_evaluation, one, "reshard") == Fact(cause, checks, lines)
    assert seen(left_by_evaluation, one, "traffic") is None
    assert seen(left_by_evaluation, trial, "reshard") is None
    both = with_rank(one, 0, after_evaluation=(left(3, "tok_embeddings.weight"),))
    found = seen(left_by_evaluation, both, "reshard")
    assert found is not None
    each = ("after the last step on rank 0", "between steps 1 and 2 on rank 1")
    assert all(f"tok_embeddings.weight gathered {when}" in cause_line(found.cause) for when in each)


def test_what_is_kept_otherwise_is_a_fact_with_the_traffic_that_is_wrong() -> None:
    trial = less_gathered(trial_of(*(tiny_case("fsdp_2", reshard_after_forward=way) for way in ("always", "never"))))
    found = seen(kept_otherwise, trial, "reshard")
    assert found is not None
    assert (found.cause, found.checks) == (
        Cause("another policy after forward", _kept_text(trial)),
        ("reshard", "traffic"),
    )
    assert found.lines[:2] == (here("reshard"), ("traffic", GATHERED))
    assert seen(kept_otherwise, trial, "traffic") is None


def test_what_is_kept_is_read_in_the_first_step() -> None:
    trial = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    kept = trial_of(tiny_case("fsdp_2", reshard_after_forward="never"))
    later = with_step(trial, 0, 2, after_forward=kept.ranks[0].steps[1].after_forward)
    assert (
        _kept_text(later)
        == ""
        != _kept_text(with_step(trial, 0, 1, after_forward=kept.ranks[0].steps[0].after_forward))
    )
    assert _kept_text(with_rank(trial, 0, steps=())) == ""


def test_what_the_default_policy_is_under_a_pipeline_is_said() -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=way) for way in ("default", "always")))
    told = "after forward: norm, output freed, should be gathered; reshard_after_forward default is requested"
    piped = tiny_case(ParallelDims(pp=2, dp_shard=2))
    assert _kept_text(trial) == told
    assert _kept_text(replace(trial, case=piped)) == f"{told}, which is never under pp"
