"""What is left when layout, data, gradients and updates match: reports, replicas, repeats, traffic. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    LOW_CLIP,
    NORM,
    accumulating,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    here,
    kinds,
    received,
    reference_gradient,
    scaled,
    seen,
    seen_text,
)
from literal import (
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_value,
    without_rank,
)
from literal_reference import clip

from harness.checks import judge
from harness.checks.update import observed_norm
from harness.diagnosis.costs import of_no_plan, of_two_runs
from harness.diagnosis.engine import explain
from harness.diagnosis.reports import odd_reports, wrong_reports
from harness.evidence.records import Collective
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

# ---- the rest


def test_replicas_that_drift_by_a_last_bit() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    expect(
        with_value(trial, 2, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0)),
        """\
replicas diverge: ranks [0,2], step 2, gradient of norm.weight: expected the same bytes on all, observed off by 2.05e-16 of the largest entry (on rank 2, compared with rank 0)
  why: within rounding of the reference, but replicas must be bitwise equal: a difference of one bit grows
  loss, gradients: equal to the reference within 2.1e-16: a loss-curve test passes here""",
    )


def shows(trial: Trial, what: str, value) -> Trial:
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, **{what: value(step)})
    return trial


def test_a_displayed_loss_that_is_each_ranks_own() -> None:
    def own(step) -> float:
        return step.microbatches[0].loss_sum / step.microbatches[0].valid_tokens

    expect(
        shows(fsdp_4(), "reported_loss", own),
        """\
the reported loss is wrong, the training itself is right: each rank reports the loss of its own samples
  assuming this: 1 of 1 failing checks pass, and no passing check fails
  reported_loss: rank 0, step 1, reported loss: expected 2.53460829689014, observed 2.1682941969615794 (off by 1.45e-01; bound 1.4e-14)
  loss, gradients: equal to the reference exactly""",
    )


def test_a_displayed_loss_that_is_a_sum_over_ranks() -> None:
    expect_first(
        shows(fsdp_4(), "reported_loss", lambda step: 4 * step.reported_loss),
        """the reported loss is wrong, the training itself is right: each rank reports 4 times the right one: as if not divided by dp_shard (4)""",
    )


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (0.0, "the mean of all steps so far"),
        *((kept, f"a running mean with decay {kept:g}") for kept in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)),
    ],
)
def test_a_displayed_loss_that_is_a_running_mean(kept: float, told: str) -> None:
    trial = fsdp_4()
    shown: list[float] = []
    for number, step in enumerate(trial.ranks[0].steps):
        by = (1 - kept) if kept else 1 / (number + 1)
        shown.append(step.reported_loss if not shown else shown[-1] + by * (step.reported_loss - shown[-1]))
    trial = shows(trial, "reported_loss", lambda step: shown[step.step - 1])
    assert first_line(trial).endswith(f"each rank reports {told}")


@pytest.mark.parametrize(("trial", "of"), [(fsdp_4(), "the ranks' own"), (accumulating(), "the microbatches'")])
def test_a_displayed_loss_that_is_a_mean_of_means(trial: Trial, of: str) -> None:
    parts = {
        step: [part for e in trial.ranks.values() for part in e.steps[step - 1].microbatches]
        for step in trial.case.steps
    }
    means = {step: float(np.mean([p.loss_sum / p.valid_tokens for p in of_step])) for step, of_step in parts.items()}
    shown = shows(trial, "reported_loss", lambda step: means[step.step])
    told = f"each rank reports the mean of {of} means, each of which counts alike whatever its number of valid tokens"
    assert first_line(shown).endswith(told)


def test_a_displayed_loss_of_the_last_microbatch_alone() -> None:
    trial, tokens = accumulating(), ", divided by all valid tokens of the step"
    last = {(rank, s.step): s.microbatches[-1] for rank, e in trial.ranks.items() for s in e.steps}
    valid = {s.step: s.valid_tokens for s in trial.reference.steps}

    def told(number) -> str:
        changed = trial
        for rank, step in last:
            changed = with_step(changed, rank, step, reported_loss=number(rank, step))
        return shown_instead(changed, "reported_loss").removeprefix("each rank reports that of ")

    def total(step: int, what: str) -> float:
        return sum(getattr(last[rank, step], what) for rank in (0, 1))

    def mean(step: int) -> float:
        return total(step, "loss_sum") / total(step, "valid_tokens")

    def own(rank: int, step: int) -> float:
        return last[rank, step].loss_sum / last[rank, step].valid_tokens

    times = f"{tokens}, times the number of microbatches (2)"
    assert told(lambda rank, step: 2 * total(step, "loss_sum") / valid[step]) == f"the last microbatch alone{times}"
    assert told(lambda rank, step: total(step, "loss_sum") / valid[step]) == f"the last microbatch alone{tokens}"
    assert told(lambda rank, step: mean(step)) == "the last microbatch alone"
    divided = ", divided by the number of microbatches (2)"
    assert told(lambda rank, step: mean(step) / 2) == f"the last microbatch alone{divided}"
    assert told(own) == "its own last microbatch alone"
    assert told(lambda rank, step: own(rank, step) / 2) == f"its own last microbatch alone{divided}"
    assert told(lambda *at: 2 * last[at].loss_sum / valid[at[1]]) == f"its own last microbatch alone{times}"
    assert told(lambda rank, step: 3 * mean(step)).startswith(
        "each rank reports a number that no hypothesis explains ("
    )


def test_a_displayed_norm_that_is_each_ranks_own() -> None:
    def own(step) -> float:
        return math.sqrt(sum(float(np.sum(g * g)) for g in step.gradients.values()))

    expect_first(
        shows(fsdp_4(), "grad_norm", own),
        """the reported gradient norm is wrong, the training itself is right: each rank reports the norm of its own shards (not summed over dp_shard)""",
    )


def test_displays_that_are_wrong_on_one_rank() -> None:
    expect_first(
        with_step(fsdp_4(), 3, 2, reported_loss=1.0, grad_norm=math.nan),
        """the reported loss is wrong, the training itself is right: rank 3 reports 1 once, expected 1.881; the reported gradient norm is wrong, the training itself is right: rank 3 reports nan once, expected 1.59477""",
    )


def test_the_reference_moved() -> None:
    trial = fsdp_4()
    accepted = replace(trial.golden, losses=[loss * 1.001 for loss in trial.golden.losses])
    expect(
        replace(trial, golden=accepted),
        """\
