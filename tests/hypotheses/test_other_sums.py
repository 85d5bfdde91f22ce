"""Gradients that hold others than their own: tp peers', a partner's other parameter, shares of norms. Literal, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import NORM, broken, dims, kinds, proven, reference_gradient
from literal import (
    TINY,
    sum_of_samples,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_value,
)
from noisy import with_noise
from trained import Ran, _ran, case_of, diagnosed  # noqa: F401

from harness.core.case.dims import ParallelDims
from harness.core.causes.contributions import sums_of_whole_gradients
from harness.core.causes.engine import failing_checks
from harness.core.causes.hypothesis import Fact, Hypothesis
from harness.core.causes.words import Arrays
from harness.core.checks import judge
from harness.core.judge.contents import view_of_slice
from harness.core.judge.trial import Trial
from harness.hypotheses.backward import wrong_backward
from harness.hypotheses.piece_weights import sums_of_pieces
from harness.reference.model import seed_masks
from harness.reference.spellings import detach_output_weight, in_eval_mode, scale_output_gradients

WQ = "layers.0.attention.wq.weight"


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


@pytest.mark.parametrize(("factor", "since"), [(0.5, 1), (1.0, 1), (0.25, 1), (0.5, 2)])
def test_gradients_that_are_reduced_over_tp_too_are_named_with_what_each_rank_has(factor: float, since: int) -> None:
    kind, details = proven(reduced_over_tp(trial_of(tiny_case(dims(shard=2, tp=2))), factor, since))
    assert kind == "slices mixed" and details["factor"] == pytest.approx(factor)
    assert details["steps"] == tuple(range(since, 4)) and not any("norm" in fqn for fqn in details["parameters"])  # type: ignore[attr-defined]


def mixed(trial: Trial) -> list[Hypothesis]:
    found = sums_of_whole_gradients(trial, failing_checks(judge(trial)))
    return [one for one in found if one.cause.kind == "slices mixed"]


def test_what_is_reduced_over_tp_besides_is_all_of_a_ranks_gradients_once() -> None:
    right = trial_of(tiny_case(dims(shard=2, tp=2)))
    wrong = reduced_over_tp(right, 0.5)
    one = mixed(wrong)[0]
    assert one.assume is not None
    for rank, most in one.assume(wrong).plan.outside_bytes.items():
        own = sum(gradient.nbytes for gradient in right.ranks[rank].steps[0].gradients.values())
        assert most == right.plan.outside_bytes[rank] + own


@pytest.mark.slow(
    "many hypotheses; test_what_is_reduced_over_tp_besides_is_all_of_a_ranks_gradients_once has one mixture"
)
def test_other_multiples_one_tp_rank_alone_and_random_gradients_are_no_mixed_slices() -> None:
    right = trial_of(tiny_case(dims(shard=2, tp=2)))
    wrong, draw = reduced_over_tp(right, 0.5), np.random.default_rng(1)
    for off, known in ((0.0, True), (5e-8, True), (1e-3, False)):
        trial = wrong
        for rank in (0, 1):
            gradients = trial.ranks[rank].steps[0].gradients
            trial = with_step(trial, rank, 1, gradients=gradients | {WQ: (1 + off) * gradients[WQ]})
        assert bool(mixed(trial)) is known
    alone = with_rank(right, 1, steps=wrong.ranks[1].steps)
    noise = with_step_1_gradients(right, lambda _, fqn: draw.standard_normal(reference_gradient(right, fqn).shape))
    assert "slices mixed" not in (*kinds(alone), *kinds(noise)) and mixed(right) == []


# ---- norms, whose gradients tp ranks have in shares

TWO_LAYERS = replace(TINY, n_layers=2)


def with_shares(trial: Trial, step: int, fqns: list[str]) -> Trial:
    """Of these parameters each tp rank has its share of the gradient of a step."""
    for rank in trial.ranks:
        for fqn in (fqn for fqn in fqns if fqn in trial.ranks[rank].steps[step - 1].gradients):
            whole = trial.reference.steps[step - 1].gradients[fqn]
            part = np.linspace(0.2, 0.7, whole.size).reshape(whole.shape)
            share = whole * (part if trial.plan.group_of(rank, "tp").index(rank) == 0 else 1 - part)
            cut = trial.gradient_slice_of(rank, fqn)
            assert cut is not None
            trial = with_value(
                trial, rank, step, "gradients", fqn, lambda _, share=share, cut=cut: view_of_slice(share, cut)
            )
    return trial


def not_summed(trial: Trial) -> list[Fact]:
    return [one for one in wrong_backward(trial, broken("gradients")) if one.cause.kind == "norms not summed"]


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=2)
@pytest.mark.parametrize(("layout", "step"), [(dims(tp=2), 1), (dims(2, tp=2), 2)], ids=str)
@pytest.mark.parametrize("named", ["ffn_norm", "_norm", "norm"])
def test_norms_whose_shares_are_not_added_up_are_named(layout: ParallelDims, step: int, named: str) -> None:
    trial = trial_of(tiny_case(layout, model=TWO_LAYERS))
    wrong = with_shares(trial, step, [fqn for fqn in trial.plan.shapes if named in fqn])
    assert len(not_summed(wrong)) == 1 and kinds(wrong)[0] == "norms not summed"
    assert not_summed(with_value(wrong, 0, step, "gradients", WQ, lambda g: 2 * g)) == []
    assert not_summed(with_value(wrong, 0, step, "gradients", "layers.0.ffn_norm.weight", lambda g: 2 * g)) == []


def test_norms_that_are_wrong_otherwise_or_without_tp_are_not_shares() -> None:
    for layout in ("tp_2", "ddp_2"):
        assert not_summed(with_value(trial_of(tiny_case(layout)), 0, 1, "gradients", NORM, lambda g: 2 * g)) == []


def test_of_zero_a_tp_group_that_has_nothing_of_a_norm_is_left_out() -> None:
    first = "layers.0.attention_norm.weight"
    trial = with_shares(trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero2")), 1, [NORM, first])
    assert len(not_summed(trial)) == 1
    for rank, evidence in trial.ranks.items():
        held = {fqn: gradient for fqn, gradient in evidence.steps[0].gradients.items() if gradient.size}
        assert (NORM in held) == (first in held) == (rank > 1)
        trial = with_step(trial, rank, 1, gradients=held)
    assert len(not_summed(trial)) == 1


# ---- another parameter of the partner

HSDP = trial_of(tiny_case("hsdp_2x2"))
W1, W2, W3 = (f"layers.0.feed_forward.w{number}.weight" for number in (1, 2, 3))
OWN = {replica: {i: float(i in ids) for i in range(8)} for replica, ids in enumerate((range(4), range(4, 8)))}


def exchanged(trial: Trial, added: dict[tuple[int, str], tuple[str, float]]) -> Trial:
    """What ranks add to their own share of a tensor, of the partner along dp_replicate, and how often."""

    def gradient(rank: int, fqn: str) -> np.ndarray:
        if (rank, fqn) not in added:
            return reference_gradient(trial, fqn)
        other, times = added[rank, fqn]
        theirs = sum_of_samples(trial, other, OWN[1 - rank // 2])
        half = len(theirs) // 2  # a slice changes places as it lies in memory
        parts = [part.reshape(-1, trial.plan.shapes[fqn][-1]) for part in (theirs[:half], theirs[half:])]
        return sum_of_samples(trial, fqn, OWN[rank // 2]) + times * np.concatenate(parts)

    return with_step_1_gradients(trial, gradient)


def swapped(trial: Trial) -> list[Hypothesis]:
    found = sums_of_pieces(trial, failing_checks(judge(trial)))
    return [one for one in found if one.cause.kind == "reductions exchanged"]


@pytest.mark.parametrize(
    ("rank", "fqn", "other", "times"), [(1, W1, W3, 1.0), (2, W3, W1, 1.0), (0, W1, W3, 0.5), (1, W1, W2, 1.0)]
)
def test_a_tensor_that_a_rank_adds_to_another_one_is_named(rank: int, fqn: str, other: str, times: float) -> None:
    found = {"rank": rank, "parameter": fqn, "adds": other, "factor": pytest.approx(times)}
    assert proven(exchanged(HSDP, {(rank, fqn): (other, times)})) == ("reductions exchanged", found)


def test_where_one_gradient_is_no_such_sum_where_all_ranks_differ_and_in_noise_nothing_is_exchanged() -> None:
    wrong = exchanged(HSDP, {(1, W1): (W3, 1.0)})
    assert [one.fitted_count for one in swapped(wrong)] == [2] and swapped(with_noise(wrong)) == []
    assert [one.fitted_count for one in swapped(exchanged(HSDP, {(1, W1): (W3, 1.0), (1, W3): (W1, 0.5)}))] == [3]
    assert swapped(with_value(wrong, 1, 1, "gradients", W2, np.cos)) == []
    assert swapped(exchanged(HSDP, {(rank, W1): (W3, 1.0) for rank in range(4)})) == []
    other = replace(HSDP.case, dims=replace(HSDP.case.dims, dp_replicate=1, dp_shard=4))
    assert swapped(replace(wrong, case=other)) == []


# ---- the embedding's part alone of a weight that the output shares, trained in earnest


def test_a_tied_weight_that_lacks_the_outputs_part_is_proven(ran: Ran) -> None:
    case = case_of(model=replace(case_of().model, tied_embeddings=True))
    found = diagnosed(ran(case, altered=detach_output_weight))
    assert found.kinds == ("tied weight without the output's part",)
    assert {"gradients", "loss"} <= {*found.causes[0].explains}


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize("steps", [(1, 2, 3), (2, 3), (2,)])
def test_a_model_that_trains_in_eval_mode_is_proven(ran: Ran, steps: tuple[int, ...]) -> None:
    case = case_of(model=replace(case_of().model, dropout=0.2))
    trial = ran(case, altered=in_eval_mode(steps))
    assert diagnosed(trial).kinds == ("not explained",)  # whose masks were drawn all the same
    for rank, step in ((rank, step) for rank in trial.ranks for step in steps):
        drawn = trial.ranks[rank].steps[step - 1].activity
        trial = with_step(trial, rank, step, activity=replace(drawn, random={}))
    (cause,) = diagnosed(trial).causes
    assert (cause.kind, dict(cause.details)) == ("eval mode", {"steps": steps})


@pytest.mark.parametrize(("of", "wanted"), [(lambda step: 1, {"step": 1}), (lambda step: step + 1, {"by": 1})])
def test_dropout_with_the_masks_of_another_step(ran: Ran, of: Callable[[int], int], wanted: dict[str, int]) -> None:
    case = case_of(model=replace(case_of().model, dropout=0.2))
    trial = ran(case, altered=lambda model, step: seed_masks(model, case.training.seed, of(step)))
    (cause,) = diagnosed(trial).causes
    assert (cause.kind, dict(cause.details)) == ("masks of another step", wanted)


@pytest.mark.parametrize("steps", [(1, 2), (2, 3), (1, 3)])
def test_gradients_that_are_zero_in_some_steps_are_nothing_else(ran: Ran, steps: tuple[int, ...]) -> None:
    def zero(step: int, own: Arrays) -> Arrays:
        return {fqn: np.zeros_like(g) for fqn, g in own.items()} if step in steps else own

    (cause,) = diagnosed(ran(case_of(), gradients=zero)).causes
    found = dict(cause.details)
    assert (cause.kind, found["factor"], found["steps"]) == ("gradients scaled", 0.0, steps)


def in_chunks(trial: Trial, width: int) -> Trial:
    """Losses are computed in chunks of so many positions."""
    for rank, record, _ in list(trial.steps_with_reference()):
        parts = []
        for part in record.microbatches:
            assert part.labels is not None
            chunks = [part.labels[:, at : at + width].ravel() for at in range(0, part.labels.shape[1], width)]
            sizes = tuple(chunk.size for chunk in chunks)
            parts.append(replace(part, labels=np.concatenate(chunks), chunks=sizes))
        trial = with_step(trial, rank, record.step, microbatches=tuple(parts))
    return trial


def test_a_loss_whose_chunks_are_averaged_by_themselves_is_named(ran: Ran) -> None:
    case = case_of()
    half = case.training.global_batch // 2

    def batch(step: int, usual: Any) -> Any:
        counts = np.ones(usual.labels.shape)
        for first, at in itertools.product((0, half), (0, 4)):
            rows, chunk = slice(first, first + half), slice(at, at + 4)
            valid = usual.labels[rows] >= 0
            counts[rows, chunk] = valid.sum() / (2 * max(valid[:, chunk].sum(), 1))
        return replace(usual, counts=counts)

    trial = in_chunks(ran(case, batch=batch), 4)
    (cause,) = diagnosed(trial).causes
    assert cause.kind == "averaged locally" and dict(cause.details)["units"] == ("chunk of each microbatch",)
    scaled = in_chunks(ran(case, altered=scale_output_gradients(("norm",), 3.0, (1, 2, 3))), 4)
    assert diagnosed(scaled).kinds == ("gradients scaled",)
