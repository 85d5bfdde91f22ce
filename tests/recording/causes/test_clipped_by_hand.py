"""Gradients that one recording shows before clipping, and the other after it: what reaches the optimizer is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal_numbers import STEPS, first_cause, numbers, sums_of

from harness.core.judge.result import Verdict
from harness.recording.judged.judge_same_training import compare_numbers
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.judged.same_training import undo_clipping
from harness.recording.sketches import GRADIENT

AVERAGED = "AdamW(betas (0.9, 0.95))"


def clipped(by: float, *, seen_after: bool = False, gradient: float = 1.0) -> Numbers:
    """AdamW that receives gradients multiplied by a number. Torch's function did it where they are seen before."""

    def change(step: int, kind: str, fqn: str, sums: object) -> object:
        if kind == GRADIENT:
            return sums_of(step, kind, fqn) * gradient * (by if seen_after else 1.0)
        return 0.1 * gradient * by * sums_of(1, GRADIENT, fqn) if (step, kind) == (1, "exp_avg") else sums

    norms = {} if seen_after else {step: {0: 1.0} for step in STEPS}
    return replace(numbers(change, optimizers=(AVERAGED,)), norms=norms)  # type: ignore[arg-type]


def verdicts(one: Numbers, other: Numbers) -> dict[str, Verdict]:
    return {result.check: result.verdict for result in compare_numbers(one, undo_clipping(one, other)).results}


@pytest.mark.parametrize("by_hand", [(False, True), (True, False), (True, True)])
def test_clipping_by_hand_and_by_torch_are_the_same_training(by_hand: tuple[bool, bool]) -> None:
    one, other = (clipped(0.4, seen_after=after) for after in by_hand)
    found = verdicts(one, other)
    assert [found[check] for check in ("gradients", "optimizer_state", "update")] == [Verdict.PASS] * 3


def test_another_factor_of_clipping_by_hand_is_what_reaches_the_optimizer() -> None:
    one, other = clipped(0.4), clipped(0.3, seen_after=True)
    found = undo_clipping(one, other)
    cause = first_cause(one, found)
    assert cause is not None
    details = dict(cause.details)
    assert (cause.kind, details["expected"]) == ("clipped by another norm", pytest.approx(0.4))
    assert details["factors"] == pytest.approx((0.3,) * 4)


def test_where_the_first_clips_by_hand_its_factor_is_not_known() -> None:
    one, other = clipped(0.4, seen_after=True), clipped(0.3)
    found = undo_clipping(one, other)
    cause = first_cause(one, found)
    assert cause is not None and (cause.kind, cause.explains[0]) == ("not explained", "optimizer_state")


@pytest.mark.parametrize("gradient", [0.5, 2.0])
def test_gradients_that_both_show_before_clipping_are_compared_as_they_are(gradient: float) -> None:
    assert verdicts(clipped(0.4), clipped(0.4, gradient=gradient))["gradients"] is Verdict.FAIL


def test_clipping_enlarges_no_gradient() -> None:
    assert verdicts(clipped(0.4), clipped(2.0, seen_after=True))["gradients"] is Verdict.FAIL
