"""Where loss and gradients first go wrong, told whole: what is said of what nothing explains. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, broken, here
from literal import TINY, tiny_case, trial_of, with_parameter, with_step, with_value
from noisy import with_noise

from harness.diagnosis.localise import localise
from harness.judge.finding import Finding
from harness.judge.result import Cause, Result, Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

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


def located(trial: Trial, *checks: str, held: Collection[str] = ()) -> str:
    cause, _ = localise(trial, broken(*(checks or ("loss", "gradients"))), 0, frozenset(held))
    assert cause.kind == "not explained"
    return cause_line(cause)


ONE = f"in 1 of 21 parameters ({WQ})"
FIVE = "in 5 of 21 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 3 more)"
MATCHES = "the loss of step 1 matches within 2e-14"
NO_FACTOR = ", and no factor explains it: by"


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (
            off(TRIAL, 1, [WQ]),
            f"gradients are wrong by up to 5e-01 of the largest entry {ONE}; {MATCHES}",
        ),
        (
            off(TRIAL, 1, NORMS, [0, 1]),
            f"gradients are wrong by up to 5e-01 of the largest entry {FIVE} on ranks [0,1], one group of dp_shard; "
            f"all norm weights are wrong, no others; {MATCHES}",
        ),
        (
            off(TRIAL, 2, NORMS, [1, 3]),
            f"gradients are right in step 1 and wrong in step 2 {FIVE} on ranks [1,3], one group of dp_replicate; "
            "all norm weights are wrong, no others; the loss of step 2 matches within 2e-14",
        ),
        (
            off(TRIAL, 2, NAMES),
            "gradients are right in step 1 and wrong in step 2 in every parameter; "
            "the loss of step 2 matches within 2e-14",
        ),
        (off(TRIAL, 1, [WQ], [3], math.nan), f"gradients are wrong {ONE} on rank 3; {MATCHES}"),
        (off(TRIAL, 1, [WQ], [3], math.inf), f"gradients are wrong {ONE} on rank 3; {MATCHES}"),
        (
            losing(off(TRIAL, 1, [WQ]), 2),
            f"gradients are wrong by up to 5e-01 of the largest entry {ONE}; {MATCHES}",
        ),
        (losing(TRIAL, 1), "the loss of step 1 is off by 1.0e-02, its gradients match within the bound of 3.4e-14"),
        (losing(TRIAL, 2), "the loss of step 2 is off by 1.0e-02, its gradients match within the bound of 8.8e-14"),
        (
            losing(off(TRIAL, 2, [WQ]), 1),
            "the loss of step 1 is off by 1.0e-02, its gradients match within the bound of 3.4e-14",
        ),
        (losing(off(TRIAL, 1, [WQ]), 1), "the forward pass is wrong: the loss of step 1 is off by 1.0e-02"),
        (
            losing(off(TRIAL, 2, [WQ]), 2),
            "the forward pass is right in step 1 and wrong in step 2: the loss of step 2 is off by 1.0e-02",
        ),
        (
            off(LOUD, 1, [WQ], by=1e-2),
            f"gradients are off {ONE}{NO_FACTOR} 1.0e-02 of its norm in {WQ}, noise explains 2.0e-03; "
            "no single entry stands out",
        ),
        (
            off(off(LOUD, 2, NORMS, by=1e-2), 2, [NORM], by=1e-2),
            f"gradients are off in step 2 {FIVE}{NO_FACTOR} 2.0e-02 of its norm in {NORM}, "
            "noise explains 4.0e-03; no single entry stands out; all norm weights are wrong, no others",
        ),
        (
            losing(off(LOUD, 1, [WQ], by=1e-2), 1),
            f"the loss of step 1 is off by 1.0e-02, gradients are off {ONE}{NO_FACTOR} 1.0e-02 of its norm in {WQ}, "
            "noise explains 2.0e-03; no single entry stands out",
        ),
        (losing(LOUD, 1), "the loss of step 1 is off by 1.0e-02, its gradients match within the bound of 4.0e-01"),
        (TRIAL, "loss: here: expected this, observed that"),
        (LOUD, "loss: here: expected this, observed that"),
    ],
)
def test_loss_and_gradients_are_told_by_the_first_step_in_which_they_are_wrong(trial: Trial, told: str) -> None:
    for checks in (("loss",), ("loss", "gradients")):
        assert located(trial, *checks) == told
    assert located(trial, "gradients") == told.replace("loss: here", "gradients: here")
    assert located(trial, "update") == "update: here: expected this, observed that"


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ([], ""),
        (["initial_weights"], " though weights are right"),
        (["samples"], " though samples are right"),
        (["samples", "initial_weights", "positions"], " though weights and samples are right"),
    ],
)
def test_what_goes_into_a_wrong_forward_pass_is_told_to_be_right_where_it_was_judged(
    held: list[str], told: str
) -> None:
    first, second = (losing(off(TRIAL, step, [WQ]), step) for step in (1, 2))
    whole = f"the forward pass is wrong: the loss of step 1 is off by 1.0e-02{told}"
    assert located(first, held=held) == whole
    whole = "the forward pass is right in step 1 and wrong in step 2: the loss of step 2 is off by 1.0e-02"
    assert located(second, held=held) == whole


def test_what_is_wrong_before_the_forward_pass_is_told_in_its_place() -> None:
    trial = losing(off(TRIAL, 1, [WQ]), 1)
    trial = with_parameter(trial, 1, NORM, value=np.full(2, 3.0))
    told = "the loss of step 1 is off by 1.0e-02; broken before the forward pass: initial_weights"
    assert located(trial) == told
    trial = with_step(trial, 1, 2, microbatches=trial.ranks[0].steps[1].microbatches)
    assert located(trial) == told.replace("initial_weights", "samples, initial_weights")
    assert located(trial, held=["initial_weights"]) == (
        "the loss of step 1 is off by 1.0e-02 though weights are right; broken before the forward pass: samples"
    )


# ---- an update that is wrong before


def updating(*steps: int | None) -> dict[str, Result]:
    """The check's findings, in this order, each at a place of its own."""
    findings = tuple(
        Finding(name=f"place {place}", expected="this", observed="that", step=step) for place, step in enumerate(steps)
    )
    return broken("loss", "gradients") | {"update": Result("update", Verdict.FAIL, 1, findings)}