the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted
  golden: step 1, loss: expected 2.53714290518703, observed 2.53460829689014 (expected: the golden, observed: the reference; bound 1.4e-14)""",
    )


def test_a_repeat_that_is_fed_its_samples_in_another_order() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(received(trial, 1, 2, [12, 13, 15, 14]), 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """two runs of the same case are not bitwise equal: the repeat received the same samples in another order (rank 1, step 2): rank 1, step 2, results that differ from the first run: expected 0, observed 1 (gradients of norm.weight)""",
    )


def test_a_repeat_that_is_fed_other_samples() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    expect_first(
        replace(trial, repeat=received(trial, 0, 3, [16, 17, 18, 18]).run),
        """two runs of the same case are not bitwise equal: the repeat received other samples (rank 0, step 3): rank 0, step 3, results that differ from the first run: expected 0, observed 1 (loss of microbatch 0)""",
    )


def test_a_repeat_that_differs() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(trial, 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """two runs of the same case are not bitwise equal: rank 1, step 2, results that differ from the first run: expected 0, observed 1 (gradients of norm.weight)""",
    )


def test_a_reduction_after_every_microbatch() -> None:
    def twice(call):
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    trial = with_every_rank(accumulating(), lambda t, rank: with_collectives(t, rank, twice))
    expect_first(trial, """gradients are reduced after every microbatch (2 times a step), requested once a step""")


def test_a_collective_that_one_rank_skips() -> None:
    trial = fsdp_4()
    expect(
        with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1]),
        """\
ranks of a group do not issue the same collectives: ranks [0-3], collective 20: expected all_reduce of 8 B float64 (step 3, other) on every rank, observed nothing on rank 1
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


# ---- weights


def test_a_rank_that_reduces_in_another_order_is_told_beside_wrong_numbers() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_step_1_gradients(trial, lambda _, fqn: 2 * reference_gradient(trial, fqn))
    assert kinds(with_collectives(trial, 1, first_other_as_integer())) == (
        "gradients scaled",
        "collectives out of order",
    )


