"""Causes that faults of the catalogue brought to light, named from literal evidence. See tests/diagnosis/test_diagnose.py."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
from literal import (
    SGD,
    optimize,
    sum_of_samples,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_parameter,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
)
from test_diagnose import expect_first, reference_gradient, samples_of, trained_as, with_exits, with_rates

from harness.checks.update import observed_norm
from harness.evidence.records import Exit
from harness.judge.trial import Trial

LAST = "output.weight"
EARLY = ("layers.0.attention.wq.weight", "tok_embeddings.weight")


# ---- gradients


def test_gradients_scaled_more_often_in_some_buckets() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    factors = {fqn: 0.25 if fqn in EARLY else 0.5 for fqn in trial.plan.shapes if fqn != LAST}
    trial = with_step_1_gradients(trial, lambda _, fqn: factors.get(fqn, 1.0) * reference_gradient(trial, fqn))
    expect_first(
        trial,
        """gradients are scaled by different factors in 11 of 12 parameters (tok_embeddings.weight, layers.0.attention.wq.weight and 9 more): 0.25 (tok_embeddings.weight and 1 more), 0.5 (layers.0.attention.wk.weight and 8 more): some are scaled more often than others, by bucket, by stage or by wrapper""",
    )


def test_gradients_that_are_lost_before_the_output() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    wrong |= {LAST: reference_gradient(trial, LAST)}
    expect_first(
        with_step_1_gradients(trial, lambda _, fqn: wrong[fqn]),
        """gradients are right in output.weight, and wrong in all that lies before: backward loses something there""",
    )


def test_gradients_that_are_lost_in_a_feed_forward_whose_sum_is_not_there() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    for fqn in (LAST, "norm.weight", *(f"layers.0.feed_forward.w{n}.weight" for n in (1, 2, 3))):
        wrong[fqn] = reference_gradient(trial, fqn)
    trial = with_step_1_gradients(trial, lambda _, fqn: wrong[fqn])
    silent = with_every_rank(
        trial,
        lambda t, r: with_collectives(
            t, r, lambda c: () if (c.op, c.phase) == ("reduce_scatter", "backward") else (c,)
        ),
    )
    expect_first(
        silent,
        """gradients are right in layers.0.feed_forward.w1.weight, layers.0.feed_forward.w3.weight and what follows, and wrong in all that lies before: backward loses something there, a sum over tp""",
    )


def gradients_of(trial: Trial) -> dict[str, np.ndarray]:
    return {fqn: reference_gradient(trial, fqn) for fqn in trial.plan.shapes}


def test_a_microbatch_that_is_added_after_the_reduction() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    own = {rank: samples_of(trial, rank) for rank in trial.ranks}

    def gradient(rank: int, fqn: str) -> np.ndarray:
        ids = own[1 - rank]
        return sum_of_samples(trial, fqn, dict.fromkeys(ids[len(ids) // 2 :], 0.0) | dict.fromkeys(own[rank][2:], 2.0))

    expect_first(
        with_step_1_gradients(trial, gradient),
        """gradients of microbatch 2 of 2 are not reduced over dp_replicate: each rank adds its own only""",
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
        """ranks of a group do not issue the same collectives: group [0,3], collective 0: rank 3: nothing, every rank: all_reduce of 8 B float64 (step 1, backward)""",
    )


def test_gradients_wrong_in_one_group_only() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    expect_first(
        with_step_1_gradients(
            trial, lambda rank, fqn: wrong[fqn] if rank in (1, 3) else reference_gradient(trial, fqn)
        ),
        """gradients are wrong in every parameter on ranks [1,3], one group of dp_replicate: its members reduce different tensors with each other, in another order or not all, or one of them passes a wrong one""",
    )


def test_a_loss_whose_normaliser_counts_logits_tp_times() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    trial = with_step_1_gradients(trial, lambda _, fqn: wrong[fqn])
    for rank, evidence in trial.ranks.items():
        parts = evidence.steps[0].microbatches
        parts = tuple(replace(p, loss_sum=p.loss_sum + np.log(2) * p.valid_tokens) for p in parts)
        trial = with_step(trial, rank, 1, microbatches=parts)
    expect_first(
        trial,
        """the loss of step 1 is too large by 0.693147 a token, the logarithm of tp 2: its normaliser counts each logit once for every rank along tp""",
    )


# ---- updates


def test_a_norm_that_counts_replicas() -> None:
    low = replace(SGD, max_norm=0.25)
    trial = trial_of(tiny_case("hsdp_2x2", low))
    norm = observed_norm(trial, 1)
    again = replace(low, max_norm=0.25 * (norm + 1e-6) / (2**0.5 * norm + 1e-6))
    followed = with_updates_that_follow(replace(trial, case=replace(trial.case, training=again)))
    expect_first(
        replace(followed, case=trial.case),
        """each rank clips by a norm with each replica along dp_replicate counted again, not by the global norm: 2.30017 on rank 0, expected 1.62647""",
    )


def test_clipping_that_enlarges() -> None:
    high = replace(SGD, max_norm=100.0)
    trial = trial_of(tiny_case("fsdp_2", high))
    for rank, evidence in trial.ranks.items():
        step = evidence.steps[0]
        factor = 100.0 / (trial.reference.steps[0].grad_norm + 1e-6)
        moved = {t.fqn: optimize(t.value, [factor * step.gradients[t.fqn]], high)[0] for t in evidence.parameters}
        trial = with_step(trial, rank, 1, parameters=moved)
    expect_first(
        trial, """clipping enlarges gradients: it multiplies by 61.48, as the norm 1.626 is below max_norm 100"""
    )


def test_an_optimizer_that_stops_after_the_first_step() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        for step in (2, 3):
            trial = with_step(trial, rank, step, parameters=evidence.steps[0].parameters)
    expect_first(trial, """the optimizer does not move any parameter in step 2""")


def test_a_first_step_without_a_learning_rate_is_named_by_it() -> None:
    still = trained_as(replace(trial_of(tiny_case("fsdp_2")).case.training, lr=0.0))
    rates = [step.lr for step in still.reference.steps]
    expect_first(with_rates(still, 0.0, *rates[:-1]), """learning rate of step 1 is 0, requested 0.005""")


# ---- weights


def with_full_weights(trial: Trial, change) -> Trial:
    for rank in trial.ranks:
        for fqn, part in trial.plan.slices[rank].items():
            full = change(fqn, trial.reference.weights[fqn])
            value = full[tuple(slice(*bounds) for bounds in part)].copy()
            trial = with_parameter(trial, rank, fqn, value=value)
    return trial


def test_weights_that_are_a_multiple_of_the_seeds() -> None:
    trial = trial_of(tiny_case("tp_2"))
    larger = lambda fqn, full: full * 2**0.5 if fqn.endswith(("wo.weight", "w2.weight")) else full  # noqa: E731
    expect_first(
        with_full_weights(trial, larger),
        """training does not start from the seed weights in 2 of 12 parameters (layers.0.attention.wo.weight, layers.0.feed_forward.w2.weight): they are 1.41421 times these""",
    )


def test_weights_that_are_constant_are_not_called_equal_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect_first(
        with_full_weights(trial, lambda fqn, full: np.ones_like(full) if full.ndim == 1 else full),
        """training does not start from the seed weights in 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): they are all 1""",
    )


def test_weights_that_are_another_parameters() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    query = trial.reference.weights["layers.0.attention.wq.weight"]
    swap = lambda fqn, full: query if fqn == "layers.0.attention.wo.weight" else full  # noqa: E731
    expect_first(
        with_full_weights(trial, swap),
        """training does not start from the seed weights in 1 of 12 parameters (layers.0.attention.wo.weight): layers.0.attention.wo.weight holds the values of layers.0.attention.wq.weight""",
    )


def test_a_rank_that_reduces_in_another_order_explains_wrong_numbers() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_step_1_gradients(trial, lambda _, fqn: 2 * reference_gradient(trial, fqn))
    expect_first(
        with_collectives(trial, 1, first_other_as_integer()),
        """ranks of a group do not issue the same collectives: group [0,1], collective 6: rank 1: all_reduce of 8 B int64 (step 1, other), every rank: all_reduce of 8 B float64 (step 1, other)""",
    )


def first_other_as_integer():
    done: list[int] = []

    def change(call):
        if call.phase != "other" or done:
            return (call,)
        done.append(1)
        return (replace(call, dtype="int64"),)

    return change


# ---- processes


def test_a_rank_that_issues_another_collective_is_named_by_it_and_not_by_its_exception() -> None:
    other = "issued barrier #3 of group [0,1] (step 2, other, 0 B) where rank 1 issued all_reduce #3 of group [0,1]"
    culprit = Exit(0, "raised", 1, error=f"RuntimeError: Timed out; {other}", blamed=True)
    waiting = Exit(1, "raised", 1, error="RuntimeError: Connection closed by peer")
    expect_first(
        with_exits(trial_of(tiny_case("fsdp_2")), culprit, waiting),
        """rank 0 issued barrier #3 of group [0,1] (step 2, other, 0 B) where rank 1 issued all_reduce #3 of group [0,1], then raised: RuntimeError: Timed out""",
    )
