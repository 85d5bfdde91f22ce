"""What is assumed of data and weights is trained in earnest: it is named where it explains the numbers, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import with_step
from torch import nn
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed, proven, reference, with_inputs  # noqa: F401

from harness.checks import judge
from harness.diagnosis import COSTLY, SUSPECTS
from harness.diagnosis.assume import another_case
from harness.diagnosis.engine import explain
from harness.diagnosis.localise import inputs_that_differ, ranks_whose_losses_are_off
from harness.judge.trial import Trial
from harness.reference.record import ReferenceRun
from harness.reference.spellings import put_instead
from harness.reference.train import train
from harness.report.cause_text import diagnosis_line, evidence_rows
from harness.spec.case import Case
from harness.spec.dims import ParallelDims


def not_explained(trial: Trial) -> bool:
    return bool({"not explained", "still failing", "tried"} & dict(diagnosed(trial).evidence).keys())


def test_a_run_that_is_right_fails_no_check(ran: Ran) -> None:
    failed = {result.check for result in judge(ran(case_of())) if result.verdict == "FAIL"}
    assert failed == set()


def drawn_with_another_seed() -> ReferenceRun:
    return train(case_of().model, replace(RECIPE, seed=99), weights=reference(case_of()).weights)


def test_samples_of_another_seed_explain_all_numbers(ran: Ran) -> None:
    trial = ran(case_of(), drawn_with_another_seed())
    assert proven(trial)[0] == "samples of no step"
    assert not not_explained(trial)


def test_other_gradients_beside_other_samples_are_not_explained_by_these(ran: Ran) -> None:
    trial = ran(case_of(), drawn_with_another_seed())
    for rank, evidence in trial.ranks.items():
        noise = np.random.default_rng(rank)
        wrong = {fqn: g + noise.standard_normal(g.shape) for fqn, g in evidence.steps[0].gradients.items()}
        trial = with_step(trial, rank, 1, gradients=wrong)
    assert diagnosed(trial).kinds[0] == "samples of no step"
    assert "gradients are wrong" in dict(evidence_rows(diagnosed(trial).evidence))["still failing"]


def test_weights_of_another_seed_explain_all_numbers(ran: Ran) -> None:
    other = train(case_of().model, replace(RECIPE, seed=99)).weights
    trial = ran(case_of(), weights=other)
    assert proven(trial)[0] == "other initial weights"
    assert not not_explained(trial)


# ---- what a model computes otherwise is located


@pytest.mark.parametrize(("layers", "told"), [(2, "layers.1 is"), (3, "layers.1, layers.2 are")])
def test_the_last_layers_that_are_on_no_rank_are_told_as_a_model_of_fewer(ran: Ran, layers: int, told: str) -> None:
    whole, fewer = case_of(model=replace(MODEL, n_layers=layers)), case_of()
    lost = tuple(f"layers.{layer}." for layer in range(1, layers))
    weights = {fqn: value for fqn, value in reference(whole).weights.items() if not fqn.startswith(lost)}
    trial = ran(fewer, train(fewer.model, fewer.training, weights=weights))
    judged_as_whole = replace(another_case(trial, whole), reference=reference(whole), golden=None)
    assert diagnosis_line(diagnosed(judged_as_whole)) == f"{told} on no rank: 1 layer trains, requested {layers}"
    assert not not_explained(judged_as_whole)


def doubled(name: str) -> dict[str, object]:
    """What this module of the model gives, twice."""

    def alter(model: nn.Module, step: int) -> None:
        if step == 1:
            put_instead(model.get_submodule(name), lambda before, *args, **named: 2 * before(*args, **named))

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
    assert inputs_that_differ(trial)[1].startswith(wrong)
    assert inputs_that_differ(trial)[0] == right or not right
    assert 1 in cause.steps


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
    assert diagnosis_line(diagnosed(trial)).startswith("the loss of step 1 is off by 1.0e-02, its gradients match")


# ---- the optimizer


def as_if_late(case: Case) -> dict[str, object]:
    """So late a step that nothing is left to correct."""
    begun = {
        fqn: {"step": np.array(1e9), "exp_avg": np.zeros(shape), "exp_avg_sq": np.zeros(shape)}
        for fqn, shape in case.model.parameter_shapes().items()
    }
    return {"state": lambda step: begun if step == 1 else None}


def test_averages_that_are_not_corrected_are_told(ran: Ran) -> None:
    trial = ran(case_of(), **as_if_late(case_of()))
    assert proven(trial)[0] == "bias correction"
    told = diagnosis_line(diagnosed(trial))
    assert told == "bias correction of the averages is missing, requested Adam's"
    assert not not_explained(trial)


def test_steps_made_with_the_gradients_of_the_step_before_are_told(ran: Ran) -> None:
    held: dict[str, np.ndarray] = {}

    def given(step: int, gradients: dict[str, np.ndarray], norm: float, _: object) -> dict[str, np.ndarray]:
        late = {fqn: held.get(fqn, 0 * g) for fqn, g in gradients.items()}
        held.update({fqn: min(1.0, 1.0 / (norm + 1e-6)) * g for fqn, g in gradients.items()})
        return late

    assert case_of().training.max_norm == 1.0
    trial = ran(case_of(), given=given)
    assert proven(trial)[0] == "one step late"


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
    found = explain(trial, judge(trial), SUSPECTS, (), COSTLY)
    assert [proof.explained for proof in found.proofs if proof.explained] == []
    assert found.raised == ()
