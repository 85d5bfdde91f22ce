"""What is assumed of data and weights is trained in earnest: it is named where it explains the numbers, and only there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from literal import with_step
from torch import nn
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed, proven, reference, with_inputs  # noqa: F401

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import all_suspects, costly_suspects
from harness.core.causes.assume import assume_case, input_mean_squares
from harness.core.causes.engine import explain
from harness.core.causes.localise import first_wrong_input, ranks_whose_losses_are_off
from harness.core.checks import judge
from harness.core.judge.trial import Trial
from harness.reference.model import llama_from
from harness.reference.spellings import replace_forward
from harness.reference.train import mean_squares, train


def not_explained(trial: Trial) -> bool:
    return bool({"not explained", "still failing", "tried"} & dict(diagnosed(trial).evidence).keys())


def test_a_run_that_is_right_fails_no_check(ran: Ran) -> None:
    failed = {result.check for result in judge(ran(case_of())) if result.verdict == "FAIL"}
    assert failed == set()


# ---- what a model computes otherwise is located


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize("layers", [2, 3])
def test_the_last_layers_that_are_on_no_rank_are_a_model_of_fewer(ran: Ran, layers: int) -> None:
    whole, fewer = case_of(model=replace(MODEL, n_layers=layers)), case_of()
    lost = tuple(f"layers.{layer}." for layer in range(1, layers))
    weights = {fqn: value for fqn, value in reference(whole).weights.items() if not fqn.startswith(lost)}
    trial = ran(fewer, train(fewer.model, fewer.training, weights=weights))
    judged_as_whole = replace(assume_case(trial, whole), reference=reference(whole), golden=None)
    assert diagnosed(judged_as_whole).causes[0].kind == "layers lost"
    assert dict(diagnosed(judged_as_whole).causes[0].details) == {"layers": tuple(one[:-1] for one in lost)}
    assert not not_explained(judged_as_whole)


def doubled(name: str) -> dict[str, object]:
    """What this module of the model gives, twice."""

    def alter(model: nn.Module, step: int) -> None:
        if step == 1:
            replace_forward(model.get_submodule(name), lambda before, *args, **named: 2 * before(*args, **named))

    return {"altered": alter}


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        ("tok_embeddings", "", "layers.0"),
        ("layers.0.attention.wo", "layers.0.attention.wo", "layers.0.attention_dropout"),
        ("layers.0.feed_forward", "layers.0.feed_forward.w2", "layers.0.ffn_dropout"),
        ("norm", "norm", "output"),
    ],
)
def test_a_module_that_computes_something_else_is_located_and_not_named(
    ran: Ran, module: str, right: str, wrong: str
) -> None:
    otherwise = doubled(module)
    trial = with_inputs(ran(case_of(), **otherwise), otherwise["altered"])
    (cause,) = diagnosed(trial).causes
    assert cause.kind == "not explained"
    place = first_wrong_input(trial)
    assert place.first_wrong.startswith(wrong) and (place.last_right == right or not right)
    assert 1 in cause.steps


def test_what_goes_into_modules_is_computed_for_the_first_step_of_a_launch_that_resumes(ran: Ran) -> None:
    case = case_of(resume=(Saved(2, ParallelDims(tp=2)),))
    trial = replace(ran(case_of()), case=case)
    assert trial.first_step == 3
    step, known = trial.reference.steps[1], dict(zip(trial.reference.sample_ids, trial.reference.tokens, strict=True))
    model = llama_from(step.parameters, config=case.model, dtype=torch.float64, device="cpu")
    tokens = np.stack([known[id_] for id_ in trial.reference.samples[2]])
    found, wanted = input_mean_squares(trial), mean_squares(model, torch.from_numpy(tokens))
    assert found.keys() == wanted.keys() and all(math.isclose(found[fqn], wanted[fqn], rel_tol=1e-12) for fqn in found)
    assert input_mean_squares(replace(trial, case=case_of())) == trial.reference.inputs
    assert input_mean_squares(trial.with_assumption(reference={"batch": lambda step, batch: batch})) == {}


def with_losses(trial: Trial, rank: int, step: int, factor: float) -> Trial:
    parts = trial.ranks[rank].steps[step - 1].microbatches
    wrong = tuple(replace(part, loss_sum=factor * (part.loss_sum or 0.0)) for part in parts)
    return with_step(trial, rank, step, microbatches=wrong)


@pytest.mark.parametrize("step", [1, 3])
def test_the_ranks_whose_samples_have_other_losses_are_told(ran: Ran, step: int) -> None:
    trial = ran(case_of("hsdp_2x2", accumulation=2))
    assert ranks_whose_losses_are_off(trial, step) == []
    wrong = with_losses(with_losses(trial, 1, step, 1.01), 2, step, 0.99)
    assert ranks_whose_losses_are_off(wrong, step) == [1, 2]
    unseen = tuple(replace(part, loss_sum=None) for part in wrong.ranks[0].steps[step - 1].microbatches)
    assert ranks_whose_losses_are_off(with_step(wrong, 0, step, microbatches=unseen), step) == []
    foreign = tuple(
        replace(part, tokens=None if part.tokens is None else part.tokens * 0)
        for part in wrong.ranks[0].steps[step - 1].microbatches
    )
    assert ranks_whose_losses_are_off(with_step(wrong, 0, step, microbatches=foreign), step) == []


@pytest.mark.parametrize("layout", ["tp_2", "fsdp_2", ParallelDims(dp_shard=2, cp=2)], ids=str)
def test_ranks_of_one_cp_group_have_no_loss_of_their_own(ran: Ran, layout: str | ParallelDims) -> None:
    trial = ran(case_of(layout))
    last = max(trial.ranks)
    alone = [last] if layout in ("tp_2", "fsdp_2") else []
    assert ranks_whose_losses_are_off(with_losses(trial, last, 1, 1.01), 1) == alone
    dropping = replace(trial, case=replace(trial.case, model=replace(trial.case.model, dropout=0.5)))
    assert ranks_whose_losses_are_off(with_losses(dropping, last, 1, 1.01), 1) == []


def test_a_loss_that_nothing_gives_is_located_and_not_named(ran: Ran) -> None:
    trial = ran(case_of())
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[0].microbatches
        assert part.loss_sum is not None
        trial = with_step(trial, rank, 1, microbatches=(replace(part, loss_sum=1.01 * part.loss_sum),))
    assert diagnosed(trial).kinds == ("not explained",)
    details = dict(diagnosed(trial).causes[0].details)
    assert (details["place"], details["step"]) == ("forward", 1) and details["off"] == pytest.approx(0.01)


# ---- evidence at random


def at_random(trial: Trial, what: str) -> Trial:
    """Losses, or all numbers, of each rank and step a little off, each by its own amount."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            draw = np.random.default_rng((rank, step.step))
            parts = tuple(
                replace(part, loss_sum=(part.loss_sum or 0.0) * draw.uniform(0.9, 1.1)) for part in step.microbatches
            )
            wrong = {fqn: g + 0.1 * draw.standard_normal(g.shape) for fqn, g in step.gradients.items()}
            moved = {fqn: v + 0.1 * draw.standard_normal(v.shape) for fqn, v in step.parameters.items()}
            numbers = {"gradients": wrong, "parameters": moved} if what == "all numbers" else {}
            trial = with_step(trial, rank, step.step, microbatches=parts, **numbers)
    return trial


@pytest.mark.parametrize("what", ["losses", "all numbers"])
def test_numbers_at_random_are_explained_by_no_hypothesis_no_pair_and_no_fitted_number(ran: Ran, what: str) -> None:
    trial = at_random(ran(case_of()), what)
    found = explain(trial, judge(trial), all_suspects(), (), costly_suspects())
    assert [proof.explained for proof in found.proofs if proof.explained] == []
    assert found.errors == ()
