"""What is seen of wrong gradients, and of collectives of backward that did not run. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from caused import cause_of
from diagnosed import DDP_2, EMBEDDING, NORM, broken, dims, fsdp_4, reference_gradient
from literal import (
    ADAMW,
    EIGHT,
    TINY,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_value,
)
from noisy import with_noise

from harness.core.case.dims import ParallelDims
from harness.core.causes.differences import pairs_with_wrong_gradient
from harness.core.causes.hypothesis import Fact
from harness.core.evidence.records import Collective
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.hypotheses.backward import (
    KV_FLOWS,
    coarsely_rounded_numbers,
    forward_order,
    random_state_not_restored,
    rounded_to_float32,
    silent_axes,
    wrong_backward,
)

WQ = "layers.0.attention.wq.weight"
TIED = trial_of(
    tiny_case(dims(2, tp=2), replace(ADAMW, variable_length=True), model=replace(TINY, tied_embeddings=True))
)
WHOLE = trial_of(
    tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, cp=2), EIGHT), tiny_case(ParallelDims(dp_replicate=8), EIGHT)
)
OF_LAYOUT = {"traffic", "process_groups", "placements"}
OF_GRADIENTS = {"gradients", "loss", "reported_loss"}
OF_CP = {"traffic", "exchange", "reshard", "features"}


def call(op: str, ranks: tuple[int, ...], phase: str = "backward", dtype: str = "float64", step: int = 1) -> Collective:
    return Collective(op, ranks, str(ranks), dtype, 64, phase, step, 0)


def without(trial: Trial, *dropped: tuple[str, str], ranks: tuple[int, ...] = (), step: int = 0) -> Trial:
    """No collective of these (op, phase) on these ranks (all) in this step (any)."""

    def kept(rank: int, one: Collective) -> list[Collective]:
        here = (not ranks or rank in ranks) and step in (0, one.step)
        return [] if here and (one.op, one.phase) in dropped else [one]

    return with_every_rank(trial, lambda t, rank: with_collectives(t, rank, lambda one: kept(rank, one)))


def changed(trial: Trial, step: int, *fqns: str, by: Callable[[np.ndarray], np.ndarray] = lambda g: g + 0.1) -> Trial:
    """The gradients of these parameters in a step, on all ranks."""
    for rank in trial.ranks:
        seen = trial.ranks[rank].steps[step - 1].gradients
        trial = with_step(trial, rank, step, gradients=seen | {fqn: by(seen[fqn]) for fqn in fqns})
    return trial


def found(trial: Trial, *checks: str) -> list[Fact]:
    return list(wrong_backward(trial, broken(*(checks or ("gradients", "traffic")))))


def kinds(trial: Trial) -> list[str]:
    return [fact.cause.kind for fact in found(trial)]


# ---- gradients over an axis


@pytest.mark.parametrize("step", [1, 2])
def test_an_axis_over_which_some_rank_reduces_nothing_in_a_step_is_silent(step: int) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    assert silent_axes(trial, step) == {}
    all_reduce, scatter = ("all_reduce", "backward"), ("reduce_scatter", "backward")
    for ranks in ((), (2,)):
        lost = without(trial, all_reduce, ranks=ranks, step=step)
        assert silent_axes(lost, step) == {"dp_replicate": "all_reduce"}
        assert silent_axes(lost, 3) == {}
    both = {"dp_shard": "reduce_scatter", "dp_replicate": "all_reduce"}
    assert silent_axes(without(trial, all_reduce, scatter, ranks=(1,)), step) == both
    assert silent_axes(without(trial, ("all_gather", "backward"), ("all_gather", "forward")), step) == {}


def test_a_reduction_that_is_missing_is_named_with_its_axes_where_gradients_are_wrong_too() -> None:
    right = trial_of(tiny_case("hsdp_2x2"))
    lost = without(right, ("all_reduce", "backward"), ("reduce_scatter", "backward"))
    (fact,) = found(changed(lost, 1, NORM))
    assert fact.cause.kind == "gradients not reduced"
    assert dict(fact.cause.details) == {"axes": ("dp_shard", "dp_replicate")}
    assert OF_LAYOUT | {"gradients"} <= {*fact.checks}
    assert found(changed(lost, 1, NORM), "gradients") == found(changed(right, 1, NORM)) == found(lost) == []
    (fact,) = found(changed(without(TIED, ("all_reduce", "backward"), step=2), 2, WQ))
    assert dict(fact.cause.details) == {"axes": ("dp_replicate",)}


# of ranks that hold other slices: what the first one issues, and the axes over which nothing is summed
NO_SUMS = (
    *(call("all_gather", (0, 1)), call("all_reduce", (0, 1), dtype="int64"), call("all_reduce", (0, 1), "forward")),
    call("all_reduce", (1, 5)),
)
SUMS = (call("all_reduce", (0, 4), dtype="float32"), call("reduce_scatter", (0, 2, 5), "pipeline"), *NO_SUMS)


@pytest.mark.parametrize(
    ("calls", "axes"),
    [
        (SUMS, ("cp",)),
        (NO_SUMS, ("dp_replicate", "dp_shard", "cp")),
        ((call("all_reduce", (0, 1, 2, 3, 4, 5, 6, 7)),), None),
    ],
)
def test_of_another_layout_axes_are_named_between_whose_ranks_nothing_sums(
    calls: tuple[Collective, ...], axes: tuple[str, ...] | None
) -> None:
    facts = found(changed(with_rank(WHOLE, 0, collectives=calls), 1, NORM))
    named = [dict(fact.cause.details)["axes"] for fact in facts if fact.cause.kind == "gradients not reduced"]
    assert named == [axes] * (axes is not None)


# ---- keys and values


def moving(trial: Trial, moved: Callable[[Flow], int]) -> Trial:
    """Each rank moves so many bytes of each planned flow, in every step."""

    def calls(rank: int) -> tuple[Collective, ...]:
        return tuple(
            replace(call(flow.op, trial.plan.group_of(rank, flow.axis), flow.phase, step=step), bytes=moved(flow))
            for step in (1, 2, 3)
            for flow in trial.plan.flows_of(rank, step)
            if flow.phase != OUTSIDE
        )

    return with_every_rank(trial, lambda t, rank: with_rank(t, rank, collectives=calls(rank)))


BACK, AGAIN = ("gradients of keys and values", "backward"), ("keys and values", "backward")
FORTH = ("keys and values", "forward")


@pytest.mark.parametrize("rotation", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("lost", "place"),
    [
        ([FORTH, AGAIN], FORTH),
        ([FORTH], FORTH),
        ([BACK], BACK),
        ([BACK, FORTH], FORTH),
        ([BACK, AGAIN], BACK),
        ([AGAIN], None),
        ([("gradients", "backward"), ("parameters", "forward")], None),
        ([], None),
    ],
)
def test_a_flow_of_attention_of_which_nothing_is_seen_is_no_exchange(
    rotation: str, lost: list[tuple[str, str]], place: tuple[str, str] | None
) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_rotation=rotation))
    silent = moving(trial, lambda flow: 0 if (flow.role, flow.phase) in lost else flow.bytes)
    for wrong, more in ((changed(silent, 1, NORM), OF_GRADIENTS), (silent, set())):
        facts = [fact for fact in found(wrong) if fact.cause.kind == "K/V not exchanged"]
        assert [({*fact.checks}, fact.cause.observed) for fact in facts] == [
            (OF_CP | more, KV_FLOWS[place]) for place in [place] if place
        ]
        assert found(wrong, "gradients") == [] or place is None
    if place:
        some = moving(trial, lambda flow: 2 if (flow.role, flow.phase) == place else flow.bytes)
        assert "K/V not exchanged" not in kinds(changed(some, 1, NORM))


@pytest.mark.parametrize(("wrong", "of"), [(["wv"], "values"), (["wk"], "keys"), (["wk", "wv"], None)])
def test_half_of_the_exchange_is_that_of_keys_or_of_values(wrong: list[str], of: str | None) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT))
    trial = moving(trial, lambda flow: flow.bytes // (1 + ((flow.role, flow.phase) == BACK)))
    for name in wrong:
        trial = changed(trial, 1, f"layers.0.attention.{name}.weight")
    told = [dict(fact.cause.details) for fact in found(trial) if fact.cause.kind == "K/V not exchanged"]
    assert told == [{"of": of}] * (of is not None)


# ---- down to where gradients are right


def not_over_tp(one: Collective, step: int) -> list[Collective]:
    lost = ("reduce_scatter", "backward", step)
    return [] if (one.op, one.phase, one.step) == lost and one.ranks in ((0, 1), (2, 3)) else [one]


@pytest.mark.parametrize("step", [1, 2])
def test_gradients_that_backward_loses_at_a_place_are_named_where_less_was_moved(step: int) -> None:
    late = (NORM, *(f"layers.0.{name}.weight" for name in ("ffn_norm", *(f"feed_forward.w{n}" for n in (1, 2, 3)))))
    right = {1: (NORM,), 2: late}[step]
    wrong = [fqn for fqn in TIED.plan.shapes if fqn not in right]
    less = with_every_rank(TIED, lambda t, rank: with_collectives(t, rank, lambda c: not_over_tp(c, step)))
    (fact,) = found(changed(less, step, *wrong))
    assert fact.cause.kind == "lost in backward" and {*fact.checks} == {"traffic", *OF_GRADIENTS}
    beside = [fqn for fqn in TIED.plan.shapes if fqn not in (*late, "layers.0.attention.wo.weight", WQ)]
    for trial in no_place(less, step, wrong, beside):
        assert "lost in backward" not in kinds(trial)


def no_place(less: Trial, step: int, wrong: list[str], beside: list[str]) -> Iterator[Trial]:
    yield changed(TIED, step, *wrong)  # nothing is missing
    yield changed(with_loss(less, step, 1.01), step, *wrong)
    yield changed(less, step, *less.plan.shapes)
    yield changed(less, step, EMBEDDING, NORM)  # on both sides of what is right
    yield changed(less, step, *beside)  # keys' are as deep as what is right of queries


def with_loss(trial: Trial, step: int, factor: float) -> Trial:
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[step - 1].microbatches
        assert part.loss_sum is not None
        trial = with_step(trial, rank, step, microbatches=(replace(part, loss_sum=factor * part.loss_sum),))
    return trial


def test_a_parameter_lies_as_deep_as_forward_comes_to_it() -> None:
    order = ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq", "layers.0.attention.wo"]
    order += ["layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.1.attention_norm"]
    order += ["layers.11.feed_forward.w2", "norm", "output"]
    depths = [forward_order(f"{name}.weight") for name in order]
    assert depths == sorted(set(depths))
    for alike in (["attention.wq", "attention.wk", "attention.wv"], ["feed_forward.w1", "feed_forward.w3"]):
        assert len({forward_order(f"layers.0.{name}.weight") for name in alike}) == 1


# ---- rounding


def test_only_what_float32_rounds_in_the_first_step_is_rounding() -> None:
    def off_by(size: float, step: int = 1) -> Trial:
        most = np.max(np.abs(reference_gradient(TIED, NORM)))
        return changed(TIED, step, NORM, by=lambda gradient: gradient + size * most)

    rounded = off_by(3e-8)
    for trial in (rounded, off_by(9e-7), with_loss(rounded, 3, 1 + 2e-7)):
        (fact,) = rounded_to_float32(trial, broken("gradients"))
        assert fact.cause.kind == "rounded" and list(rounded_to_float32(trial, broken("update"))) == []
    wrong = off_by(3e-6), with_loss(rounded, 1, 1 + 2e-6), with_loss(rounded, 3, math.nan), with_noise(rounded)
    for trial in (*wrong, with_loss(TIED, 1, 1 + 2e-7), off_by(3e-8, 2)):
        assert list(rounded_to_float32(trial, broken("gradients"))) == []


@pytest.mark.parametrize(("form", "named"), [("float16", "float16"), ("float32", "float32"), ("float64", "")])
def test_gradients_that_are_all_numbers_of_a_coarser_format_are_rounded(form: str, named: str) -> None:
    def rounded(rank: int, fqn: str) -> np.ndarray:
        return (1.001 * reference_gradient(TIED, fqn)).astype(form).astype(np.float64)

    found = list(coarsely_rounded_numbers(with_step_1_gradients(TIED, rounded), broken("gradients")))
    assert [dict(fact.cause.details)["format"] for fact in found] == [named] * bool(named)
    assert list(coarsely_rounded_numbers(TIED, broken("gradients"))) == []


@pytest.mark.parametrize("name", ["step", "exp_avg"])
@pytest.mark.parametrize(
    "counts", [np.full(200, 3.0), np.zeros(200), np.arange(200.0), np.array(3.0), np.full(200, 0.5)]
)
def test_counters_and_constants_of_an_optimizer_are_of_no_format(name: str, counts: np.ndarray) -> None:
    moments = np.random.default_rng(0).standard_normal(200)
    for held, named in ((moments, []), (moments.astype("float16").astype(np.float64), ["float16"])):
        state = {fqn: {name: counts, "momentum_buffer": held} for fqn in TIED.plan.shapes}
        trial = with_every_rank(TIED, lambda t, rank, state=state: with_step(t, rank, 3, optimizer_state=state))
        facts = list(coarsely_rounded_numbers(trial, broken("update")))
        assert [dict(fact.cause.details)["format"] for fact in facts] == named
        assert all("momentum_buffer" in fact.cause.observed for fact in facts)


# ---- nothing else is said


@pytest.mark.slow("many hypotheses; test_nothing_raises_on_evidence_that_makes_little_sense has such evidence")
def test_nothing_is_said_of_gradients_that_no_check_finds_wrong_and_of_nan_and_odd_shapes() -> None:
    wrong = with_value(fsdp_4(), 2, 1, "gradients", NORM, lambda gradient: gradient * np.nan)
    assert found(wrong, "update", "traffic") == found(fsdp_4()) == found(wrong) == []
    assert cause_of(wrong).kind == "not finite"
    misshapen = with_value(fsdp_4(), 2, 1, "gradients", "layers.0.feed_forward.w1.weight", np.transpose)
    assert cause_of(misshapen).kind == "not explained"


def test_a_gradient_is_as_wrong_as_the_check_says_relative_to_the_whole_parameter() -> None:
    small = {
        f: g * np.where(np.arange(g.shape[0]) < g.shape[0] // 2, 1.0, 1e-12).reshape(-1, *[1] * (g.ndim - 1))
        for f, g in DDP_2.reference.steps[0].gradients.items()
    }
    trial = trial_of(tiny_case("fsdp_2"))
    steps = (replace(trial.reference.steps[0], gradients=small), *trial.reference.steps[1:])
    trial = replace(trial, reference=replace(trial.reference, steps=steps))
    trial = with_step_1_gradients(trial, lambda rank, fqn: small[fqn] * (1 + 1e-3 * rank))
    assert pairs_with_wrong_gradient(trial, 1) == []
    assert judged("gradients", trial).verdict is Verdict.PASS


@pytest.mark.parametrize(("drawn", "named"), [(3, True), (0, False)])
def test_a_recomputation_that_draws_from_another_random_state_is_named(drawn: int, named: bool) -> None:
    trial = DDP_2
    for rank in trial.ranks:
        activity = trial.ranks[rank].steps[0].activity
        activity = replace(activity, other_states={"layers.0": 1, "layers.0.attention": 1}, random={"backward": drawn})
        trial = with_step(trial, rank, 1, activity=activity)
    kinds = [fact.cause.kind for fact in random_state_not_restored(trial, broken("gradients"))]
    assert kinds == ["random state not restored"] * named
    assert list(random_state_not_restored(trial, broken("loss"))) == []
