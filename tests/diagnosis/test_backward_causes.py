"""Gradients that cannot be compared with the reference's, and what follows of them. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import EMBEDDING, NORM, broken, dims, expect, fsdp_4, reference_gradient
from literal import (
    ADAMW,
    EIGHT,
    TINY,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
    with_value,
)
from noisy import with_noise

from harness.checks.features import LACKING
from harness.diagnosis.backward import OF_ATTENTION, depth, rounding, wrong_backward
from harness.diagnosis.hypothesis import NOT_TESTED, Fact
from harness.diagnosis.words import traffic_lines
from harness.evidence.records import Collective
from harness.judge.finding import Finding
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.traffic.flow import Flow
from harness.spec.dims import ParallelDims

W1, WQ = "layers.0.feed_forward.w1.weight", "layers.0.attention.wq.weight"
Ranks = Sequence[int]
Seen = tuple[Trial, *tuple[Fact, ...]]


def misshapen(trial: Trial, step: int, *ranks: int) -> Trial:
    for rank in ranks:
        trial = with_value(trial, rank, step, "gradients", W1, np.transpose)
    return trial


def test_gradients_of_another_shape_are_told_with_the_shapes_on_the_first_rank() -> None:
    expect(
        misshapen(fsdp_4(), 1, 2, 3),
        """\
gradients have another shape than their parameters in 1 of 12 parameters (layers.0.feed_forward.w1.weight) on ranks [2,3]: rank 2, layers.0.feed_forward.w1.weight: gradient (4, 2) of a parameter (2, 4)
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


# ---- what is told first

SHORT = replace(ADAMW, variable_length=True)  # in step 2
TIED = trial_of(tiny_case(dims(2, tp=2), SHORT, model=replace(TINY, tied_embeddings=True)))
ZERO = trial_of(tiny_case("fsdp_2", wrapper="zero2"))
CP_2 = trial_of(tiny_case(ParallelDims(cp=2), EIGHT))
WHOLE = trial_of(
    tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, cp=2), EIGHT), tiny_case(ParallelDims(dp_replicate=8), EIGHT)
)
CHECKS = ("gradients", "grad_norm", "loss", "reported_loss", "update", "replica_agreement")
OF_ONE = ("gradients", "loss", "reported_loss")


def changed(
    trial: Trial, step: int, change: Callable[[np.ndarray], np.ndarray], *fqns: str, ranks: Ranks = ()
) -> Trial:
    """The gradients of these parameters in a step, on these ranks (all)."""
    for rank in ranks or trial.ranks:
        seen = trial.ranks[rank].steps[step - 1].gradients
        trial = with_step(trial, rank, step, gradients=seen | {fqn: change(seen[fqn]) for fqn in fqns})
    return trial


def call(op: str, ranks: tuple[int, ...], phase: str = "backward", dtype: str = "float64", step: int = 1) -> Collective:
    return Collective(op, ranks, str(ranks), dtype, 64, phase, step, 0)


def nan(gradient: np.ndarray) -> np.ndarray:
    return gradient * np.nan


def more(gradient: np.ndarray) -> np.ndarray:
    return gradient + 0.1


def misshapen_in(step: int) -> Iterator[Seen]:
    """Told before numbers that are not finite, and of what is wrong those of another shape."""
    trial = changed(TIED, step, lambda gradient: gradient[1:], W1, ranks=(1, 3))
    text = f"gradients have another shape than their parameters in 1 of 11 parameters ({W1}) on ranks [1,3]"
    cause = Cause("gradients misshapen", f"{text}: rank 1, {W1}: gradient (3, 4) of a parameter (4, 4)")
    yield changed(changed(trial, step, nan, NORM), step, more, WQ), Fact(cause, CHECKS)
    assert [ZERO.plan.gradient_slices[rank][W1] for rank in (0, 1)] == [((0, 22),), ((22, 32),)]
    text = f"gradients have another shape than their parameters in 1 of 12 parameters ({W1})"
    ranks, where, shapes = (
        ((0, 1), f": rank 0, {W1}", "(21,) of a parameter (22,)"),
        ((1,), f" on rank 1: rank 1, {W1}", "(9,) of a parameter (10,)"),
    )[step - 1]
    cause = Cause("gradients misshapen", f"{text}{where}: gradient {shapes}")
    yield changed(ZERO, step, lambda gradient: gradient[1:], W1, ranks=ranks), Fact(cause, CHECKS[:-1])


