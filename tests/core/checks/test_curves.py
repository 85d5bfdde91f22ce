"""The checks `determinism` and `golden`, and bounds measured from the reference's noise. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import WQ, bounds_of, findings, like, where, with_loss
from literal import (
    judged,
    last_bit,
    tiny_case,
    trial_of,
    with_rank,
    with_value,
)
from noisy import noise_of

from harness.core.evidence.records import Exit
from harness.core.judge.finding import Bound
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.reference.record import Noise

# ---- determinism


def repeated(trial, change=lambda trial: trial):
    return replace(trial, repeat=change(trial).run)


def test_a_repeat_that_differs_in_one_bit_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    broken = repeated(trial, lambda t: with_value(t, 1, 3, "gradients", WQ, last_bit))
    assert findings("determinism", broken) == (
        like(
            1,
            0,
            1,
            step=3,
            note=f"gradients of {WQ}",
            quantity="results that differ from the first run",
        ),
    )
    broken = repeated(trial, lambda t: with_loss(t, 0, 1, lambda loss: np.nextafter(loss, 9)))
    assert findings("determinism", broken) == (
        like(0, 0, 1, step=1, note="losses of microbatch 0", quantity="results that differ from the first run"),
    )


def test_a_repeat_that_failed_or_is_not_there_is_unknown() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    crashed = replace(trial.run, exits=(Exit(0, "ok", 0), Exit(1, "raised", 1)))
    fewer = replace(trial.run, ranks={0: trial.ranks[0]})
    for repeat in (None, crashed, fewer):
        result = judged("determinism", replace(trial, repeat=repeat))
        assert (result.verdict, result.note) == (Verdict.UNKNOWN, "the repeat left no complete evidence")


def test_a_repeat_with_a_step_less_is_unknown() -> None:
    trial = trial_of(tiny_case("single", runs=2))
    shorter = repeated(trial, lambda t: with_rank(t, 0, steps=t.ranks[0].steps[:2]))
    assert judged("determinism", shorter).verdict == Verdict.UNKNOWN


# ---- golden


def test_a_reference_that_moved_away_from_its_golden_is_named() -> None:
    trial = trial_of(tiny_case("single"))
    loss = trial.golden.losses[2]
    moved = replace(trial.golden, losses=(*trial.golden.losses[:2], loss * (1 + 1e-8)))
    assert findings("golden", replace(trial, golden=moved)) == (
        like(
            (),
            moved.losses[2],
            loss,
            step=3,
            bound=Bound(bounds_of(trial).loss[3]),
            quantity="loss",
            note="expected: the golden, observed: the reference",
        ),
    )


def test_a_golden_of_another_number_of_steps_is_named() -> None:
    trial = trial_of(tiny_case("single"))
    longer = replace(trial.golden, losses=(*trial.golden.losses, 1.0), grad_norms=(*trial.golden.grad_norms, 1.0))
    assert findings("golden", replace(trial, golden=longer)) == (like((), 4, 3, quantity="number of steps"),)


def test_a_golden_that_is_no_number_never_passes() -> None:
    trial = trial_of(tiny_case("single"))
    nothing = replace(trial.golden, grad_norms=(float("nan"),) * 3)
    assert [where(finding) for finding in findings("golden", replace(trial, golden=nothing))] == [
        (1, "gradient norm"),
        (2, "gradient norm"),
        (3, "gradient norm"),
    ]


def test_a_missing_golden_is_unknown_with_the_remedy() -> None:
    result = judged("golden", replace(trial_of(tiny_case("single")), golden=None, golden_problem="make one"))
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "make one")


def test_a_case_of_no_file_has_no_golden() -> None:
    result = judged("golden", trial_of(tiny_case("single", file="")))
    note = "the case is in no file (it was given another seed or dtype), so it has no golden"
    assert (result.verdict, result.note) == (Verdict.NOT_APPLICABLE, note)


# ---- the measured tier: any case that is not float64 throughout


QUIET = noise_of(tiny_case("single"))
MEASURED = ("grad_norm", "gradients", "loss", "reported_loss")


def inexact(noise: dict[str, Noise]) -> Trial:
    trial = trial_of(tiny_case("fsdp_2", reduce_dtype="bfloat16"))
    assert trial.golden is not None
    return replace(trial, golden=replace(trial.golden, noise=noise))


@pytest.mark.parametrize("check", [*MEASURED, "golden"])
def test_without_measured_noise_a_check_is_unknown_and_says_how_to_measure_it(check: str) -> None:
    result = judged(check, inexact({}))
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        "no bound: the noise of this recipe's reference was never measured;"
        " `harness golden --accept -k tiny` measures it",
    )


@pytest.mark.parametrize("check", MEASURED)
def test_with_measured_noise_a_correct_run_passes(check: str) -> None:
    assert judged(check, inexact({"bfloat16 shares": QUIET})).verdict is Verdict.PASS


def test_the_golden_check_allows_for_kernels_that_sum_in_another_order() -> None:
    assert judged("golden", inexact({"bfloat16 parts": QUIET})).verdict is Verdict.PASS


def test_a_gradient_beyond_the_measured_bound_shows_where_the_bound_comes_from() -> None:
    trial = with_value(inexact({"bfloat16 shares": QUIET}), 1, 2, "gradients", WQ, lambda g: g * (1 + 1e-5))
    result = judged("gradients", trial)
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].bound == Bound(pytest.approx(4e-9), "4 x the spread of 16 repeats of the reference")


def test_the_rates_of_a_trainer_that_keeps_its_own_schedule_are_not_judged() -> None:
    usual = tiny_case("single")
    trial = trial_of(replace(usual, training=replace(usual.training, rates=(0.1, 0.2, 0.3))))
    result = judged("reported_rate", trial)
    assert result.verdict is Verdict.NOT_APPLICABLE
    assert "keeps its own schedule" in result.note


def test_a_trainer_that_reports_no_loss_is_not_judged_by_what_it_reports() -> None:
    trial = trial_of(tiny_case("single"))
    assert judged("reported_loss", with_rank(trial, 0, reports=())).verdict is Verdict.NOT_APPLICABLE
