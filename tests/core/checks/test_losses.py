"""The checks of losses and of what a rank reports: loss, reported_loss, reported_rate, grad_norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from checked import bounds_of, findings, like, where, with_loss
from literal import (
    judged,
    tiny_case,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
)

from harness.core.judge.finding import Bound, Limit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

# ---- loss, reported_loss, grad_norm


def test_a_local_loss_off_by_1e_8_in_the_last_step_of_the_last_rank_is_found() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expected = trial.reference.steps[2].loss
    (finding,) = findings("loss", with_loss(trial, 1, 3, lambda loss: loss * (1 + 1e-8)))
    assert (finding.ranks, finding.step, finding.expected) == ((), 3, expected)
    assert finding.bound == Bound(bounds_of(trial).loss[3])
    (part,), (other,) = (trial.ranks[rank].steps[2].microbatches for rank in (1, 0))
    share = part.loss_sum / (part.loss_sum + other.loss_sum)
    assert finding.observed / expected - 1 == pytest.approx(1e-8 * share, rel=1e-3)


def test_a_loss_rounded_to_float32_is_found() -> None:
    trial = with_loss(trial_of(tiny_case("single")), 0, 1, lambda loss: float(np.float32(loss)))
    assert [where(finding) for finding in findings("loss", trial)] == [(1, "loss")]


def test_a_loss_that_is_not_a_number_is_found() -> None:
    trial = trial_of(tiny_case("single"))
    (finding,) = findings("loss", with_loss(trial, 0, 2, lambda _: float("nan")))
    assert where(finding) == (2, "loss") and np.isnan(finding.observed)


def test_a_tp_peer_that_computed_another_loss_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    (received,) = trial.ranks[2].steps[2].microbatches
    assert findings("loss", with_loss(trial, 3, 3, lambda loss: 2 * loss)) == (
        like(
            3,
            received.loss_sum,
            2 * received.loss_sum,
            step=3,
            bound=Bound(bounds_of(trial).loss[3]),
            note="expected: tp peer 2's, same tokens",
            quantity="loss",
        ),
    )


def test_losses_that_nobody_saw_are_unknown() -> None:
    trial = with_every_rank(trial_of(tiny_case("fsdp_2")), lambda t, rank: with_loss(t, rank, 2, lambda _: None))
    result = judged("loss", trial)
    call = 'harness.adapter.note_loss(labels, loss, reduction="sum")'
    remedy = f"let the adapter of llama3 call `{call}` where it is computed"
    assert result.verdict is Verdict.UNKNOWN
    assert result.note.startswith(f"step 2: no rank's loss was seen; {remedy}, if not by torch's cross_entropy")


@pytest.mark.parametrize(("check", "field"), [("reported_loss", "reported_loss"), ("grad_norm", "grad_norm")])
class TestWhatIsDisplayed:
    def shown(self, trial, rank, step, field, value):
        return with_step(trial, rank, step, **{field: value})

    def test_a_curve_shifted_by_one_step_is_found_in_every_step(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        curve = [getattr(step, field) for step in trial.ranks[0].steps]
        for step, value in zip((1, 2, 3), (*curve[1:], curve[-1]), strict=True):
            trial = self.shown(trial, 0, step, field, value)
        assert [(finding.rank, finding.step) for finding in findings(check, trial)] == [(0, 1), (0, 2)]

    def test_only_the_last_rank_wrong_in_only_the_last_step_is_found(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("hsdp_2x2"))
        value = getattr(trial.ranks[3].steps[2], field)
        broken = self.shown(trial, 3, 3, field, value * (1 + 1e-8))
        (finding,) = findings(check, broken)
        assert (finding.rank, finding.step, finding.expected) == (3, 3, value)

    def test_a_value_rounded_to_float32_is_found(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        value = float(np.float32(getattr(trial.ranks[0].steps[0], field)))
        assert len(findings(check, self.shown(trial, 0, 1, field, value))) == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
    def test_what_is_no_number_is_found(self, check: str, field: str, value: float) -> None:
        (finding,) = findings(check, self.shown(trial_of(tiny_case("single")), 0, 3, field, value))
        assert repr(finding.observed) == repr(value)

    def test_a_rank_that_displays_nothing_claims_nothing(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("fsdp_2"))
        for step in (1, 2, 3):
            trial = self.shown(trial, 1, step, field, None)
        assert (judged(check, trial).verdict, judged(check, trial).examined) == (Verdict.PASS, 3)

    def test_a_rank_that_displays_some_steps_and_not_others_is_found(self, check: str, field: str) -> None:
        trial = self.shown(trial_of(tiny_case("fsdp_2")), 1, 2, field, None)
        (finding,) = findings(check, trial)
        assert (finding.rank, finding.step, finding.observed) == (1, 2, None)

    def test_a_trainer_that_displays_every_second_step_owes_no_others(self, check: str, field: str) -> None:
        trial = with_every_rank(trial_of(tiny_case("fsdp_2")), lambda t, rank: with_rank(t, rank, reports_every=2))
        for rank, step in ((0, 1), (0, 3), (1, 3)):
            trial = self.shown(trial, rank, step, field, None)
        assert (judged(check, trial).verdict, judged(check, trial).examined) == (Verdict.PASS, 3)
        (finding,) = findings(check, self.shown(trial, 1, 2, field, None))
        assert (finding.rank, finding.step, finding.observed) == (1, 2, None)

    def test_a_trainer_that_displays_after_the_last_step_only_claims_nothing_here(self, check: str, field: str) -> None:
        trial = with_rank(trial_of(tiny_case("single")), 0, reports_every=10)
        for step in (1, 2, 3):
            trial = self.shown(trial, 0, step, field, None)
        assert judged(check, trial).verdict is Verdict.NOT_APPLICABLE
        assert judged(check, trial).note == "this trainer reports every 10 steps, and steps 1 to 3 have none"

    def test_if_no_rank_displays_anything_nothing_is_known(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        for step in (1, 2, 3):
            trial = self.shown(trial, 0, step, field, None)
        assert judged(check, trial).verdict is Verdict.UNKNOWN


def with_rates(rate: Callable[[float, float], float | None]) -> Trial:
    """rate: what is reported, of the optimizer's rate of this step and of the next."""
    trial = trial_of(tiny_case("fsdp_2"))
    rates = [step.lr for step in trial.reference.steps]
    for rank in trial.ranks:
        for step, (now, after) in enumerate(zip(rates, (*rates[1:], 0.0), strict=True), start=1):
            trial = with_step(trial, rank, step, reported_lr=rate(now, after))
    return trial