def not_finite_in(step: int) -> Iterator[Seen]:
    trial = changed(TIED, step, nan, NORM, ranks=(2,))
    where = f"NaN or infinite in step {step} in 1 of 11 parameters (norm.weight) on rank 2"

    def told(text: str) -> Fact:
        return Fact(Cause("not finite", text), (*CHECKS, "finite"))

    finite = told(f"gradients are {where}, the losses are finite")
    yield changed(trial, step, more, WQ), finite
    silent = trial
    for rank in trial.ranks:
        silent = with_step(silent, rank, step, microbatches=())
    yield silent, told(f"gradients are {where}")
    (part,) = trial.ranks[3].steps[step - 1].microbatches
    other = with_step(trial, 3, 3, microbatches=(replace(part, loss_sum=math.nan),))
    untold = with_step(other, 1, step, microbatches=(replace(part, loss_sum=None),))
    yield untold, replace(finite, checks=tuple(check for check in finite.checks if check != "reported_loss"))
    odd = with_step(untold, 3, step, microbatches=(replace(part, loss_sum=math.inf),))
    yield odd, told(f"loss and gradients are {where}")
    labels = trial.reference.labels.copy()
    labels[8 * step - 4 : 8 * step, : trial.case.seq_len(step)] = -100
    none = replace(trial, reference=replace(trial.reference, labels=labels))
    yield none, told(f"{finite.cause.observed}: rank 2 has no valid token, and a mean over none is 0/0")
    yield replace(odd, reference=none.reference), told(f"loss and gradients are {where}")


def lost_in(step: int) -> Iterator[Seen]:
    """Where backward over tp moved less than planned. The place alone tells nothing."""
    late = (
        "norm.weight",
        *(f"layers.0.{name}.weight" for name in ("ffn_norm", *(f"feed_forward.w{n}" for n in (1, 2, 3)))),
    )
    right, shown = {1: ((NORM,), NORM), 2: (late, "layers.0.ffn_norm.weight and what follows")}[step]
    wrong = [fqn for fqn in TIED.plan.shapes if fqn not in right]
    less = with_every_rank(TIED, lambda t, rank: with_collectives(t, rank, lambda c: not_over_tp(c, step)))
    text = (
        f"gradients are right in {shown}, and wrong in all parameters before: backward moves less than planned over tp"
    )
    lost = Fact(Cause("lost in backward", text), ("traffic", *OF_ONE), NOT_TESTED)
    yield changed(less, step, more, *wrong), lost
    yield (changed(TIED, step, more, *wrong),)
    odd = with_step(less, 0, step, microbatches=with_loss(less, step, 1.01).ranks[0].steps[step - 1].microbatches)
    yield (changed(odd, step, more, *wrong),)
    yield (changed(less, step, more, *less.plan.shapes),)
    yield (changed(less, step, more, EMBEDDING, "norm.weight"),)  # on both sides of what is right
    beside = [fqn for fqn in TIED.plan.shapes if fqn not in (*late, "layers.0.attention.wo.weight", WQ)]
    yield (changed(less, step, more, *beside),)  # keys' are as deep as what is right of queries


def not_over_tp(call: Collective, step: int) -> list[Collective]:
    place = call.op, call.phase, call.step
    return [] if place == ("reduce_scatter", "backward", step) and call.ranks in ((0, 1), (2, 3)) else [call]


def in_parts_in(step: int) -> Iterator[Seen]:
    """Norms by halves, and a tied weight of which only the rows are there that were read."""
    trial = changed(TIED, step, lambda gradient: gradient / 4, NORM, ranks=(0, 2))
    trial = changed(trial, step, lambda gradient: gradient * 3 / 4, NORM, ranks=(1, 3))
    text = "gradients of norm are not summed over tp: 1 parameter wrong, all others right"
    why = "with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing"
    tested = f"in step {step} what the ranks of a tp group have sums to the reference's gradients; later weights differ"
    yield trial, Fact(Cause("norms not summed", text), CHECKS, (("why", why), ("tested", tested)))
    yield (changed(trial, step, more, NORM, ranks=(3,)),)
    tokens = np.repeat([[0, 1, 5, 5], [6, 6, 2, 2], [7, 7, 7, 7]], 8, axis=0)
    trial = replace(TIED, reference=replace(TIED.reference, tokens=tokens))
    read = {1: [0, 1, 5], 2: [6]}[step]
    yield (only_rows(trial, step, [*read, 2]),)
    trial = only_rows(trial, step, read)
    yield (changed(trial, step, more, WQ),)
    text = f"the gradient of the tied weight lacks the output's part: {EMBEDDING} has only the embedding's"
    tested = f"in step {step} all rows of tokens that were not read are zero, all other parameters are right"
    checks = (*OF_ONE, "features")
    yield trial, Fact(Cause("tied weight without the output's part", text), checks, (("tested", tested),))


