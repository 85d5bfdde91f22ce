"""Comparators that respected harnesses shipped: passes when one step matches, NaN equals NaN, a missing step is skipped,
rank 0 only, values rounded, a curve one step late. Each check of numbers is shown evidence that such a comparator passes;
at the end stand the comparators themselves, in the check's place, to prove that they would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import judged, tiny_case, trial_of, with_step, with_value, without_step
from noisy import noise_of

from harness.core.checks import gradients
from harness.core.judge import tolerance
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial

WQ = "layers.0.attention.wq.weight"
RANKS, STEPS = range(4), (1, 2, 3)
OF_A_RANK = ("loss", "reported_loss", "grad_norm", "gradients", "update", "replica_agreement")


def spoilt(check: str, trial: Trial, rank: int, step: int, change: Callable[[Any], Any]) -> Trial:
    """One number that the check compares, or one parameter's, changed on one rank in one step."""
    record = trial.ranks[rank].steps[step - 1]
    if check == "loss":
        parts = tuple(replace(part, loss_sum=float(change(part.loss_sum))) for part in record.microbatches)
        return with_step(trial, rank, step, microbatches=parts)
    if check in ("reported_loss", "grad_norm"):
        return with_step(trial, rank, step, **{check: float(change(getattr(record, check)))})
    what = "gradients" if check == "gradients" else "parameters"
    return with_value(trial, rank, step, what, WQ, change)


def places(result: Result) -> list[tuple[int | None, str]]:
    return [(finding.step, finding.quantity) for finding in result.findings]


def steps_of(result: Result) -> set[int | None]:
    return {finding.step for finding in result.findings}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "off by 1e-8": lambda value: value * (1 + 1e-8),
    "rounded to float32": lambda value: np.float64(np.float32(value)) if np.isscalar(value) else np.float32(value),
    "rounded to 8 digits": lambda value: np.round(value, 8),
    "NaN": lambda value: value * math.nan,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("check", OF_A_RANK)
def test_one_rank_wrong_in_one_step_is_found_whichever_they_are(check: str, change: Callable[[Any], Any]) -> None:
    right = trial_of(tiny_case("hsdp_2x2"))
    for rank in RANKS:
        for step in STEPS:
            result = judged(check, spoilt(check, right, rank, step, change))
            assert result.verdict is Verdict.FAIL, (rank, step)
            first = result.findings[0]
            assert first.step == step, (rank, step, first)
            if check == "replica_agreement":
                assert first.ranks == (rank % 2, rank % 2 + 2)
            elif check != "loss":
                assert first.rank == rank, first


@pytest.mark.parametrize("check", OF_A_RANK)
def test_one_step_right_and_all_others_wrong_does_not_pass(check: str) -> None:
    for good in STEPS:
        trial = trial_of(tiny_case("hsdp_2x2"))
        for step in STEPS:
            for rank in RANKS[:2] if step != good else ():
                trial = spoilt(check, trial, rank, step, lambda value: value * 1.01)
        result = judged(check, trial)
        assert result.verdict is Verdict.FAIL, good
        if check != "update":  # which goes on from what it saw
            assert steps_of(result) == {*STEPS} - {good}


@pytest.mark.parametrize("check", OF_A_RANK)
def test_a_rank_one_step_ahead_of_all_others_does_not_pass(check: str) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    told = {"loss": "microbatches", "update": "parameters", "replica_agreement": "parameters"}.get(check, check)
    seen = [getattr(step, told) for step in trial.ranks[2].steps]
    for step, value in zip(STEPS, (*seen[1:], seen[-1]), strict=True):
        trial = with_step(trial, 2, step, **{told: value})
    result = judged(check, trial)
    assert result.verdict is Verdict.FAIL
    assert 1 in steps_of(result)


def test_a_golden_curve_one_step_late_or_right_in_one_step_does_not_pass() -> None:
    trial = trial_of(tiny_case("single"))
    golden = trial.golden
    assert golden is not None
    late = replace(golden, losses=(golden.losses[0], *golden.losses[:-1]))
    assert places(judged("golden", replace(trial, golden=late))) == [(2, "loss"), (3, "loss")]
    for good in range(3):
        once = tuple(norm * (1.0 if step == good else 1.01) for step, norm in enumerate(golden.grad_norms))
        wrong = [(step, "gradient norm") for step in STEPS if step != good + 1]
        assert places(judged("golden", replace(trial, golden=replace(golden, grad_norms=once)))) == wrong


