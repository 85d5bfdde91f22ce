"""What is assumed of data and weights is trained in earnest: it is named where it explains the numbers, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import with_every_rank, with_rank, with_step
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed, proven, reference  # noqa: F401

from harness.checks import judge
from harness.diagnosis import COSTLY, SUSPECTS
from harness.diagnosis.assume import another_case
from harness.diagnosis.backward import other_gradient_flows
from harness.diagnosis.engine import explain, failing_checks
from harness.diagnosis.forward import Tries
from harness.judge.trial import Trial
from harness.plan.stages import positions
from harness.reference.altered import Variation, altering
from harness.reference.fitted import families
from harness.reference.gradient_flow import gradient_flows, recomputed
from harness.reference.record import ReferenceRun
from harness.reference.rounding import low_sums
from harness.reference.train import train
from harness.reference.variations import over_cp, variations
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


# ---- the model


@pytest.mark.parametrize(
    ("name", "modules", "where"),
    [
        ("the gradient that feed-forward passes to its input is multiplied by 2", ["layers.0.feed_forward"], ""),
        ("no gradient flows through RMSNorm's root mean square", ["norm"], " in norm"),
        ("no gradient flows along the residual stream where feed-forward is added", ["layers.0"], ""),
        (
            "keys and values get 1/2 of their gradients, as if query heads that share them were averaged, not summed",
            ["layers.0.attention"],
            "",
        ),
        (
            "gradients include a z-loss of 0.0001 * logsumexp(logits)^2",
            [""],
            ", requested none",
        ),
    ],
)
def test_a_backward_pass_that_loses_something_is_told_by_what_and_where(
    ran: Ran, name: str, modules: list[str], where: str
) -> None:
    (variation,) = [one for one in gradient_flows((2,)) if one.observed == name]
    trial = ran(case_of(), altered=altering(variation, modules, 1))
    assert diagnosis_line(diagnosed(trial)) == name + where
    assert not not_explained(trial)


def test_gradients_at_random_are_explained_by_no_backward_pass(ran: Ran) -> None:
    trial = ran(case_of())
    for rank, evidence in trial.ranks.items():
        noise = np.random.default_rng(rank)
        wrong = {fqn: g + noise.standard_normal(g.shape) for fqn, g in evidence.steps[0].gradients.items()}
        trial = with_step(trial, rank, 1, gradients=wrong)
    assert list(other_gradient_flows(trial, failing_checks(judge(trial)))) == []


def altered(name: str, *modules: str, since: int = 1) -> dict[str, object]:
    """The one of the known variations that says this."""
    model, training = case_of().model, case_of().training
    (variation,) = [one for one in variations(model, training) if one.observed == name]
    return {"altered": altering(variation, modules, since)}


@pytest.mark.parametrize(
    ("name", "modules", "told"),
    [
        ("the rotary base is 10000", ["layers.0.attention"], "the rotary base is 10000, requested 500000"),
        (
            "rotary tables are rounded to bfloat16",
            ["layers.0.attention"],
            "rotary tables are rounded to bfloat16, requested float64",
        ),
        (
            "rotary frequencies are rounded to bfloat16",
            ["layers.0.attention"],
            "rotary frequencies are rounded to bfloat16, requested float64",
        ),
        (
            "rotary angles and tables are computed in bfloat16",
            ["layers.0.attention"],
            "rotary angles and tables are computed in bfloat16, requested float64",
        ),
        ("the norm's eps is 1e-06", ["norm"], "the norm's eps is 1e-06 in norm, requested 1e-05"),
        (
            "the feed-forward's activation is GELU",
            ["layers.0.feed_forward"],
            "the feed-forward's activation is GELU, requested SiLU",
        ),
        *(
            (
                f"the output of {part} is counted 2 times in forward, once in backward",
                [module],
                "{name}, requested once",
            )
            for part, module in (("attention", "layers.0.attention.wo"), ("feed-forward", "layers.0.feed_forward"))
        ),
        (
            "query head i reads K/V head i mod 2",
            ["layers.0.attention.inner_attention"],
            "query head i reads K/V head i mod 2, requested i // 2",
        ),
    ],
)
def test_a_model_that_computes_something_else_is_told_by_what_and_where(
    ran: Ran, name: str, modules: list[str], told: str
) -> None:
    trial = ran(case_of(), **altered(name, *modules))
    assert diagnosis_line(diagnosed(trial)) == told.format(name=name)
    assert not not_explained(trial)


LAYERS = replace(MODEL, n_layers=3)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("layers 1 and 2 run in swapped order", [""]),
        ("the residual stream is taken after the norm where attention is added", ["layers.1"]),
    ],
)
def test_blocks_in_another_order_or_that_add_to_something_else_are_told(
    ran: Ran, name: str, modules: list[str]
) -> None:
    case = case_of(model=LAYERS)
    (variation,) = [one for one in variations(LAYERS, RECIPE) if one.observed == name]
    trial = ran(case, altered=altering(variation, modules, 1))
    assert diagnosis_line(diagnosed(trial)).startswith(name)
    assert not not_explained(trial)


@pytest.mark.parametrize(("layers", "told"), [(2, "layers.1 is"), (3, "layers.1, layers.2 are")])
def test_the_last_layers_that_are_on_no_rank_are_told_as_a_model_of_fewer(ran: Ran, layers: int, told: str) -> None:
    whole, fewer = case_of(model=replace(MODEL, n_layers=layers)), case_of()
    lost = tuple(f"layers.{layer}." for layer in range(1, layers))
    weights = {fqn: value for fqn, value in reference(whole).weights.items() if not fqn.startswith(lost)}
    trial = ran(fewer, train(fewer.model, fewer.training, weights=weights))
    judged_as_whole = replace(another_case(trial, whole), reference=reference(whole), golden=None)
    assert diagnosis_line(diagnosed(judged_as_whole)) == f"{told} on no rank: 1 layer trains, requested {layers}"
    assert not not_explained(judged_as_whole)


@pytest.mark.parametrize(
    ("balanced", "told"),
    [
        (True, "rotary positions restart at 0 on each cp rank"),
        (True, "rotary positions count tokens in the order in which cp ranks hold them"),
        (False, "rotary positions restart at 0 on each cp rank"),
    ],
)
def test_angles_of_other_positions_than_a_cp_rank_holds_are_told(ran: Ran, balanced: bool, told: str) -> None:
    case = case_of(ParallelDims(cp=2), training=replace(RECIPE, seq_len=16), cp_load_balance=balanced)
    trial = without_positions(ran(case, altered=altering(turned_over_cp(case, told), ["layers.0.attention"], 1)))
    assert diagnosis_line(diagnosed(trial)) == f"{told}, requested those in the sequence"
    assert not not_explained(trial)


def turned_over_cp(case: Case, told: str) -> Variation:
    """The one of cp that says this."""
    held = [positions(case, rank, 16) for rank in (0, 1)]
    owner = np.array([0 if at in held[0] else 1 for at in range(16)])
    (variation,) = [one for one in over_cp((np.concatenate(held), owner)) if one.observed == told]
    return variation


def without_positions(trial: Trial) -> Trial:
    """The evidence lacks what attention was given."""
    return with_every_rank(
        trial,
        lambda t, rank: with_rank(t, rank, steps=tuple(replace(s, positions=()) for s in t.ranks[rank].steps)),
    )


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_positions_that_recomputation_is_not_given_are_named_where_blocks_are_recomputed(
    ran: Ran, checkpointing: str
) -> None:
    told = "rotary positions restart at 0 on each cp rank"
    case = case_of(ParallelDims(cp=2), training=replace(RECIPE, seq_len=16), activation_checkpointing=checkpointing)
    again = recomputed(turned_over_cp(case, told))
    trial = without_positions(ran(case, altered=altering(again, ["layers.0"], 1)))
    assert (diagnosed(trial).kinds[0] == "recomputed otherwise") == (checkpointing == "full")
    if checkpointing == "full":
        assert diagnosis_line(diagnosed(trial)) == f"{again.observed}, requested those in the sequence"
        assert not not_explained(trial)


def test_logits_of_padding_in_the_softmax_are_counted(ran: Ran) -> None:
    odd = replace(MODEL, vocab_size=30)
    (padded,) = [one for one in variations(odd, RECIPE) if one.observed.startswith("the softmax counts 2 logits")]
    trial = ran(case_of(model=odd), altered=altering(padded, [""], 1))
    assert diagnosis_line(diagnosed(trial)) == f"{padded.observed}, requested none"


def test_what_begins_in_a_later_step_is_told_with_it(ran: Ran) -> None:
    trial = ran(case_of(), **altered("attention is left out", "layers.0", since=2))
    assert diagnosis_line(diagnosed(trial)) == "attention is left out from step 2 on"


def test_labels_that_are_smoothed_are_told_with_the_number_that_was_fitted(ran: Ran) -> None:
    (family,) = [one for one in families(case_of().model) if one.of(0.1).name == "label smoothing"]
    trial = ran(case_of(), loss=family.of(0.07).loss)
    assert diagnosis_line(diagnosed(trial)) == "labels are smoothed by 0.07, requested 0"


@pytest.mark.parametrize(
    ("case", "sizes", "dtype"),
    [
        (case_of(), [32, 32], "bfloat16"),
        (case_of(accumulation=2), [16] * 4, "float32"),
        (case_of(ParallelDims(cp=2), training=replace(RECIPE, seq_len=16)), [64, 64], "bfloat16"),
    ],
    ids=["fsdp", "accumulation", "cp"],
)
def test_losses_in_a_lower_precision_are_told_with_whether_their_sums_are(
    ran: Ran, case: Case, sizes: list[int], dtype: str
) -> None:
    passes = Tries(ran(case), 1).passes
    assert [len(at) for at in passes] == sizes and sorted(np.concatenate(passes)) == list(range(sum(sizes)))
    for how, known in [
        ("computed", variations(case.model, case.training)),
        ("computed and summed", low_sums(case.training, passes)),
    ]:
        (low,) = [one for one in known if one.observed == f"the loss is {how} in {dtype}"]
        trial = ran(case, loss=low.loss)
        assert diagnosis_line(diagnosed(trial)) == f"the loss is {how} in {dtype}, requested float64"
        assert not not_explained(trial)


def test_a_loss_that_no_variation_gives_is_located_and_not_named(ran: Ran) -> None:
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
