"""Which ways to clip are proposed of updates that are wrong, as whole causes, and what each of them has assumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, broken, expect_first, proposed, trained_as
from literal import tiny_case, trained_otherwise, trial_of, with_every_rank, with_step
from literal_reference import clip

from harness.checks.update import observed_norm
from harness.diagnosis.algorithms import HALF
from harness.diagnosis.clipping import Clipping, _by_norms, wrong_clipping
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

Arrays = dict[str, np.ndarray]
NEVER = replace(LOW_CLIP, max_norm=None)


def causes(trial: Trial) -> list[tuple[Cause, int]]:
    return [(one.cause, one.fitted) for one in wrong_clipping(trial, broken("update"))]


def by_another_norm(whose: str, seen: str) -> Cause:
    text = f"each rank clips by {whose}, not by the global norm: {seen} on rank 0, expected 1.62647"
    return Cause("clipped by another norm", text)


def test_what_is_not_clipped_at_all_may_be_clipped_by_what_is_small() -> None:
    """What is not clipped in the first step alone may be one of two mistakes."""
    assert causes(trained_as(NEVER, "ddp_2", LOW_CLIP)) == [
        (by_another_norm("the largest absolute entry (infinity norm)", "0.14995"), 1),
        (by_another_norm("the norm of the step before", "0"), 1 + HALF),
        (Cause("clipped by value", "gradients are clipped entry by entry, to 0.25, not by their norm"), 1),
        (Cause("clipped by value", "gradients are clipped entry by entry, to 1, not by their norm"), 1),
        (Cause("clipping left out", "gradients are not clipped (coefficient 0.1537)"), 0),
    ]
    assert causes(trained_as(NEVER, "fsdp_2_tp_2", replace(LOW_CLIP, max_norm=1.0))) == [
        (by_another_norm("the norm of its own shards (not summed over dp_shard and tp)", "0.83324"), 1),
        (by_another_norm("the largest absolute entry (infinity norm)", "0.14995"), 1),
        (by_another_norm("the norm of norm weights only", "0.372231"), 1),
        (by_another_norm("a norm without matrices", "0.372231"), 1),
        (by_another_norm("the norm of embedding and output only", "0.828383"), 1),
        (by_another_norm("the norm of the step before", "0"), 1 + HALF),
        (Cause("clipped by another norm", "each parameter is clipped by its own norm"), 1),
        (Cause("clipped by value", "gradients are clipped entry by entry, to 1, not by their norm"), 1),
        (Cause("clipping left out", "gradients are not clipped (coefficient 0.6148)"), 0),
    ]


ENLARGED = "clipping enlarges gradients{}: it multiplies by {} although the norm {} is below max_norm {}"


@pytest.mark.parametrize(
    ("limit", "by", "cause"),
    [
        (100.0, lambda norm: 100 / (norm + 1e-6), ENLARGED.format("", "61.48", "1.626", "100")),
        (1.6, lambda norm: 1.6 / (norm + 1e-6), ENLARGED.format(" in step 2", "1.003", "1.595", "1.6")),
    ],
)
def test_clipping_that_enlarges_is_told_of_the_first_step_that_is_below(
    limit: float, by: Callable[[float], float], cause: str
) -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: by(norm) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", replace(LOW_CLIP, max_norm=limit))), given=given)
    wanted = Cause("clipping enlarges gradients", cause)
    assert [one for one in causes(trial) if one[1] == 1] == [(wanted, 1)]


PLAIN = Cause(
    "clipped without 1e-6", "clipping multiplies by max_norm / norm", "", "max_norm / (norm + 1e-6), as torch does"
)


@pytest.mark.parametrize("limit", [0.25, 1.6])
def test_clipping_without_the_millionth_that_torch_adds_is_told(limit: float) -> None:
    recipe = replace(LOW_CLIP, max_norm=limit)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: min(1.0, limit / norm) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", recipe)), given=given)
    assert causes(trial) == [(PLAIN, 1)]
    expect_first(trial, cause_line(PLAIN))


def test_where_the_gradients_of_a_step_are_zero_all_ways_to_clip_are_tried() -> None:
    def gradients(step: int, own: Arrays) -> Arrays:
        return {fqn: 0.0 * gradient for fqn, gradient in own.items()} if step == 1 else own

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(math.sqrt(float(np.sum(g * g))), LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("ddp_2", LOW_CLIP)), gradients=gradients, given=given)
    assert (Cause("clipped by another norm", "each parameter is clipped by its own norm"), 1) in causes(trial)


@pytest.mark.parametrize(("silent", "is_told"), [((0, 1), False), ((1,), False), ((), True)])
def test_a_norm_that_ranks_do_not_report_is_none_that_they_clip_by(silent: tuple[int, ...], is_told: bool) -> None:
    def reporting(trial: Trial, rank: int) -> Trial:
        for step in trial.case.steps:
            trial = with_step(trial, rank, step, grad_norm=None if rank in silent else 0.0)
        return trial

    told = "each rank clips by the norm it reports, not by the global norm: 0 on rank 0, expected 1.62647"
    trial = with_every_rank(trained_as(NEVER, "ddp_2", LOW_CLIP), reporting)
    assert (told in proposed(wrong_clipping, trial, "update")) == is_told


def by_norms(trial: Trial) -> dict[str, Cause]:
    """By the beginning of what is said of each."""
    norms, limit = {step: observed_norm(trial, step) for step in trial.case.steps}, LOW_CLIP.max_norm
    assert limit is not None
    return {cause_line(way.cause).split(",")[0]: way.cause for way in _by_norms(trial, norms, limit)}


def test_replicas_whose_gradients_differ_each_clip_rightly_by_their_own_norm() -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP))
    seen = {fqn: g for fqn, g in trial.ranks[1].steps[1].gradients.items() if fqn != NORM}
    trial = with_step(
        trial, 1, 2, gradients=seen, grad_norm=observed_norm(with_step(trial, 1, 2, gradients=seen), 2, [1])
    )
    assert not any("its own gradients" in text or "it reports" in text for text in by_norms(trial))


def test_a_norm_that_one_rank_alone_clips_by_is_told_of_that_rank() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    (told,) = (text for text in by_norms(with_step(trial, 1, 2, grad_norm=7.0)) if "it reports" in text)
    assert told == "rank 1 clips by the norm it reports"


def test_some_parameters_that_are_not_clipped_are_told_with_the_norm_of_the_others() -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: g if fqn == NORM else clip(norm, LOW_CLIP) * g for fqn, g in gradients.items()}

    text = "clipping is not applied to 1 of 12 parameters (norm.weight) (coefficient 0.1537)"
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    assert causes(trial) == [(Cause("clipping left out", text), 1)]
    expect_first(trial, text)


# ---- what is assumed


def test_gradients_are_assumed_to_be_given_as_each_rank_has_multiplied_its_part() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    way = Clipping(Cause("clipping left out", "-"), lambda rank, step, fqn: 10 * step + rank + (fqn == NORM) / 2)
    gradients = {**trial.reference.steps[1].gradients, "nobody's": np.ones(3)}
    for ranks, first, second in (((0, 1), 20.0, 21.0), ((1,), 1.0, 21.0)):
        given = way._whole(trial, ranks)(2, gradients, 1.6, None)
        assert given.keys() == gradients.keys() and given["nobody's"].tolist() == [1.0] * 3
        for fqn, gradient in trial.reference.steps[1].gradients.items():
            half, more = len(gradient) // 2, (fqn == NORM) / 2
            factors = first + more * (first > 1), second + more
            np.testing.assert_array_equal(given[fqn][:half], factors[0] * gradient[:half])
            np.testing.assert_array_equal(given[fqn][half:], factors[1] * gradient[half:])
    assert way.given(1, 3, NORM, np.array([2.0])).tolist() == [63.0]


@pytest.mark.parametrize(("off", "reports"), [(0.0, True), (5e-7, True), (5e-6, False), (None, True)])
def test_a_norm_that_ranks_report_is_assumed_where_they_all_report_it(off: float | None, reports: bool) -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP))
    for step in trial.case.steps:
        trial = with_step(trial, 0, step, grad_norm=10.0 * step)
        trial = with_step(trial, 1, step, grad_norm=None if off is None else (10.0 * step + 1) * (1 + off))
    norm = lambda rank, step: 10.0 * step + rank  # noqa: E731
    by: Callable[[int, int, str], float] = lambda rank, step, fqn: 0.5  # noqa: E731
    cause = Cause("clipped by another norm", "-")
    assumed = Clipping(cause, by, norm).assume(trial)
    assert assumed.assumption.reports == ({"grad_norm": norm} if reports else {})
    assert Clipping(cause, by).assume(trial).assumption.reports == {}
    assert not assumed.assumption.references and assumed.assumption.optimizer.given is not None
    assert assumed.assumption.optimizer.given(0, 1, NORM, np.array([3.0])).tolist() == [1.5]


@pytest.mark.parametrize(
    ("by", "apart"),
    [
        (lambda rank, step, fqn: 0.5, False),
        (lambda rank, step, fqn: np.full(1, 0.5), False),
        (lambda rank, step, fqn: 0.5 + rank, True),
        (lambda rank, step, fqn: 0.5 + rank * (step == 3), True),
        (lambda rank, step, fqn: 0.5 + rank * (fqn == NORM), True),
    ],
)
def test_replicas_that_multiply_by_something_else_are_assumed_to_train_apart(
    by: Callable[[int, int, str], float], apart: bool
) -> None:
    assumed = Clipping(Cause("clipped by another norm", "-"), by).assume(trial_of(tiny_case("ddp_2", LOW_CLIP)))
    assert [*assumed.assumption.references] == [0, 1] * apart