def first_other_as_integer():
    done: list[int] = []

    def change(call):
        if call.phase != "other" or done:
            return (call,)
        done.append(1)
        return (replace(call, dtype="int64"),)

    return change


# ---- what is reported, and the way to right numbers


def shown_instead(trial: Trial, what: str) -> str:
    assert judged(what, trial).verdict is Verdict.FAIL
    return first_line(trial).removeprefix("the reported ").partition(" is wrong, the training itself is right: ")[2]


@pytest.mark.parametrize(("what", "kind"), [("reported_loss", "loss"), ("grad_norm", "grad_norm")])
def test_a_display_that_lags_a_step_behind_is_told_from_one_that_stands_still(what: str, kind: str) -> None:
    trial = fsdp_4()
    right = {step.step: getattr(step, kind) for step in trial.reference.steps}
    assert shown_instead(shows(trial, what, lambda s: right[max(s.step - 1, 1)]), what) == (
        "each rank reports that of the step before"
    )
    assert shown_instead(shows(trial, what, lambda s: right.get(s.step - 1, 7.0)), what) == (
        "each rank reports that of the step before"
    )
    once = with_step(trial, 3, 2, **{what: right[1]})
    assert shown_instead(once, what) == "rank 3 reports that of the step before in step 2"
    other = shown_instead(shows(trial, what, lambda s: right[1]), what)
    told = f"({right[1]:.6g} on rank 0 in step 2, expected {right[2]:.6g})"
    assert other == f"each rank reports a number that no hypothesis explains {told}"
    assert shown_instead(with_step(trial, 3, 1, **{what: 2.5}), what).startswith("rank 3 reports 2.5 once, expected ")


def test_a_displayed_norm_of_what_clipping_left_is_told_if_it_is_so_everywhere() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    told = "each rank reports the norm after clipping (0.25), requested before clipping"
    assert shown_instead(shows(trial, "grad_norm", lambda s: min(s.grad_norm, 0.25)), "grad_norm") == told
    assert (
        shown_instead(shows(trial, "grad_norm", lambda s: clip(s.grad_norm, LOW_CLIP) * s.grad_norm), "grad_norm")
        == told
    )
    alone = with_every_rank(trial, lambda t, rank: with_step(t, 1, rank + 1, grad_norm=0.25))
    assert shown_instead(alone, "grad_norm") == told.replace("each rank", "rank 1") + " in steps 1, 2"
    never = trial_of(tiny_case("fsdp_2", replace(LOW_CLIP, max_norm=9.0)))
    off = shows(never, "grad_norm", lambda s: s.grad_norm * (1 + 1e-6))
    assert shown_instead(off, "grad_norm") == "each rank reports a number off by up to 1.0e-06"
    rounded = shows(never, "grad_norm", lambda s: float(np.float32(s.grad_norm)))
    assert shown_instead(rounded, "grad_norm") == "each rank reports the right one rounded to float32"


# ---- what the optimizer receives


def test_collectives_in_another_order_are_told_beside_wrong_numbers() -> None:
    found = seen(of_two_runs, fsdp_4(), "collective_order", "loss")
    assert found is not None and found.checks == ("collective_order",)
    assert (
        cause_line(found.cause)
        == "ranks of a group do not issue the same collectives: here: expected this, observed that"
    )
    assert found.cause.finding == here("collective_order")[1]
    assert not seen_text(of_two_runs, fsdp_4(), "loss")


@pytest.mark.parametrize(
    ("check", "told"),
    [
        ("process_groups", "process groups differ from the plan"),
        ("traffic", "traffic differs from the plan"),
        ("placements", "wrappers or placements differ from the plan"),
        ("memory", "memory held between steps differs from the plan"),
    ],
)
def test_a_structure_that_no_feature_explains_is_told_by_its_check(check: str, told: str) -> None:
    assert seen_text(of_no_plan, fsdp_4(), check) == f"{told}: here: expected this, observed that"
    assert not seen_text(of_no_plan, fsdp_4(), check, "gradients")


