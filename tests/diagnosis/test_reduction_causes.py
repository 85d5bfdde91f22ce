"""Gradients that are not reduced, or are scaled by a factor, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    LAST,
    diagnosis_text,
    dims,
    expect,
    expect_first,
    first_line,
    gradients_of,
    reference_gradient,
    samples_of,
    with_own_samples,
)
from literal import (
    sum_of_samples,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
    with_step_1_gradients,
    without_rank,
)

from harness.checks import judge
from harness.diagnosis.backward import _less_than_planned, _other_groups
from harness.diagnosis.engine import explain, failing_checks
from harness.diagnosis.mixed_slices import mixed_slices
from harness.diagnosis.words import Arrays
from harness.evidence.records import Collective
from harness.judge.trial import Trial
from harness.plan.slices import numel
from harness.report.cause_text import cause_line

# ---- gradients


def test_gradient_reduction_missing_over_dp_replicate() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("all_reduce",)),
        """\
gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3]
  assuming this: 5 of 5 failing checks pass, and no passing check fails
  samples: rank 0's gradient holds the samples of ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds the samples of ranks [0,1], expected [0-3]
  traffic: gradients: all_reduce over dp_replicate in backward: expected 944 B per step, observed 0 B
  loss: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_gradient_reduction_missing_over_dp_shard() -> None:
    heard = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    expect_first(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter",)),
        """gradient reduction missing over dp_shard: no reduce_scatter ran over [0,1] [2,3]""",
    )


def test_gradient_reduction_missing_over_both_axes() -> None:
    heard = {rank: [rank] for rank in range(4)}
    trial = with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter", "all_reduce"))
    expect_first(
        trial,
        """gradient reduction missing over dp_shard and dp_replicate: no reduce_scatter ran over [0,1] [2,3], no all_reduce ran over [0,2] [1,3]""",
    )


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        (2.0, ""),  # nor is it divided, by both replicas
        (0.5, "; each rank's own share counts 0.5 times: as if divided an extra time by dp_replicate or dp_shard (2)"),
        (3.0, "; each rank's own share counts 3 times"),
    ],
)
def test_what_a_share_that_is_not_reduced_counts_is_told_if_it_is_not_what_it_is_without(
    counted: float, told: str
) -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    trial = with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("all_reduce",), counted)
    alone = "gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3]"
    assert first_line(trial) == f"{alone}{told}"


def test_a_reduction_whose_result_is_dropped() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ()),
        """\
gradient reduction over dp_replicate has no effect: rank 0's gradient holds only the samples of ranks [0,1], though collectives ran
  assuming this: 4 of 4 failing checks pass, and no passing check fails
  samples: rank 0's gradient holds the samples of ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds the samples of ranks [0,1], expected [0-3]
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_one_parameter_that_no_reduction_reaches_is_named_and_explains_the_bytes_that_are_lacking() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    half = 8 * numel(trial.plan.slices[0][LAST]) // 2  # there are two buckets
    ids = {rank: {i: float(i in samples_of(trial, rank)) for i in range(8)} for rank in trial.ranks}

    def own(rank: int, fqn: str) -> np.ndarray:
        return sum_of_samples(trial, fqn, ids[rank]) if fqn == LAST else reference_gradient(trial, fqn)

    def less(call: Collective) -> list[Collective]:
        reduces = call.op == "all_reduce" and call.phase == "backward"
        return [replace(call, bytes=call.bytes - half) if reduces else call]

    wrong = with_step_1_gradients(trial, own)
    said = diagnosis_text(with_every_rank(wrong, lambda t, rank: with_collectives(t, rank, less))).splitlines()
    assert said[0] == (
        "gradients are not reduced over dp_replicate in 1 of 12 parameters (output.weight):"
        " rank 0's gradient holds only the samples of rank 0"
    )
    assert "assuming this: 5 of 5 failing checks pass, and no passing check fails" in said[1]


def with_shares_over_tp(name: str) -> Trial:
    """Each of two tp ranks has a share of the gradients of parameters with that in their names."""
    trial = trial_of(tiny_case("tp_2"))

    def share(rank: int, fqn: str) -> np.ndarray:
        whole = reference_gradient(trial, fqn)
        part = np.linspace(0.2, 0.7, whole.size).reshape(whole.shape)
        return whole if name not in fqn else whole * (part if rank == 0 else 1 - part)

    return with_step_1_gradients(trial, share)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ffn_norm", "ffn_norm"),
        ("_norm", "attention_norm and ffn_norm"),
    ],
)
def test_norm_gradients_not_summed_over_tp_are_told_with_the_norms(name: str, told: str) -> None:
    assert first_line(with_shares_over_tp(name)).startswith(f"gradients of {told} are not summed over tp: ")


def test_norm_gradients_not_summed_over_tp() -> None:
    expect(
        with_shares_over_tp("norm"),
        """\
