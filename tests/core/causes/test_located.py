"""What is said of checks that nothing explains: where loss and gradients first go wrong, as data."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diagnosed import NORM, broken, here
from literal import TINY, tiny_case, trial_of, with_parameter, with_step, with_value
from noisy import with_noise

from harness.core.causes.localise import first_wrong_input, localise
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.probe.activity import ActivityRecorder
from harness.core.probe.clock import Clock
from harness.core.report.cause_text import cause_line
from harness.reference.config import ModelConfig
from harness.reference.model import initial_weights, llama_from
from harness.reference.train import mean_squares

TRIAL = trial_of(tiny_case("hsdp_2x2", model=replace(TINY, n_layers=2)))
NAMES = list(TRIAL.plan.shapes)
NORMS = [fqn for fqn in NAMES if fqn.endswith("norm.weight")]
WQ = "layers.0.attention.wq.weight"
LOUD = with_noise(TRIAL, loss=1e-4, grad_norm=1e-2, gradient=0.1, distance=1e-3, fit=1e-3)


def off(trial: Trial, step: int, fqns: Collection[str], ranks: Collection[int] = range(4), by: float = 0.5) -> Trial:
    """These ranks' gradients of these parameters are off by so much of each entry, some up and some down."""

    def blur(gradient: np.ndarray) -> np.ndarray:
        return gradient * (1 + by * np.resize([1, -1], gradient.shape))

    for rank in ranks:
        for fqn in fqns:
            trial = with_value(trial, rank, step, "gradients", fqn, blur)
    return trial


def losing(trial: Trial, step: int, factor: float = 1.01) -> Trial:
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[step - 1].microbatches
        assert part.loss_sum is not None
        trial = with_step(trial, rank, step, microbatches=(replace(part, loss_sum=factor * part.loss_sum),))
    return trial


def located(trial: Trial, *checks: str, held: Collection[str] = ()) -> Cause:
    cause, _ = localise(trial, broken(*(checks or ("loss", "gradients"))), 0, frozenset(held))
    assert cause.kind == "not explained"
    return cause


def data(cause: Cause) -> dict[str, Any]:
    return dict(cause.details)


ALL, SOME = range(4), pytest.approx(0.01, rel=1e-6)
HALF = pytest.approx(0.5)


@pytest.mark.parametrize(
    ("trial", "wanted"),
    [
        (off(TRIAL, 1, [WQ]), {"step": 1, "ranks": (*ALL,), "parameters": (WQ,), "off": HALF}),
        (off(TRIAL, 1, NORMS, [0, 1]), {"step": 1, "ranks": (0, 1), "parameters": (*NORMS,)}),
        (off(TRIAL, 2, NORMS, [1, 3]), {"step": 2, "ranks": (1, 3), "parameters": (*NORMS,)}),
        (off(TRIAL, 1, [WQ], [3], math.nan), {"step": 1, "ranks": (3,), "parameters": (WQ,)}),
        (off(TRIAL, 1, [WQ], [3], math.inf), {"step": 1, "ranks": (3,), "parameters": (WQ,), "off": math.inf}),
        (losing(off(TRIAL, 1, [WQ]), 2), {"step": 1, "parameters": (WQ,), "off": HALF}),
        (losing(TRIAL, 1), {"place": "forward", "step": 1, "off": SOME, "module": ""}),
        (losing(TRIAL, 2), {"place": "forward", "step": 2, "off": SOME}),
        (losing(off(TRIAL, 2, [WQ]), 1), {"place": "forward", "step": 1, "off": SOME}),
        (losing(off(TRIAL, 2, [WQ]), 2), {"place": "forward", "step": 2, "off": SOME}),
        (off(LOUD, 1, [WQ], by=1e-2), {"step": 1, "off": SOME, "parameters": (WQ,)}),
        (off(LOUD, 2, NORMS, by=1e-2), {"step": 2, "off": SOME, "parameters": (*NORMS,)}),
        (losing(LOUD, 1), {"place": "forward", "step": 1, "off": SOME}),
        (TRIAL, {}),
        (LOUD, {}),
    ],
)
def test_loss_and_gradients_are_located_in_the_first_step_in_which_they_are_wrong(
    trial: Trial, wanted: dict[str, Any]
) -> None:
    for checks in (("loss",), ("loss", "gradients"), ("gradients",)):
        cause = located(trial, *checks)
        found = data(cause)
        expected = {"place": "gradients", **wanted} if wanted else {}
        assert {name: found[name] for name in expected} == expected
        assert bool(found) is bool(wanted) and (wanted or cause.finding == here(checks[0])[1])
    assert located(trial, "update").finding == here("update")[1]