def only_rows(trial: Trial, step: int, rows: list[int]) -> Trial:
    """Of the embedding's gradient, which tp cuts along them."""
    kept = np.isin(np.arange(8), rows)[:, None]
    for rank in trial.ranks:
        (start, stop), _ = trial.plan.slices[rank][EMBEDDING]
        trial = changed(trial, step, lambda g, own=kept[start:stop]: own * g**2, EMBEDDING, ranks=(rank,))
    return trial


def not_reduced_in(step: int) -> Iterator[Seen]:
    trial = changed(TIED, step, more, WQ)
    silent = with_every_rank(trial, lambda t, rank: with_collectives(t, rank, lambda c: kept(c, step)))
    text = "gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3]"
    checks = ("traffic", "process_groups", "placements", *OF_ONE)
    lines = (*traffic_lines(silent), *NOT_TESTED)
    yield silent, Fact(Cause("gradients not reduced", text), checks, lines)


def kept(call: Collective, step: int) -> list[Collective]:
    over_replicas = call.op == "all_reduce" and call.ranks in ((0, 2), (1, 3))
    return [] if over_replicas and (call.phase, call.step) == ("backward", step) else [call]


# of ranks that hold other slices: what the first one issues, and the axes over which nothing is summed
NO_SUMS = [
    *[call("all_gather", (0, 1)), call("all_reduce", (0, 1), dtype="int64"), call("all_reduce", (0, 1), "forward")],
    call("all_reduce", (1, 5)),
]
SUMS = [call("all_reduce", (0, 4), dtype="float32"), call("reduce_scatter", (0, 2, 5), "pipeline"), *NO_SUMS]
CALLS = {
    1: [(SUMS, "cp"), ([call("all_reduce", tuple(range(8)))], "")],
    2: [(NO_SUMS, "dp_replicate and dp_shard and cp")],
}


def in_another_layout(step: int) -> Iterator[Seen]:
    assert [WHOLE.plan.group_of(0, axis) for axis in ("cp", "dp_shard", "dp_replicate")] == [(0, 1), (0, 2), (0, 4)]
    none = Fact(NO_KEYS, ("traffic", "exchange", "reshard", "features", *OF_ONE), NOT_TESTED)
    for calls, missing in CALLS[step]:
        trial = changed(with_rank(WHOLE, 0, collectives=tuple(calls)), step, more, NORM)
        cause = Cause("gradients not reduced", f"gradient reduction missing over {missing}")
        yield (trial, *[Fact(cause, OF_ONE, NOT_TESTED)] * bool(missing), none)
    yield changed(with_rank(CP_2, 0, collectives=()), step, more, NORM), none


NO_KEYS = Cause("K/V not exchanged", "no K/V exchange over cp")
NO_GRADIENTS = Cause("K/V not exchanged", "no exchange of K/V gradients over cp: each rank keeps its own")


def not_exchanged_in(step: int) -> Iterator[Seen]:
    """Over cp, where parameters are gathered by the same collective, and gradients of keys and values go round alone."""
    trial = changed(CP_2, step, more, NORM)
    keys, back = (
        next(flow for flow in trial.plan.flows_of(0, step) if (flow.role, flow.phase) == place)
        for place in OF_ATTENTION
    )
    checks = ("traffic", "exchange", "reshard", "features", *OF_ONE)
    yield (trial,)  # of which nothing is told
    yield without(trial, step, keys), Fact(NO_KEYS, checks, NOT_TESTED)
    yield without(trial, step, back), Fact(NO_GRADIENTS, checks, NOT_TESTED)


def without(trial: Trial, step: int, flow: Flow) -> Trial:
    """Ranks move none of it, in that step: a collective of 8 bytes and one of all others."""

    def kept(rank: int) -> tuple[Collective, ...]:
        calls = trial.ranks[rank].collectives
        place = flow.op, flow.phase, step, flow.bytes - 8
        (at,) = [at for at, one in enumerate(calls) if (one.op, one.phase, one.step, one.bytes) == place]
        return (*calls[: at - 1], *calls[at + 1 :])

    return with_every_rank(trial, lambda t, rank: with_rank(t, rank, collectives=kept(rank)))