@pytest.mark.parametrize("tier", ["derived", "measured"])
@pytest.mark.parametrize("check", [*OF_A_RANK[:5], "golden"])
def test_nan_on_both_sides_is_no_agreement(check: str, tier: str) -> None:
    """replica_agreement compares bytes, and two NaNs may well be equal bytes: it is the others' to refuse them."""
    trial = trial_of(tiny_case("hsdp_2x2"))
    if tier == "measured":
        quiet = noise_of(trial.case)
        trial = replace(trial, case=replace(trial.case, training=replace(trial.case.training, compute_dtype="float32")))
        trial = replace(trial, reference=replace(trial.reference, noise={trial.case.noise_key: quiet}))
        assert trial.golden is not None
        trial = replace(trial, golden=replace(trial.golden, noise={trial.case.golden_noise_key: quiet}))
        assert check == "update" or judged(check, trial).verdict is Verdict.PASS
    steps = list(trial.reference.steps)
    parts = {what: getattr(steps[1], what) | {WQ: getattr(steps[1], what)[WQ] * math.nan} for what in WHAT}
    steps[1] = replace(steps[1], loss=math.nan, grad_norm=math.nan, **parts)
    trial = replace(trial, reference=replace(trial.reference, steps=tuple(steps)))
    assert trial.golden is not None
    losses, norms = ((one[0], math.nan, one[2]) for one in (trial.golden.losses, trial.golden.grad_norms))
    trial = replace(trial, golden=replace(trial.golden, losses=losses, grad_norms=norms))
    for rank in RANKS:
        for told in OF_A_RANK[:5]:
            trial = spoilt(told, trial, rank, 2, lambda value: value * math.nan)
    assert judged(check, trial).verdict in (Verdict.FAIL, Verdict.UNKNOWN)


WHAT = ("gradients", "parameters")


@pytest.mark.parametrize("check", [*OF_A_RANK, "determinism", "samples"])
def test_a_step_that_nobody_tells_of_is_not_passed_over(check: str) -> None:
    for step in STEPS:
        trial = trial_of(tiny_case("hsdp_2x2", runs=2))
        for rank in RANKS:
            trial = without_step(trial, rank, step)
        trial = replace(trial, repeat=trial.run)
        assert judged(check, trial).verdict is Verdict.UNKNOWN
        steps = tuple(told for told in trial.reference.steps if told.step != step)
        trial = replace(trial, reference=replace(trial.reference, steps=steps))
        assert judged(check, trial).verdict is Verdict.UNKNOWN


# ---- the comparators themselves, in the place of the right one


def nan_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(seen: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
        return float(np.max(np.abs(np.nan_to_num(seen) - np.nan_to_num(expected))))

    monkeypatch.setattr(tolerance, "relative_difference", distance)


def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tolerance.relative_difference
    monkeypatch.setattr(tolerance, "relative_difference", lambda *told: right(*(np.round(one, 6) for one in told)))


def rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Trial.steps_with_reference
    monkeypatch.setattr(Trial, "steps_with_reference", lambda trial: (told for told in steps(trial) if told[0] == 0))


def first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Trial.steps_with_reference
    monkeypatch.setattr(
        Trial, "steps_with_reference", lambda trial: (told for told in steps(trial) if told[1].step == 1)
    )


def a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(trial: Trial) -> Iterator[Any]:
        later = {step.step - 1: step for step in trial.reference.steps}
        for rank, evidence in trial.ranks.items():
            yield from ((rank, step, later[step.step]) for step in evidence.steps if step.step in later)

    monkeypatch.setattr(Trial, "steps_with_reference", steps)


def next_step_of(trial: Trial) -> Trial:
    for rank in RANKS:
        seen = trial.ranks[rank].steps
        for step in (1, 2):
            trial = with_step(trial, rank, step, gradients=seen[step].gradients)
    return trial


@pytest.mark.parametrize(
    ("rot", "spoil"),
    [
        (nan_is_nan, lambda t: with_value(t, 0, 1, "gradients", WQ, lambda g: np.where(np.abs(g) < 0.1, math.nan, g))),
        (rounded, lambda t: with_value(t, 0, 1, "gradients", WQ, lambda g: g * (1 + 1e-8))),
        (rank_0_only, lambda t: with_value(t, 3, 1, "gradients", WQ, lambda g: 2 * g)),
        (first_step_only, lambda t: with_value(t, 0, 3, "gradients", WQ, lambda g: 2 * g)),
        (a_step_late, next_step_of),
    ],
)
def test_a_rotten_comparator_passes_what_the_check_does_not(
    rot: Callable[[pytest.MonkeyPatch], None], spoil: Callable[[Trial], Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = spoil(trial_of(tiny_case("hsdp_2x2")))
    if rot is nan_is_nan:  # on both sides; a NaN would leave nothing to derive a bound from
        bounds = trial.bounds
        part = trial.ranks[0].steps[0].gradients[WQ]
        whole = trial.reference.steps[0].gradients[WQ].copy()
        whole[tuple(slice(*ends) for ends in trial.plan.slices[0][WQ])] = part
        step = replace(trial.reference.steps[0], gradients=trial.reference.steps[0].gradients | {WQ: whole})
        for rank in RANKS:
            mine = whole[tuple(slice(*ends) for ends in trial.plan.slices[rank][WQ])]
            trial = with_value(trial, rank, 1, "gradients", WQ, lambda _, mine=mine: mine)
        trial = replace(trial, reference=replace(trial.reference, steps=(step, *trial.reference.steps[1:])))
        trial.__dict__["bounds"] = bounds
    assert gradients.check(trial).verdict is Verdict.FAIL
    rot(monkeypatch)
    assert gradients.check(trial).verdict is Verdict.PASS