def test_the_forward_pass_is_blamed_with_its_ranks_where_what_goes_into_it_is_right() -> None:
    wrong = losing(off(TRIAL, 1, [WQ]), 1)
    assert "ranks" in data(located(wrong))
    wrong = with_parameter(wrong, 1, NORM, value=np.full(2, 3.0))
    assert "ranks" not in data(located(wrong)) and "ranks" in data(located(wrong, held=["initial_weights"]))


def test_nothing_is_said_of_a_forward_pass_whose_weights_differ_already() -> None:
    forward = losing(off(TRIAL, 2, [WQ]), 2)
    assert data(located(forward))["place"] == "forward" and "ranks" in data(located(forward))
    for trial in (
        with_value(forward, 1, 1, "parameters", NORM, lambda value: value + 1e-3),
        with_value(forward, 3, 1, "parameters", WQ, lambda value: value * (1 + 1e-6)),
    ):
        assert data(located(trial))["place"] == "loss" and "ranks" not in data(located(trial))
    later = with_value(forward, 1, 2, "parameters", NORM, lambda value: value + 1e-3)  # of the step itself
    assert data(located(later))["place"] == "forward"
    assert data(located(losing(off(LOUD, 2, [WQ], by=3.0), 2)))["place"] == "loss"  # noise moves weights


def updating(*steps: int | None) -> dict[str, Result]:
    """The check's findings, in this order, each at a place of its own."""
    findings = tuple(
        Finding(name=f"place {place}", expected="this", observed="that", step=step) for place, step in enumerate(steps)
    )
    return broken("loss", "gradients") | {"update": Result("update", Verdict.FAIL, 1, findings)}


@pytest.mark.parametrize(
    ("steps", "place"), [((1,), 0), ((2, 1, 1), 1), ((None, 1), 1), ((3, 2), 1), ((3,), None), ((None,), None)]
)
def test_an_update_that_is_wrong_before_is_the_place(steps: tuple[int | None, ...], place: int | None) -> None:
    wrong = updating(*steps)
    cause = localise(losing(TRIAL, 3), wrong, 0)[0]
    assert cause.finding == (None if place is None else wrong["update"].findings[place])
    assert data(cause)["place"] == ("forward" if place is None else "update")
    assert data(localise(losing(TRIAL, 1), updating(1), 0)[0])["place"] == "forward"


@pytest.mark.parametrize(
    ("trial", "checks", "untested"),
    [
        (off(LOUD, 1, [WQ], by=1e-2), ["gradients"], True),
        (off(LOUD, 1, [WQ], by=1e-2), ["loss", "reported_loss", "gradients", "grad_norm"], True),
        (off(LOUD, 1, [WQ], by=1e-2), ["gradients", "update"], False),
        (off(LOUD, 1, [WQ], by=0.1), ["gradients"], False),  # 50 times the bound
        (off(LOUD, 3, [WQ], by=0.3), ["gradients"], False),  # 75 times
        (off(TRIAL, 1, [WQ], by=1e-2), ["gradients"], False),  # nothing rounds
    ],
)
def test_of_little_that_is_off_in_noise_another_order_was_not_tested(trial: Trial, checks: list[str], untested: bool):
    assert ("not tested" in dict(localise(trial, broken(*checks), 0)[1])) is untested


def test_where_no_rank_has_a_gradient_nothing_is_said_of_gradients() -> None:
    trial = losing(LOUD, 1)
    for rank in trial.ranks:
        for step in trial.case.steps:
            trial = with_step(trial, rank, step, gradients={})
    cause, lines = localise(trial, broken("loss"), 0)
    assert "gradients" not in cause_line(cause) and lines == (here("loss"),)


# ---- the first module whose input is wrong, by mean squares

INPUTS = {"layers.0": 4.0, "layers.0.attention.wq": 1.0, "layers.0.attention.wo": 0.25, "norm": 9.0}


