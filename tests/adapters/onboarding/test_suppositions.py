"""What is supposed of a model that an adapter has wrong: by trainers that have it so, and are trained without suppositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from harness.adapters.onboarding.skeleton import as_yaml
from harness.adapters.onboarding.suppositions import (
    SupposedTrial,
    judge_fitting_suppositions,
    suppositions,
    with_own_rates,
)
from harness.adapters.support.rows import halves
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import USUAL_TRAITS
from harness.core.causes.assume import retrain
from harness.core.evidence.records import RankEvidence, Run, TensorEvidence
from harness.core.evidence.step import Microbatch, StepEvidence
from harness.core.judge.order import reorder_reference
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun
from harness.reference.train import train

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=24)
RECIPE = TrainingConfig(steps=2, global_batch=4, seq_len=8, seed=1)  # with other numbers of valid tokens in each step
CASE = Case("any", "a test", ParallelDims(), model=MODEL, training=RECIPE)
REFERENCE = train(MODEL, CASE.training)
RATES = tuple(step.lr for step in REFERENCE.steps)
Trainer = Callable[[ModelConfig, ReferenceRun], ReferenceRun]
"""Given the model requested and the seed weights, what it computes, by the adapter's names and in the adapter's order."""


@pytest.fixture(autouse=True)
def _in_closed_form() -> None:
    """Not here: models are trained."""


def trial_of(run: ReferenceRun, reference: ReferenceRun = REFERENCE, rates: tuple[float | None, ...] = RATES) -> Trial:
    """One rank that computed what `run` did, with the seed weights of the reference."""
    labels, tokens = reference.labels, reference.tokens
    rows = [[reference.sample_ids.index(id_) for id_ in ids] for ids in reference.samples]
    steps = tuple(
        StepEvidence(
            step=step.step,
            microbatches=(Microbatch(tokens[at], labels[at], step.loss * step.valid_tokens, step.valid_tokens),),
            reported_loss=None,
            grad_norm=None,
            lr=rate,
            gradients=step.gradients,
            parameters=step.parameters,
            optimizer_state=step.optimizer_state,
            memory={},
            changed={},
        )
        for step, at, rate in zip(run.steps, rows, rates, strict=True)
    )
    held = tuple(TensorEvidence(f, v.shape, "float64", None, (), v) for f, v in reference.weights.items())
    evidence = RankEvidence(0, 1, held, (), (), steps, reports=())
    return Trial(CASE, make_plan(CASE, USUAL_TRAITS), Run("", 1, (), {0: evidence}), reference)


def by(model: ModelConfig, reference: ReferenceRun, **otherwise: Any) -> ReferenceRun:
    return retrain(model, CASE.training, reference, **otherwise)


def with_setting(model: ModelConfig, reference: ReferenceRun, **values: Any) -> ReferenceRun:
    return by(replace(model, **values), reference)


def with_halves(model: ModelConfig, reference: ReferenceRun) -> ReferenceRun:
    return by(model, reference, rows=halves(replace(CASE, model=model)))


def named(one: str, other: str) -> Trainer:
    """What one name says is the other's, and vice versa."""
    names = {f"{one}.weight": f"{other}.weight", f"{other}.weight": f"{one}.weight"}

    def change(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {fqn: arrays[names.get(fqn, fqn)] for fqn in arrays}

    return partial(between, change)


def turned(*names: str) -> Trainer:
    def turn(held: Any) -> Any:
        return {key: value.T for key, value in held.items()} if isinstance(held, dict) else held.T

    def change(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {fqn: turn(held) if fqn.split(".")[-2] in names else held for fqn, held in arrays.items()}

    return partial(between, change)


def between(change: Callable[..., Any], model: ModelConfig, reference: ReferenceRun) -> ReferenceRun:
    """The model requested, whose arrays the adapter sees changed."""
    run = by(model, replace(reference, weights=change(reference.weights)))
    steps = (
        replace(
            step,
            gradients=change(step.gradients),
            parameters=change(step.parameters),
            optimizer_state=change(step.optimizer_state),
        )
        for step in run.steps
    )
    return replace(run, weights=reference.weights, steps=tuple(steps))


def exchange(one: str, other: str) -> str:
    return f"adapter: exchange {one} and {other} in NAMES"


def from_the_left(names: str) -> str:
    return f"adapter: copy {names} transposed, and judge with DDP only: no check covers transposed slices"


LAYER = "layers.0."
USUAL_ONES: dict[str, Trainer] = {
    "case: model: {norm_eps: 1.0e-06}": partial(with_setting, norm_eps=1e-6),
    "case: model: {norm_eps: 1.0e-08}": partial(with_setting, norm_eps=1e-8),
    "case: model: {norm_eps: 1.0e-12}": partial(with_setting, norm_eps=1e-12),
    "case: model: {norm_eps: 2.220446049250313e-16}": partial(with_setting, norm_eps=2.0**-52),
    "case: model: {norm_eps: 1.1920928955078125e-07}": partial(with_setting, norm_eps=2.0**-23),
    "case: model: {rope_theta: 10000.0}": partial(with_setting, rope_theta=1e4),
    "case: model: {rope_theta: 1000000.0}": partial(with_setting, rope_theta=1e6),
    "case: model: {n_heads: 4, n_kv_heads: 2}": partial(with_setting, n_heads=4, n_kv_heads=2),
    "adapter: def rows(self, case): return halves(case)": with_halves,
    exchange("w1", "w3"): named(f"{LAYER}feed_forward.w1", f"{LAYER}feed_forward.w3"),
    exchange("wq", "wo"): named(f"{LAYER}attention.wq", f"{LAYER}attention.wo"),
    exchange("wk", "wv"): named(f"{LAYER}attention.wk", f"{LAYER}attention.wv"),
    exchange("attention_norm", "ffn_norm"): named(f"{LAYER}attention_norm", f"{LAYER}ffn_norm"),
    exchange("tok_embeddings", "output"): named("tok_embeddings", "output"),
    from_the_left("wq"): turned("wq"),
    from_the_left("wo"): turned("wo"),
    from_the_left("wq and wo"): turned("wq", "wo"),
}
HALVES = next(one for one, trainer in USUAL_ONES.items() if trainer is with_halves)
LEFT_OUT = "adapter: leave out `rows`; adjacent entries of a head turn together"


def said(found: list[SupposedTrial]) -> list[list[str]]:
    return [[each.line for each in one.suppositions] for one in found]


def holds(one: SupposedTrial) -> bool:
    """Every check of numbers; of all else this evidence has little."""
    verdicts = {result.check: result.verdict for result in one.results}
    failed = {check for check, verdict in verdicts.items() if verdict is Verdict.FAIL}
    of_numbers = {verdicts[check] for check in ("loss", "gradients", "update")}
    return failed <= {"completed", "features", "memory"} and of_numbers == {Verdict.PASS}


def with_loss(trial: Trial, loss_sum: float | None, *, valid: int | None = None) -> Trial:
    """Return the trial with this loss in step 1."""
    first, *rest = trial.ranks[0].steps
    part = first.microbatches[0]
    part = replace(part, loss_sum=loss_sum, valid_tokens=part.valid_tokens if valid is None else valid)
    evidence = replace(trial.ranks[0], steps=(replace(first, microbatches=(part,)), *rest))
    return replace(trial, run=replace(trial.run, ranks={0: evidence}))


def in_rows(trainer: Trainer | None = None) -> Trial:
    """Return the trial of an adapter that puts rows in another order, which is not the trainer's."""
    rows = {
        fqn: np.roll(np.arange(shape[0]), 1)
        for fqn, shape in MODEL.parameter_shapes().items()
        if fqn.endswith(("wq.weight", "wk.weight"))
    }
    reference = reorder_reference(REFERENCE, rows)
    return trial_of((trainer or by)(MODEL, reference), reference)


@pytest.mark.parametrize("which", USUAL_ONES, ids=lambda which: which[:60])
def test_what_is_so_of_a_model_is_said_with_its_line_and_all_numbers_are_right_under_it(which: str) -> None:
    found = judge_fitting_suppositions(trial_of(USUAL_ONES[which](MODEL, REFERENCE)))
    assert said(found) == [[which]]
    assert holds(found[0])


def test_what_is_usually_so_is_supposed_in_this_order() -> None:
    assert [each.line for each in suppositions(trial_of(REFERENCE))] == [*USUAL_ONES]


def test_rows_in_a_wrong_order_are_said_beside_what_else_is_so() -> None:
    supposed = {each.line for each in suppositions(in_rows())}
    assert HALVES not in supposed and not any("n_heads" in line for line in supposed)
    found = judge_fitting_suppositions(in_rows(partial(with_setting, rope_theta=1e4)))
    assert [set(one) for one in said(found)] == [{LEFT_OUT, "case: model: {rope_theta: 10000.0}"}]
    assert holds(found[0])


@pytest.mark.parametrize(
    ("numbers", "others"),
    [
        ((24, 2, 1), [(4, 2), (6, 3)]),  # sizes 6 and 4; 12 is its own
        ((24, 4, 4), [(1, 1), (2, 2), (3, 3), (6, 6)]),
        ((32, 8, 4), [(2, 1), (4, 2)]),
        ((8, 2, 1), []),  # two entries are too few of a head
        ((12, 2, 2), [(1, 1), (3, 3)]),
    ],
)
def test_as_many_heads_are_supposed_as_weights_of_these_shapes_may_have(
    numbers: tuple[int, int, int], others: list[tuple[int, int]]
) -> None:
    dim, heads, kv_heads = numbers
    trial = trial_of(REFERENCE)
    model = replace(MODEL, dim=dim, n_heads=heads, n_kv_heads=kv_heads)
    found = [each for each in suppositions(replace(trial, case=replace(CASE, model=model))) if "n_heads" in each.line]
    assert [each.line for each in found] == [f"case: model: {{n_heads: {h}, n_kv_heads: {kv}}}" for h, kv in others]
    for each, (h, kv) in zip(found, others, strict=True):
        attention = SimpleNamespace(config=model)
        each.alter(attention)
        assert attention.config == replace(model, n_heads=h, n_kv_heads=kv)


def test_what_is_requested_is_not_supposed() -> None:
    trial = trial_of(REFERENCE)
    model = replace(MODEL, norm_eps=1e-6, rope_theta=1e4)
    lines = [each.line for each in suppositions(replace(trial, case=replace(CASE, model=model)))]
    eps = ["1.0e-05", "1.0e-08", "1.0e-12", "2.220446049250313e-16", "1.1920928955078125e-07"]
    assert lines[:7] == [
        *(f"case: model: {{norm_eps: {one}}}" for one in eps),
        *(f"case: model: {{rope_theta: {theta}}}" for theta in ("500000.0", "1000000.0")),
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(1e-6, "1.0e-06"), (1.5e-7, "1.5e-07"), (0.001, "0.001"), (1, "1.0"), (1e30, "1.0e+30")]
)
def test_numbers_are_written_so_that_yaml_reads_them(value: float, text: str) -> None:
    assert as_yaml(value) == text
    assert yaml.safe_load(text) == value and isinstance(yaml.safe_load(text), float)


def test_of_a_model_that_is_right_nothing_is_supposed_but_its_own_schedule() -> None:
    rates = (0.001, 0.002)
    run = retrain(MODEL, replace(CASE.training, rates=rates), REFERENCE)
    found = judge_fitting_suppositions(trial_of(run, rates=rates))
    assert said(found) == [[]]
    assert found[0].trial.case == replace(CASE, training=replace(CASE.training, rates=rates))
    assert holds(found[0])


def test_two_things_that_are_so_at_once_are_both_said() -> None:
    found = judge_fitting_suppositions(trial_of(with_halves(replace(MODEL, norm_eps=1e-8), REFERENCE)))
    assert said(found) == [["case: model: {norm_eps: 1.0e-08}", HALVES]]
    assert holds(found[0])


def test_of_three_things_that_are_so_at_once_nothing_is_said() -> None:
    assert (
        judge_fitting_suppositions(trial_of(with_halves(replace(MODEL, norm_eps=1e-6, rope_theta=1e4), REFERENCE)))
        == []
    )


@pytest.mark.parametrize(("loss", "valid"), [(None, None), (0.0, 0)])
def test_where_no_loss_was_seen_nothing_is_supposed(loss: float | None, valid: int | None) -> None:
    assert judge_fitting_suppositions(with_loss(trial_of(REFERENCE), loss, valid=valid)) == []


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("measured", [True, False])
def test_a_loss_is_given_within_its_bound_or_a_millionth_where_none_was_measured(measured: bool, sign: int) -> None:
    trial = trial_of(REFERENCE)
    bound = trial.bounds.loss[1]
    assert bound < 1e-8 and bound != trial.bounds.loss[2]
    if not measured:
        bound, trial = 1e-6, replace(trial, case=replace(CASE, features=Features(reduce_dtype="bfloat16")))
    step = REFERENCE.steps[0]

    def off(by: float) -> Trial:
        return with_loss(trial, step.loss * step.valid_tokens * (1 + sign * by))

    assert said(judge_fitting_suppositions(off(0.95 * bound)))[0] == []
    assert [] not in said(judge_fitting_suppositions(off(1.05 * bound)))


@pytest.mark.parametrize("rates", [RATES, tuple(rate * (1 + 1e-13) for rate in RATES), RATES[:1], (0.5,), (0.5, None)])
def test_rates_that_are_the_recipes_or_not_all_seen_are_no_schedule_of_its_own(rates: tuple[float | None, ...]) -> None:
    seen = replace(REFERENCE, steps=REFERENCE.steps[: len(rates)])
    trial = trial_of(seen, replace(REFERENCE, samples=REFERENCE.samples[: len(rates)]), rates)
    assert with_own_rates(trial) == CASE.training


@pytest.mark.parametrize("rates", [(0.5, 0.25), (RATES[0], RATES[1] * (1 + 1e-11)), (RATES[0] + 1e-12, RATES[1])])
def test_rates_that_are_not_the_recipes_are_its_own(rates: tuple[float, ...]) -> None:
    assert with_own_rates(trial_of(REFERENCE, rates=rates)) == replace(CASE.training, rates=rates)