gradients of norm weights are not summed over tp: 3 parameters wrong, all others right
  why: with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing
  tested: in step 1 what the ranks of a tp group have sums to the reference's gradients; later weights differ
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_a_reduction_over_other_groups_than_any_axis_names_them() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    partners = {(0, 2): (0, 3), (1, 3): (1, 2)}
    for rank, evidence in trial.ranks.items():
        calls = tuple(
            replace(call, ranks=partners.get(call.ranks, call.ranks) if call.phase == "backward" else call.ranks)
            for call in evidence.collectives
        )
        trial = with_rank(trial, rank, collectives=calls)
    trial = with_step_1_gradients(trial, lambda rank, fqn: reference_gradient(trial, fqn) + rank)
    found = _other_groups(trial, [], 1)
    assert found is not None and cause_line(found.cause) == (
        "gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3], but over [0,3] [1,2]"
    )


def test_a_reduction_over_groups_of_no_axis() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    partners = {(0, 2): (0, 3), (1, 3): (1, 2)}

    def gradient(rank: int, fqn: str) -> np.ndarray:
        return reference_gradient(trial, fqn) + rank

    trial = with_step_1_gradients(trial, gradient)
    for rank in trial.ranks:
        trial = with_collectives(trial, rank, lambda c: (replace(c, ranks=partners.get(c.ranks, c.ranks)),))
    expect_first(
        trial,
        """gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3], but over [0,3] [1,2]; ranks of a group do not issue the same collectives: ranks [0,3], collective 0: expected all_reduce of 8 B float64 (step 1, backward) on every rank, observed nothing on rank 3""",
    )


def test_gradients_wrong_in_one_group_only() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    expect_first(
        with_step_1_gradients(
            trial, lambda rank, fqn: wrong[fqn] if rank in (1, 3) else reference_gradient(trial, fqn)
        ),
        """gradients are wrong by up to 2e+01 of the largest entry in every parameter on ranks [1,3], one group of dp_replicate; the loss of step 1 matches within 1e-14""",
    )


# ---- gradients


def test_rows_that_nobody_reduced_are_told_without_an_axis_where_no_axis_is_deaf_everywhere() -> None:
    assert _less_than_planned(DDP_2, 1) == ""
    silent = with_collectives(DDP_2, 0, lambda call: [call] if call.phase != "backward" else [])
    assert _less_than_planned(silent, 1) == "backward moves less than planned over dp_replicate"


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ([("dp_shard", "all_gather", 1)], "dp_shard"),
        ([("dp_shard", "reduce_scatter", 1), ("dp_shard", "all_gather", 1)], "dp_shard"),
        ([("tp", "all_gather", 10**6), ("dp_shard", "reduce_scatter", 1)], "dp_shard and tp"),
        ([("tp", "all_gather", -1)], ""),
        ([("tp", "all_reduce", 10**6)], ""),  # of norms, which may be added up later
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_where_the_first_rank_moves_less_in_backward_than_planned_the_axes_are_told(
    lacking: list[tuple[str, str, int]], told: str, lost: bool
) -> None:
    """In that step; what it moves in forward over the same axis is as it should be."""
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    first = 1 if lost else 0
    less = {(trial.plan.group_of(first, axis), op): count for axis, op, count in lacking}

    def moved(call: Collective) -> Collective:
        count = less.get((call.ranks, call.op), 0) * (call.phase == "backward" and call.step == 2)
        return replace(call, bytes=max(call.bytes - count, 0) if call.bytes > 8 else call.bytes)

    trial = with_collectives(trial, first, lambda call: [moved(call)])
    trial = without_rank(trial, 0) if lost else trial
    assert _less_than_planned(trial, 2) == (f"backward moves less than planned over {told}" if told else "")
    assert _less_than_planned(trial, 1) == ""