def test_a_rate_displayed_in_float32_is_right_and_one_of_the_next_step_is_not() -> None:
    assert judged("reported_rate", with_rates(lambda now, after: float(np.float32(now)))).verdict is Verdict.PASS
    broken = findings("reported_rate", with_rates(lambda now, after: after))
    assert [(finding.rank, finding.step) for finding in broken] == [(rank, n) for rank in (0, 1) for n in (1, 2, 3)]


def test_a_displayed_rate_that_is_the_recipes_and_not_the_optimizers_is_found() -> None:
    trial = with_step(with_rates(lambda now, after: now), 1, 2, lr=0.5)
    (finding,) = findings("reported_rate", trial)
    assert (finding.rank, finding.step, finding.note) == (1, 2, "the optimizer took 0.5")


def test_a_rate_that_is_no_number_is_found_and_one_that_nobody_displays_is_not_judged() -> None:
    assert len(findings("reported_rate", with_rates(lambda now, after: float("nan")))) == 6
    assert judged("reported_rate", with_rates(lambda now, after: None)).verdict is Verdict.NOT_APPLICABLE
    promised = with_every_rank(
        with_rates(lambda now, after: None), lambda t, rank: with_rank(t, rank, reports=("loss", "lr"))
    )
    assert judged("reported_rate", promised).verdict is Verdict.UNKNOWN


def test_a_norm_twice_too_large_shows_its_ratio() -> None:
    trial = trial_of(tiny_case("single"))
    norm = trial.reference.steps[0].grad_norm
    assert findings("grad_norm", with_step(trial, 0, 1, grad_norm=2 * norm)) == (
        like(
            0,
            norm,
            2 * norm,
            step=1,
            bound=Bound(bounds_of(trial).gradient[1]),
            note="ratio 2",
            quantity="gradient norm",
        ),
    )


# ---- replica_agreement


def test_a_tp_peer_that_computes_fewer_losses_is_found() -> None:
    trial = trial_of(tiny_case("tp_2"))
    (microbatch,) = trial.ranks[1].steps[1].microbatches
    silent = replace(microbatch, labels=None, loss_sum=None, valid_tokens=None)
    assert findings("loss", with_step(trial, 1, 2, microbatches=(silent,))) == (
        like(1, 1, 0, step=2, unit="losses", note="expected: tp peer 0's, same tokens", quantity="loss"),
    )


def test_a_largest_loss_below_the_mean_is_found_and_one_above_it_is_not() -> None:
    trial = with_step(trial_of(tiny_case("fsdp_2")), 0, 1, reported_largest=9.0)
    assert judged("reported_loss", trial).verdict is Verdict.PASS
    (finding,) = findings("reported_loss", with_step(trial, 1, 2, reported_largest=0.5))
    assert (finding.rank, finding.step, finding.observed) == (1, 2, 0.5)
    assert finding.expected == Limit(least=trial.ranks[1].steps[1].reported_loss)
    (finding,) = findings("reported_loss", with_step(trial, 1, 2, reported_largest=float("nan")))
    assert np.isnan(finding.observed)