@pytest.mark.parametrize(
    ("steps", "place"), [((1,), 0), ((2, 1, 1), 1), ((None, 1), 1), ((3, 2), 1), ((3,), None), ((None,), None)]
)
def test_of_an_update_that_is_wrong_before_the_first_place_is_told(
    steps: tuple[int | None, ...], place: int | None
) -> None:
    before = "the update is wrong, gradients before clipping are right"
    after = "the loss of step 3 is off by 1.0e-02, its gradients match within the bound of 2.6e-13"
    broken_ones = updating(*steps)
    first = None if place is None else broken_ones["update"].findings[place]
    cause = localise(losing(TRIAL, 3), broken_ones, 0)[0]
    assert cause == Cause("not explained", after if place is None else before, finding=first)


def test_an_update_after_gradients_that_are_wrong_is_not_looked_at() -> None:
    assert cause_line(localise(losing(TRIAL, 1), updating(1), 0)[0]).startswith(
        "the loss of step 1 is off by 1.0e-02, "
    )


# ---- what is told besides


def test_two_of_the_failing_checks_are_shown_and_the_others_are_named() -> None:
    checks = ("gradients", "update", "golden")
    cause, lines = localise(off(TRIAL, 1, [WQ]), broken(*checks), 3)
    assert cause_line(cause) == f"gradients are wrong by up to 5e-01 of the largest entry {ONE}; {MATCHES}"
    assert lines == (
        ("tried", "3 hypotheses, none explains this"),
        here("gradients"),
        here("update"),
        ("also failing", "update, golden"),
    )
    assert localise(TRIAL, broken(*checks), 0)[1] == (("also failing", "update, golden"),)


UNTESTED = (
    "whether a model of the trainer's own, which rounds at other places than the reference's, explains it (own_model in "
    "the adapter's `traits`): `harness doctor` with these options tests it"
)


@pytest.mark.parametrize(
    ("trial", "checks", "told"),
    [
        (off(LOUD, 1, [WQ], by=1e-2), ["gradients"], True),
        (off(LOUD, 1, [WQ], by=1e-2), ["loss", "reported_loss", "gradients", "grad_norm"], True),
        (off(LOUD, 1, [WQ], by=1e-2), ["gradients", "update"], False),
        (off(LOUD, 1, [WQ], by=0.1), ["gradients"], False),  # 50 times the bound
        (off(LOUD, 3, [WQ], by=0.3), ["gradients"], False),  # 75 times
        (off(TRIAL, 1, [WQ], by=1e-2), ["gradients"], False),  # nothing rounds
    ],
)
def test_of_little_that_is_off_in_noise_it_is_told_that_another_order_was_not_tested(
    trial: Trial, checks: list[str], told: bool
) -> None:
    lines = localise(trial, broken(*checks), 0)[1]
    shown = [here(check) for check in checks[:2]]
    others = [("also failing", ", ".join(checks[1:]))] * (len(checks) > 1)
    assert lines == (*shown, *[("not tested", UNTESTED)] * told, *others)


def test_where_no_rank_has_a_gradient_there_is_none_that_another_order_would_leave() -> None:
    trial = losing(LOUD, 1)
    for rank in trial.ranks:
        for step in trial.case.steps:
            trial = with_step(trial, rank, step, gradients={})
    cause, lines = localise(trial, broken("loss"), 0)
    assert (
        cause_line(cause) == "the loss of step 1 is off by 1.0e-02"
    )  # nothing is said of gradients that nothing examined
    assert lines == (here("loss"),)
