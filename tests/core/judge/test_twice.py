"""Where two runs of the same launch first differ. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from checked import WQ, with_loss
from literal import last_bit, tiny_case, trial_of, with_rank, with_step, with_value

from harness.core.judge.trial import Trial
from harness.core.judge.twice import PASSED_IN_BACKWARD, PASSED_IN_FORWARD, FirstDifference, find_first_difference

Change = Callable[[Trial], Trial]


def passing(trial: Trial, changed: dict[int, int], phase: str = "backward") -> Trial:
    """By rank, the place of the collective to which it passes something else."""
    for rank, evidence in trial.ranks.items():
        numbers = np.arange(len(evidence.collectives))
        calls = tuple(replace(call, phase=phase) if call.step else call for call in evidence.collectives)
        if rank in changed:
            numbers[[n for n, call in enumerate(calls) if call.step == 2][changed[rank] :]] += 1000
        trial = with_rank(trial, rank, passed=numbers, collectives=calls)
    return trial


def gradient(trial: Trial, rank: int = 1, step: int = 3) -> Trial:
    return with_value(trial, rank, step, "gradients", WQ, last_bit)


def loss(trial: Trial) -> Trial:
    return with_loss(trial, 0, 2, lambda value: np.nextafter(value, 9))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t, None),
        (gradient, FirstDifference(3, "gradients", (WQ,), (1,))),
        (lambda t: gradient(gradient(t, 0)), FirstDifference(3, "gradients", (WQ,), (0, 1))),
        (lambda t: loss(gradient(t)), FirstDifference(2, "losses", ("microbatch 0",), (0,))),
        (lambda t: loss(gradient(t, step=1)), FirstDifference(1, "gradients", (WQ,), (1,))),
        (
            lambda t: with_step(t, 1, 2, microbatches=()),
            FirstDifference(2, "samples", ("microbatches, whose number differs",), (1,)),
        ),
        (
            lambda t: with_step(t, 0, 2, grad_norm=9.0, reported_loss=9.0),
            FirstDifference(2, "gradient norm", ("as reported",), (0,)),
        ),
        (lambda t: with_step(t, 1, 2, reported_loss=9.0), FirstDifference(2, "reported loss", ("of the step",), (1,))),
        (
            lambda t: with_value(t, 0, 1, "parameters", WQ, last_bit),
            FirstDifference(1, "parameters after the step", (WQ,), (0,)),
        ),
    ],
)
def test_the_first_step_and_in_it_the_first_kind_of_number_is_told(
    change: Change, expected: FirstDifference | None
) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert find_first_difference(change(trial).run, trial.run) == expected


@pytest.mark.parametrize(
    ("changed", "phase", "before", "expected"),
    [
        ({1: 2}, "backward", gradient, (PASSED_IN_BACKWARD, (1,))),
        ({0: 3, 1: 2}, "backward", gradient, (PASSED_IN_BACKWARD, (1,))),
        ({0: 2, 1: 2}, "backward", gradient, (PASSED_IN_BACKWARD, (0, 1))),
        ({1: 2}, "backward", loss, ("losses", (0,))),
        ({1: 2}, "forward", loss, (PASSED_IN_FORWARD, (1,))),
    ],
)
def test_a_rank_is_told_that_passes_something_else_before_others_do(
    changed: dict[int, int], phase: str, before: Change, expected: tuple[str, tuple[int, ...]]
) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    found = find_first_difference(passing(before(trial), changed, phase).run, passing(trial, {}, phase).run)
    assert found is not None and (found.step, found.quantity, found.ranks) == (2, *expected)


def test_what_is_passed_is_not_compared_where_one_run_did_not_read_it_or_issued_other_collectives() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    usual, changed = passing(trial, {}), passing(trial, {1: 0})
    fewer = with_rank(changed, 1, collectives=changed.ranks[1].collectives[:-1])
    assert find_first_difference(changed.run, usual.run) is not None
    for other in (trial, fewer):
        assert find_first_difference(other.run, usual.run) is None