def rounded_in(step: int) -> Iterator[Seen]:
    """Of float64, in step 1; the losses of all steps are off by no more than float32 rounds either."""

    def off_by(size: float, *ranks: int) -> Trial:
        return changed(
            TIED, step, lambda g: g + size * np.max(np.abs(reference_gradient(TIED, NORM))), NORM, ranks=ranks
        )

    def told(observed: str, where: str) -> Fact:
        hint = "no more than arithmetic in float32 rounds, requested float64"
        cause = Cause("rounded", observed, f"in 1 of 11 parameters (norm.weight){where}", hint=hint)
        return Fact(cause, ("gradients", "loss", "grad_norm", "reported_loss"))

    rounded = off_by(3e-8, 1, 2)
    if step > 1:
        yield (rounded,)
        return
    yield off_by(9e-7, 0, 1, 2, 3), told("gradients are off by 9e-07", "")
    where = " on ranks [1,2], the loss by 2e-07"
    yield with_loss(rounded, 3, 1 + 2e-7), told("gradients are off by 3e-08", where)
    wrong = off_by(3e-6, 1), with_loss(rounded, 1, 1 + 2e-6), with_loss(rounded, 3, math.nan), with_noise(rounded)
    yield from zip((*wrong, with_loss(TIED, 1, 1 + 2e-7)))


def with_loss(trial: Trial, step: int, factor: float) -> Trial:
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[step - 1].microbatches
        assert part.loss_sum is not None
        trial = with_step(trial, rank, step, microbatches=(replace(part, loss_sum=factor * part.loss_sum),))
    return trial


def test_of_what_is_seen_of_the_gradients_of_a_step_the_first_is_told() -> None:
    checks = broken("gradients", "traffic", "features")
    lacking = (Finding.at(0, 30, 28, step=1, quantity=LACKING),)
    checks |= {"features": replace(checks["features"], findings=lacking)}
    for look, step in itertools.product((*LOOKS, rounded_in), (1, 2)):
        facts = rounding if look is rounded_in else wrong_backward
        for number, (trial, *told) in enumerate(look(step)):
            assert list(facts(trial, checks)) == told, (look, step, number)
            assert list(facts(trial, broken("update"))) == [], (look, step, number)


LOOKS = (misshapen_in, not_finite_in, not_exchanged_in, not_reduced_in, in_another_layout, in_parts_in, lost_in)


def test_nothing_is_told_of_gradients_that_no_check_finds_wrong() -> None:
    wrong = with_value(fsdp_4(), 2, 1, "gradients", NORM, lambda gradient: gradient * np.nan)
    assert list(wrong_backward(wrong, broken("update", "traffic"))) == []
    assert list(wrong_backward(fsdp_4(), broken("gradients", "traffic"))) == []
    assert list(wrong_backward(with_value(wrong, 2, 1, "gradients", NORM, np.nan_to_num), broken("gradients"))) == []


@pytest.mark.parametrize("checks", [("traffic",), ("traffic", "gradients")])
def test_what_is_not_exchanged_over_cp_is_told_where_no_gradient_is_wrong_too(checks: tuple[str, ...]) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT))
    silent = with_every_rank(
        trial, lambda t, r: with_collectives(t, r, lambda c: [] if (c.op, c.step) == ("all_to_all", 1) else [c])
    )
    text = "no exchange of K/V gradients over cp: each rank keeps its own"
    (fact,) = wrong_backward(silent, broken(*checks))
    assert (fact.cause, fact.checks) == (
        Cause("K/V not exchanged", text),
        ("traffic", "exchange", "reshard", "features"),
    )
    assert list(wrong_backward(silent, broken("gradients"))) == []
    wrong = with_value(silent, 0, 1, "gradients", NORM, lambda gradient: gradient + 1)
    (fact,) = wrong_backward(wrong, broken("traffic", "gradients"))
    assert fact.checks == ("traffic", "exchange", "reshard", "features", "gradients", "loss", "reported_loss")
    assert list(wrong_backward(wrong, broken("gradients"))) == []


def test_a_parameter_lies_as_deep_as_forward_comes_to_it() -> None:
    order = ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq", "layers.0.attention.wo"]
    order += ["layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.1.attention_norm"]
    order += ["layers.11.feed_forward.w2", "norm", "output"]
    depths = [depth(f"{name}.weight") for name in order]
    assert depths == sorted(set(depths))
    assert depth(EMBEDDING) == (-1, 0) and depth(NORM)[0] == math.inf and depth(f"{order[8]}.weight")[0] == 11
    alike = [[depth(f"layers.0.{name}.weight") for name in names] for names in ALIKE]
    assert [len(set(of)) for of in alike] == [1, 1]


ALIKE = [["attention.wq", "attention.wk", "attention.wv"], ["feed_forward.w1", "feed_forward.w3"]]