def test_what_is_gathered_between_backward_and_the_optimizer_is_told_by_its_collective() -> None:
    trial, whole = fsdp_4(), 8 * sum(math.prod(shape) for shape in fsdp_4().plan.shapes.values())
    for rank in trial.ranks:
        outside = Collective("all_gather", (0, 1, 2, 3), "0", "float64", whole, "other", 1, 99)
        trial = with_rank(trial, rank, collectives=(*trial.ranks[rank].collectives, outside))
    told = "by all_gather over dp_shard [0-3], the size of all parameters or all gradients"
    start = "traffic differs from the plan: rank 0, step 1, bytes moved outside forward and backward: "
    assert first_line(trial).startswith(start)
    assert told in first_line(trial)


# ---- the rest


def test_replicas_that_drift_beside_other_mistakes_are_not_explained_by_rounding() -> None:
    assert seen_text(of_two_runs, DDP_2, "replica_agreement") == "replicas diverge: here: expected this, observed that"
    assert not seen_text(of_two_runs, DDP_2, "replica_agreement", "gradients")


def test_a_norm_that_nobody_shows_is_not_the_one_after_clipping() -> None:
    silent = with_step(DDP_2, 1, 2, grad_norm=None)
    for rank, step in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 3)):
        silent = with_step(silent, rank, step, grad_norm=1.0)
    told = "rank 1 reports the gradient norm of steps 1, 3, but not of step 2"
    assert first_line(silent) == told


def test_a_repeat_that_lacks_a_rank_is_fed_other_samples_there() -> None:
    trial = trial_of(tiny_case("ddp_2", runs=2))
    trial = replace(trial, repeat=without_rank(trial, 1).run)
    told = "the repeat received other samples (rank 1, step 1)"
    assert told in seen_text(of_two_runs, trial, "determinism")


def test_a_report_is_wrong_beside_a_wrong_rate_and_is_said_to_be() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, lr=2 * step.lr, reported_lr=step.lr)
    found = explain(trial, judge(trial), (wrong_reports,), ())
    told = "the reported learning rate is wrong: each rank reports 0.5 times the right one"
    assert [cause_line(one.cause).startswith(told) for proof in found.proofs for one in proof.hypotheses] == [True]
    assert found.proofs[0].explained == ("reported_rate",)


def test_a_report_that_repeats_what_is_wrong_is_not_blamed() -> None:
    trial = scaled("fsdp_2", 2.0)
    assert judged("grad_norm", trial).verdict is Verdict.FAIL
    assert not list(wrong_reports(trial, {"grad_norm": judged("grad_norm", trial)}))
    assert not list(odd_reports(trial, {"grad_norm": judged("grad_norm", trial)}))


def test_a_norm_of_one_stage_or_one_shard_group_is_told_by_the_axis_that_is_left_out() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    for rank, evidence in trial.ranks.items():
        peers = tuple(other for other in trial.ranks if other % 2 == rank % 2)
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, grad_norm=observed_norm(trial, step.step, peers))
    assert shown_instead(trial, "grad_norm") == "it is not summed over tp"


def test_a_largest_loss_below_the_mean_is_told_beside_a_training_that_is_right() -> None:
    trial = with_step(trial_of(tiny_case("fsdp_2")), 1, 2, reported_largest=0.5)
    (told,) = [line for line in (first_line(trial),) if line]
    assert told.startswith(
        "the reported largest loss is wrong, the training itself is right: rank 1 reports 0.5, below the mean "
    )


def test_a_displayed_loss_that_is_summed_on_from_step_to_step_is_told() -> None:
    trial = fsdp_4()
    right = {step.step: step.loss for step in trial.reference.steps}
    summed = shows(trial, "reported_loss", lambda s: sum(right[n] for n in range(1, s.step + 1)))
    assert shown_instead(summed, "reported_loss") == "each rank reports the sum of all steps so far"


def test_a_display_that_is_no_other_number_is_no_cause_where_training_is_wrong_too() -> None:
    odd = shows(fsdp_4(), "grad_norm", lambda s: 17.0 + s.step)
    assert "no hypothesis explains" in first_line(odd)
    worse = with_step(odd, 0, 1, gradients={f: 1.5 * g for f, g in odd.ranks[0].steps[0].gradients.items()})
    assert "reported gradient norm" not in first_line(worse)