# ---- over tp


def reduced_over_tp(trial: Trial, factor: float, since: int = 1) -> Trial:
    """Each of two tp ranks has this multiple of the sum of both's slices, of what tp cuts."""

    def change(step: int, gradients: Arrays) -> Arrays:
        changed = dict(gradients)
        for fqn, whole in gradients.items() if step >= since else ():
            one, two = (trial.plan.slices[rank][fqn] for rank in (0, 1))
            cut = next((axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
            if cut is not None:
                halves = np.split(whole, 2, axis=cut)
                changed[fqn] = np.concatenate([factor * (halves[0] + halves[1])] * 2, axis=cut)
        return changed

    return trained_otherwise(trial, gradients=change)


@pytest.mark.parametrize(("factor", "each"), [(0.5, "the mean"), (1.0, "the sum"), (0.25, "0.25 times the sum")])
def test_gradients_that_are_reduced_over_tp_too_are_named_with_what_each_rank_has(factor: float, each: str) -> None:
    trial = reduced_over_tp(trial_of(tiny_case(dims(shard=2, tp=2))), factor)
    told = f"gradients are also reduced over tp, whose ranks hold different slices: each has {each} of all in "
    assert first_line(trial).startswith(told)
    assert "2 of 2 failing checks pass" in diagnosis_text(trial)


def test_from_the_step_on_in_which_gradients_are_reduced_over_tp_they_are_named_so() -> None:
    assert "also reduced over tp" in first_line(reduced_over_tp(trial_of(tiny_case(dims(tp=2))), 0.5, since=2))


def test_what_is_reduced_over_tp_besides_is_all_of_a_ranks_gradients_once() -> None:
    right = trial_of(tiny_case(dims(shard=2, tp=2)))
    wrong = reduced_over_tp(right, 0.5)
    (one,) = mixed_slices(wrong, failing_checks(judge(wrong)))
    assert one.assume is not None
    for rank, most in one.assume(wrong).plan.outside_bytes.items():
        own = sum(gradient.nbytes for gradient in right.ranks[rank].steps[0].gradients.values())
        assert most == right.plan.outside_bytes[rank] + own


def test_slices_that_have_other_multiples_are_not_mixed_by_one_reduction() -> None:
    wrong = reduced_over_tp(trial_of(tiny_case(dims(shard=2, tp=2))), 0.5)
    fqn = "layers.0.attention.wq.weight"
    for off, known in ((0.0, True), (5e-8, True), (1e-3, False)):
        trial = wrong
        for rank in (0, 1):
            gradients = trial.ranks[rank].steps[0].gradients
            changed = gradients | {fqn: (1 + off) * gradients[fqn]}
            trial = with_step(trial, rank, 1, gradients=changed)
        assert bool(list(mixed_slices(trial, failing_checks(judge(trial))))) is known


def test_gradients_of_one_tp_rank_alone_or_at_random_are_no_mixed_slices() -> None:
    right = trial_of(tiny_case(dims(shard=2, tp=2)))
    noise = np.random.default_rng(1)
    for changed in (
        with_rank(right, 1, steps=reduced_over_tp(right, 0.5).ranks[1].steps),
        with_step_1_gradients(right, lambda _, fqn: noise.standard_normal(reference_gradient(right, fqn).shape)),
    ):
        found = explain(changed, judge(changed), (mixed_slices,), ())
        assert not any(proof.explained for proof in found.proofs)
    assert not list(mixed_slices(right, failing_checks(judge(right))))
