"""What a display shows instead of the right number, when that is a number of other steps. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from diagnosed import dims
from literal import judged, tiny_case, trial_of, with_step

from harness.diagnosis.reports import wrong_reports
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

FSDP_4 = trial_of(tiny_case(dims(shard=4)))
HSDP_8 = trial_of(tiny_case(dims(2, 4)))


def shown(trial: Trial, what: str, value: Callable[[int], float | None]) -> Trial:
    """What every rank reports in each step; None: the right number."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            if (number := value(step.step)) is not None:
                trial = with_step(trial, rank, step.step, **{what: number})
    return trial


def told(trial: Trial, check: str) -> list[str]:
    """What follows "each rank reports", or what is said of it otherwise."""
    found = wrong_reports(trial, {check: judged(check, trial)})
    return [cause_line(one.cause).rpartition(": ")[2].removeprefix("each rank reports ") for one in found]


def right(trial: Trial, what: str) -> dict[int, float]:
    return {step.step: getattr(step, what) for step in trial.reference.steps}


@pytest.mark.parametrize(
    ("check", "what", "of"), [("reported_loss", "reported_loss", "loss"), ("grad_norm", "grad_norm", "grad_norm")]
)
@pytest.mark.parametrize(("by", "text"), [(-1, "that of the step before"), (1, "that of the next step")])
def test_a_number_of_a_neighbouring_step(check: str, what: str, of: str, by: int, text: str) -> None:
    numbers = right(FSDP_4, of)
    assert told(shown(FSDP_4, what, lambda step: numbers.get(step + by)), check) == [text]
    assert "that of the" not in str(told(shown(FSDP_4, what, lambda step: numbers.get(step + 2 * by)), check))


@pytest.mark.parametrize("trial", [FSDP_4, HSDP_8], ids=["fsdp_4", "hsdp_2x4"])
@pytest.mark.parametrize("again", [1, 2, 4, 8])
def test_token_losses_that_are_never_set_back_with_how_often_the_earlier_total_is_counted(
    trial: Trial, again: int
) -> None:
    total, totals = 0.0, {}
    for step in trial.reference.steps:
        total = again * total + step.loss * step.valid_tokens
        totals[step.step] = total / step.valid_tokens
    times = f", the earlier total counted {again} times in each step" * (again > 1)
    known = {"fsdp_4": (1, 4), "hsdp_2x4": (1, 2, 4, 8)}["fsdp_4" if trial is FSDP_4 else "hsdp_2x4"]
    words = f"the token losses of all steps so far, divided by the tokens of this step{times}"
    assert told(shown(trial, "reported_loss", totals.get), "reported_loss") == [words] * (again in known)


def test_one_display_among_many_is_told_with_its_rank_and_step() -> None:
    numbers = right(FSDP_4, "grad_norm")
    odd = with_step(FSDP_4, 2, 1, grad_norm=numbers[2])
    assert told(odd, "grad_norm") == ["rank 2 reports that of the next step in step 1"]


def test_a_norm_is_compared_with_that_of_the_ranks_own_replica() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    for rank, by in ((0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0)):
        for step in trial.ranks[rank].steps:
            before = by * trial.reference.steps[max(step.step - 2, 0)].grad_norm
            gradients = {fqn: by * gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, grad_norm=before, gradients=gradients)
    assert told(trial, "grad_norm") == ["that of the step before"]