def wrong_forward(seen: dict[str, tuple[float, float]]) -> Trial:
    """One of two tp ranks has other sums of squares and counts; all losses are off."""
    trial = losing(trial_of(tiny_case("tp_2")), 1)
    for rank in trial.ranks:
        inputs = {fqn: (8 * square, 8.0) for fqn, square in INPUTS.items()} | (seen if rank == 1 else {})
        trial = with_step(trial, rank, 1, activity=replace(trial.ranks[rank].steps[0].activity, inputs=inputs))
    return replace(trial, reference=replace(trial.reference, inputs=INPUTS))


@pytest.mark.parametrize(
    ("seen", "place"),
    [
        ({"layers.0.attention.wo": (3.0, 8.0), "norm": (1.0, 8.0)}, ("layers.0.attention.wq", "layers.0.attention.wo")),
        ({"norm": (72 * (1 + 1e-8), 8.0)}, ("layers.0.attention.wo", "norm")),
        ({"norm": (72 * (1 + 1e-10), 8.0)}, ("layers.0.attention.wo", "norm")),
        ({"norm": (72 * (1 + 1e-13), 8.0)}, ("norm", "")),  # rounding
        ({"layers.0": (0.0, 8.0)}, ("", "layers.0")),
        ({}, ("norm", "")),
    ],
)
def test_the_first_module_whose_input_is_wrong_is_located(
    seen: dict[str, tuple[float, float]], place: tuple[str, str]
) -> None:
    trial = wrong_forward(seen)
    assert first_wrong_input(trial)[:2] == place
    found = data(located(trial))
    assert (found["right"], found["module"]) == place


@pytest.mark.parametrize(("off_by", "module"), [(2e-4, ""), (1e-3, ""), (1e-2, "norm")])
def test_in_noise_a_few_times_the_bound_of_the_first_loss_is_noise(off_by: float, module: str) -> None:
    trial = with_noise(wrong_forward({"norm": (72 * (1 + off_by), 8.0)}), loss=1e-4)
    assert first_wrong_input(trial).first_wrong == module


def test_a_module_that_nobody_saw_is_passed_over_and_without_any_nothing_is_located() -> None:
    trial = wrong_forward({"norm": (80.0, 8.0)})
    for inputs, place in (
        ({"layers.0": 4.0, "layers.0.dropout": 2.0, "norm": 9.0}, ("layers.0", "norm")),
        ({}, ("", "")),
    ):
        assert first_wrong_input(replace(trial, reference=replace(trial.reference, inputs=inputs)))[:2] == place


def test_the_probe_measures_what_the_reference_does_in_whatever_pieces() -> None:
    model_config = ModelConfig(name="tiny", dim=4, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=8, ffn_dim=8)
    model = llama_from(initial_weights(model_config, 1), config=model_config, dtype=torch.float64)
    tokens = torch.arange(24).reshape(4, 6) % 8
    clock = Clock()
    clock.enter_forward()
    recorder = ActivityRecorder(clock)
    recorder.attach([model])
    clock.phase = lambda: "forward"  # type: ignore[method-assign]
    for row in tokens:
        model(row[None])
    clock.phase = lambda: "backward"  # type: ignore[method-assign]
    model(tokens)  # recomputation is not measured
    recorder.remove()
    expected, seen = mean_squares(model, tokens), recorder.activity_of(1).inputs
    assert list(expected) == list(seen)
    assert "tok_embeddings" not in seen and "layers.0.attention.inner_attention" in seen
    for fqn, (squares, count) in seen.items():
        assert np.isclose(squares / count, expected[fqn], rtol=1e-12, atol=0), fqn


def test_what_follows_in_later_steps_of_copies_that_differ_is_no_mistake_of_the_forward_pass() -> None:
    value = Finding(ranks=(0, 1), step=1, kind="parameter", name=NORM, quantity="value")
    late = losing(off(TRIAL, 2, [WQ]), 2)
    for quantity, wanted in (("value", "replicas"), ("gradient", "forward")):
        apart = Result("replica_agreement", Verdict.FAIL, 1, (replace(value, quantity=quantity),))
        cause, _ = localise(late, broken("loss", "gradients") | {"replica_agreement": apart}, 0)
        assert data(cause)["place"] == wanted
