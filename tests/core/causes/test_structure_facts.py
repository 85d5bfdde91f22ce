"""What checks of structure saw, as facts: of which kind, what follows, and what may be declared. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import DDP_2, LAST, broken, dims
from literal import (
    ADAMW,
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
)

from harness.core.case.dims import ParallelDims
from harness.core.case.traits import FlatLayout, TrainerTraits
from harness.core.causes import diagnose
from harness.core.causes.differences import GRADIENT_CHECKS
from harness.core.causes.hypothesis import Fact
from harness.core.causes.structure_facts import LOSS_AND_GRADIENT_CHECKS, STRUCTURE_ROWS
from harness.core.causes.structure_facts import facts_of_structure as facts
from harness.core.checks import judge
from harness.core.checks.traffic import IN_ANOTHER_DTYPE
from harness.core.evidence.records import Collective
from harness.core.evidence.step import (
    Activity,
    AfterEvaluation,
    Attention,
    Call,
    Matmul,
    QuantizedMatmul,
    SavedTensorsHook,
)
from harness.core.judge.finding import Finding
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

NORMS = ("layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "norm.weight")
ODD, FEATURE, POLICY = "odd traces", "another feature", "another policy after forward"


def seen(trial: Trial, *checks: str, beside: tuple[str, ...] = ()) -> list[Fact]:
    """What is stated of these checks as they judge the trial, where others fail besides."""
    failed = {name: judged(name, trial) for name in checks}
    failed = {name: result for name, result in failed.items() if result.verdict is Verdict.FAIL}
    return list(facts(trial, broken(*beside) | failed))


def quantity(fact: Fact) -> str:
    assert fact.cause.observed == "" and fact.cause.finding is not None
    return fact.cause.finding.quantity


def declared(fact: Fact) -> list[Any]:
    return [text for label, text in fact.lines if label == "if intended"]


# ---- features

FULL = trial_of(tiny_case("ddp_2", activation_checkpointing="full"))
FUSED, AGAIN = Attention("forward", "attention"), Attention("backward", "attention")
Change = Callable[[Activity], Activity]


def computing(trial: Trial, change: Change, ranks: tuple[int, ...] = (0, 1), since: int = 1) -> Trial:
    for rank in ranks:
        for step in trial.ranks[rank].steps[since - 1 :]:
            trial = with_step(trial, rank, step.step, activity=change(step.activity))
    return trial


def also(what: str, **counts: Any) -> Change:
    return lambda activity: replace(activity, **{what: getattr(activity, what) | counts["of"]})


@pytest.mark.parametrize(
    ("trial", "change", "told"),
    [
        (DDP_2, also("attention", of={FUSED: 2}), "attention in forward"),
        (DDP_2, also("attention", of={FUSED: 0}), "attention in forward"),
        (DDP_2, also("attention", of={AGAIN: 1}), "attention recomputed"),
        (FULL, also("attention", of={AGAIN: 0}), "attention recomputed"),
        (FULL, also("matmuls", of={Matmul("backward", "float64"): 16}), "matmuls in backward beyond planned gradients"),
        (DDP_2, also("calls", of={Call("backward", "layers.0.ffn_norm"): 1}), "recomputations"),
        (DDP_2, also("matmuls", of={Matmul("other", "float64"): 3}), "matmuls outside training passes"),
        (
            DDP_2,
            also("saved", of={SavedTensorsHook("forward", "mine.offload", "Hook"): 1}),
            "hooks on tensors saved for backward",
        ),
        (
            DDP_2,
            also("quantized", of={QuantizedMatmul("forward", "output", "float8_rowwise"): 1}),
            "float8_rowwise matmuls",
        ),
        (DDP_2, also("saved", of={SavedTensorsHook("forward", "torch.utils.checkpoint", "Hook"): 1}), None),
    ],
)
def test_what_a_rank_computes_from_a_step_on_is_told_as_the_check_found_it(
    trial: Trial, change: Change, told: str | None
) -> None:
    found = seen(computing(trial, change, (1,), since=2), "features")
    assert [(fact.cause.kind, quantity(fact)) for fact in found] == [(ODD, told)] * (told is not None)
    for fact in found:
        assert fact.cause.finding is not None and (fact.cause.finding.ranks, fact.cause.finding.step) == ((1,), 2)


def test_attention_that_is_computed_more_often_follows_from_a_loss_or_samples_that_are_wrong() -> None:
    twice = computing(DDP_2, also("attention", of={FUSED: 2}))
    assert [fact.checks for fact in seen(twice, "features", beside=("gradients",))] == [("features",)]
    assert seen(twice, "features", beside=("loss",)) == seen(twice, "features", beside=("samples",)) == []


def test_the_earliest_is_told_and_of_equally_early_ones_what_the_others_follow_from() -> None:
    hooks = also("saved", of={SavedTensorsHook("forward", "mine.offload", "Hook"): 1})
    outside = also("matmuls", of={Matmul("other", "float64"): 3})
    trial = computing(computing(DDP_2, hooks, since=2), outside)
    assert [quantity(fact) for fact in seen(trial, "features")] == ["matmuls outside training passes"]
    assert [quantity(fact) for fact in seen(computing(trial, hooks), "features")] == [
        "hooks on tensors saved for backward"
    ]


def test_what_a_trainer_may_do_by_choice_is_told_with_the_line_that_declares_it() -> None:
    hooked = computing(DDP_2, also("saved", of={SavedTensorsHook("forward", "mine.offload", "Hook"): 1}))
    outside = computing(DDP_2, also("matmuls", of={Matmul("other", "float64"): 3}))
    compiled = with_rank(DDP_2, 0, compiler={"graphs": 2})
    for trial, line in (
        (hooked, "allow: [{what: hooks, name: mine.offload.Hook, reason: WHY}]"),
        (outside, "allow: [{what: computed, matmuls: 3, reason: WHY}]"),
        (compiled, "allow: [{what: compiled, graphs: 2, reason: WHY}]"),
    ):
        (fact,) = seen(trial, "features")
        assert declared(fact) == [line]


def test_compiled_code_is_told_before_what_it_leaves_out() -> None:
    compiled = trial_of(tiny_case("ddp_2", compile=True))
    assert seen(compiled, "features") == []
    (fact,) = seen(with_rank(compiled, 1, compiler={}), "features")
    assert (fact.cause.kind, quantity(fact), declared(fact)) == (ODD, "compiled graphs", [])


def test_another_wrapper_is_told_where_nothing_proves_it_and_what_it_holds_follows() -> None:
    case = tiny_case("fsdp_2", wrapper="fsdp1")
    (fact,) = seen(replace(trial_of(tiny_case("fsdp_2")), case=case), "features")
    assert (fact.cause.kind, quantity(fact)) == (ODD, "data-parallel wrapper")
    assert fact.checks == ("features", "placements", "shard_contents", "reshard", "traffic")


def test_reductions_at_once_and_in_another_dtype_are_told() -> None:
    (fact,) = seen(trial_of(tiny_case("ddp_2", bucket_mb=0.0001)), "features")
    assert (fact.cause.kind, quantity(fact)) == (ODD, "largest bucket reduced")

    def in_float32(call: Collective) -> list[Collective]:
        return [replace(call, dtype="float32") if (call.op, call.phase) == ("reduce_scatter", "backward") else call]

    trial = with_collectives(trial_of(tiny_case("fsdp_2")), 1, in_float32)
    units = trial.ranks[1].structure
    odd, *others = units
    mixed = {name: replace(units[name], reduces_in="float64") for name in others} | {
        odd: replace(units[odd], reduces_in="")
    }
    (fact,) = seen(with_rank(trial, 1, structure=mixed), "features")
    finding = fact.cause.finding
    assert finding is not None and (finding.quantity, finding.observed) == ("dtype of reduced gradients", "float32")
    assert odd in finding.note and not any(name in finding.note for name in others)
    features = judged("features", with_rank(trial, 1, structure=mixed))
    less = Finding.at(1, 8, 4, step=1, kind="collective", name="reduce_scatter", phase="backward", unit="bytes")
    for findings, checks in (
        ((less,), ("features", "traffic")),
        ((less, replace(less, name="all_gather")), ("features",)),
        ((replace(less, observed=3),), ("features",)),
    ):
        both = {"features": features, "traffic": Result("traffic", Verdict.FAIL, 1, findings)}
        assert next(facts(trial, both)).checks == checks


@pytest.mark.parametrize("by_dtype", [{"float32": 8}, {"float32": 1, "float64": 7}])
def test_matmuls_in_another_dtype_are_told_with_how_many_and_in_which_units(by_dtype: dict[str, int]) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    phases = {"forward": 1, "backward": 2}
    counts = {Matmul(phase, dtype): by * n for phase, by in phases.items() for dtype, n in by_dtype.items()}
    units = {name: replace(unit, casts_to="float64") for name, unit in trial.ranks[0].structure.items()}
    odd = next(iter(units))
    trial = with_rank(trial, 0, structure=units | {odd: replace(units[odd], casts_to="float32")})
    trial = computing(trial, lambda activity: replace(activity, matmuls=counts))
    (fact,) = seen(trial, "features", beside=("gradients",))
    assert (fact.cause.kind, quantity(fact)) == (FEATURE, "matmuls' dtype")
    assert fact.checks == ("features", "reshard", "traffic", "memory", *GRADIENT_CHECKS)
    assert fact.cause.finding is not None and odd in fact.cause.finding.note
    assert ("1 in float32" in fact.cause.finding.note) == (len(by_dtype) == 2)
    assert "not tested" in dict(fact.lines)


# ---- pipelines


def test_a_pipeline_that_follows_no_schedule_is_told_by_what_the_check_found_first() -> None:
    trial = replace(DDP_2, case=tiny_case(ParallelDims(pp=2), schedule="1F1B"))
    (fact,) = seen(with_step(trial, 0, 1, actions=("0F0", "0B0")), "schedule")
    assert (fact.cause.kind, fact.checks) == ("other actions", ("schedule",)) and quantity(fact).startswith("action")


def test_what_stages_send_in_another_dtype_is_told_and_numbers_follow() -> None:
    trial = replace(DDP_2, case=tiny_case(ParallelDims(pp=2)))
    for phase, told in (("pipeline", True), ("backward", False)):
        finding = Finding.at(0, 8, 4, check="traffic", name="send", phase=phase, quantity=IN_ANOTHER_DTYPE)
        found = list(facts(trial, {"traffic": Result("traffic", Verdict.FAIL, 1, (finding,))}))
        assert [(fact.cause.kind, fact.checks) for fact in found] == [(FEATURE, ("traffic", *GRADIENT_CHECKS))] * told


# ---- units


def claiming(trial: Trial, rank: int, *units: tuple[str, ...]) -> Trial:
    """Each with what is kept of its first parameter by the plan."""
    wrappers = {fqn: wrapper for wrapper in trial.ranks[rank].structure.values() for fqn in wrapper.parameters}
    return with_rank(trial, rank, structure={unit[0]: replace(wrappers[unit[0]], parameters=unit) for unit in units})


def test_ranks_that_disagree_on_units_of_their_own_choice_are_told_by_what_they_have() -> None:
    case = tiny_case("hsdp_2x2", fsdp_units="observed")
    trial = trial_of(case, tiny_case("hsdp_2x2"))
    first, block, last = trial.plan.units[0]
    for rank in (2, 3):
        trial = claiming(trial, rank, first, block[:4], block[4:], last)
    plan = replace(trial.plan, traits=with_measured_traits(case, trial.traits, trial.run))
    (fact,) = seen(replace(trial, plan=plan), "placements")
    finding = fact.cause.finding
    assert (fact.cause.kind, fact.checks) == ("ranks disagree on units", ("placements",))
    assert finding is not None and (finding.ranks, finding.expected) == ((2, 3), "layers.0 (9) freed")


def test_units_that_are_claimed_otherwise_are_told_and_of_flat_ones_what_is_held_follows() -> None:
    for wrapper, more in (("fsdp2", ()), ("fsdp1", ("shard_contents", "reshard", "traffic", "memory"))):
        trial = trial_of(tiny_case("fsdp_2", wrapper=wrapper))
        (fact,) = seen(claiming(trial, 1, *((fqn,) for fqn in trial.plan.shapes)), "placements")
        assert (fact.cause.kind, fact.checks) == ("other units", ("placements", *more))
        assert fact.cause.finding is not None and (fact.cause.finding.kind, fact.cause.finding.ranks) == ("unit", (1,))


def test_of_what_fsdp1_leaves_out_it_is_told_which_and_gradients_follow() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    for rank, evidence in trial.ranks.items():
        of = {n: (w, tuple(fqn for fqn in w.parameters if fqn not in NORMS)) for n, w in evidence.structure.items()}
        trial = with_rank(trial, rank, structure={n: replace(w, parameters=left) for n, (w, left) in of.items()})
    (fact,) = seen(trial, "placements")
    finding = fact.cause.finding
    assert fact.cause.kind == "other units" and {"gradients", "shard_contents", "memory"} <= {*fact.checks}
    assert finding is not None and isinstance(finding.observed, tuple) and {*finding.observed} <= {*NORMS}


# ---- what stays gathered


def left(step: int, *fqns: str) -> AfterEvaluation:
    held = {fqn: 8 * 8 * 4 for fqn in fqns}
    return AfterEvaluation(step, held, sum(held.values()), tuple(held))


def test_what_evaluation_left_is_told_before_what_it_leads_to() -> None:
    trial = with_rank(trial_of(tiny_case("fsdp_2")), 1, after_evaluation=(left(1, "tok_embeddings.weight"),))
    (fact,) = seen(trial, "reshard")
    finding = fact.cause.finding
    assert (fact.cause.kind, fact.checks) == ("left gathered by evaluation", ("reshard", "traffic"))
    assert finding is not None and (finding.name, finding.step, finding.ranks) == ("tok_embeddings.weight", 1, (1,))


def test_what_is_kept_by_some_ranks_alone_is_told_as_seen() -> None:
    always, never = (trial_of(tiny_case("fsdp_2", reshard_after_forward=way)) for way in ("always", "never"))
    (fact,) = seen(with_rank(always, 1, steps=never.ranks[1].steps), "reshard")
    assert (fact.cause.kind, fact.checks) == (POLICY, ("reshard", "traffic"))
    assert fact.cause.finding is not None and fact.cause.finding.ranks == (1,)


@pytest.mark.parametrize("kept", [False, True])
def test_what_backward_left_is_told_unless_forward_kept_it_already(kept: bool) -> None:
    trial = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    never = trial_of(tiny_case("fsdp_2", reshard_after_forward="never"))
    steps = never.ranks[0].steps if kept else trial.ranks[0].steps
    trial = with_rank(trial, 0, steps=tuple(replace(one, gathered=(LAST,)) for one in steps))
    (fact,) = seen(trial, "reshard")
    assert fact.cause.kind == (POLICY if kept else "left gathered by backward")


@pytest.mark.parametrize("again", [True, False])
def test_what_is_left_and_not_gathered_again_explains_wrong_numbers(again: bool) -> None:
    trial = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    steps = tuple(replace(one, gathered=(LAST,)) for one in trial.ranks[0].steps)
    lost = [one for one in trial.ranks[0].collectives if (one.op, one.phase, one.step) == ("all_gather", "forward", 2)]
    kept = tuple(one for one in trial.ranks[0].collectives if again or one not in lost)
    trial = with_rank(trial, 0, steps=steps, collectives=kept)
    trial = with_step(trial, 0, 3, reported_loss=1.0)
    (fact,) = (one for one in seen(trial, "reshard", "traffic", "reported_loss") if one.cause.kind.startswith("left"))
    assert ("reported_loss" in fact.checks) is not again


# ---- ZeRO


def zero(stage: str, traits: TrainerTraits | None = None) -> Trial:
    case = tiny_case(dims(shard=3), replace(ADAMW, global_batch=9), wrapper=stage, model=UNEVEN)
    trial = trial_of(case)
    return trial if traits is None else replace(trial, plan=make_plan(case, traits))


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_nobody_gathers_are_told_where_replicas_part(late: bool) -> None:
    def ungathered(call: Collective) -> Iterator[Collective]:
        if call.op != "all_gather":
            yield call

    trial = zero("zero1", TrainerTraits(zero_gathers_late=late))
    lost = with_every_rank(trial, lambda t, rank: with_collectives(t, rank, ungathered))
    (fact,) = seen(lost, "traffic", beside=("replica_agreement",))
    assert (fact.cause.kind, fact.checks) == (
        "parameters not gathered",
        ("traffic", "replica_agreement", *LOSS_AND_GRADIENT_CHECKS),
    )
    assert fact.cause.finding is not None and fact.cause.finding.name == "all_gather"
    assert seen(lost, "traffic") == seen(zero("zero1"), "traffic", beside=("replica_agreement",)) == []


GATED = tuple(f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w3"))
TENSORS = (*((fqn,) for fqn in UNEVEN.parameter_shapes() if fqn not in GATED), GATED * 2)
FUSED_LAYOUT = FlatLayout(order=TENSORS, reverse=True, starts=8)  # blocks alternate, there is padding between tensors


@pytest.mark.parametrize("layout", [FlatLayout(), FUSED_LAYOUT])
@pytest.mark.parametrize("by", [1, -3, 8, -8, 9])
def test_parts_of_the_gradients_that_begin_at_another_place_are_named(by: int, layout: FlatLayout) -> None:
    def shifted(trial: Trial, rank: int) -> Trial:
        (unit,), held = trial.plan.flat, trial.plan.gradient_slices[rank]
        vector, place = np.zeros(unit.numel + 9), dict[str, np.ndarray]()
        for fqn, starts in unit.starts.items():
            full = trial.reference_step(1).gradients[fqn]
            place[fqn] = np.concatenate([start + np.arange(full.size // len(starts)) for start in starts])
            vector[place[fqn] + by] = full
        parts = {fqn: vector[place[fqn]][start:stop] for fqn, ((start, stop),) in held.items()}
        return with_step(trial, rank, 1, gradients=parts)

    trial = with_every_rank(zero("zero2", TrainerTraits(zero_layout=layout)), shifted)
    found = seen(trial, "gradients")
    assert [(fact.cause.kind, fact.cause.details) for fact in found] == [("gradients shifted", (("elements", by),))] * (
        by != 9
    )
    held = trial.ranks[1].steps[0].gradients
    fewer = with_step(trial, 1, 1, gradients={fqn: part[1:] for fqn, part in held.items()})
    assert seen(fewer, "gradients") == []


# ---- the table


def test_rows_name_quantities_that_checks_have_and_random_findings_are_no_fact() -> None:
    assert {row.check for row in STRUCTURE_ROWS} == {
        "features",
        "schedule",
        "placements",
        "reshard",
        "traffic",
        "shard_contents",
    }
    assert (
        list(facts(DDP_2, broken("features", "placements", "reshard", "traffic", "shard_contents", "gradients"))) == []
    )
    draw = np.random.default_rng(3)
    trial = trial_of(tiny_case("fsdp_2"))
    noisy = with_collectives(trial, 0, lambda call: [replace(call, bytes=int(draw.integers(1, 10**6)))])
    found = diagnose(noisy, judge(noisy))
    assert found is not None and not {ODD, FEATURE, POLICY, "other units"} & {*found.kinds}
