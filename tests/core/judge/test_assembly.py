"""Whole gradients put together from slices, and what the check states of one that is off by less than the noise of an entry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import like
from literal import ADAMW, judged, tiny_case, trial_of, with_step, with_value
from noisy import with_noise

from harness.core.case.dims import ParallelDims
from harness.core.judge.assembly import gradient_misfits
from harness.core.judge.finding import Bound
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.reference.distance import best_fitting_factor, relative_distance

NORM, WQ = "norm.weight", "layers.0.attention.wq.weight"
LOUD = {"loss": 1e-4, "grad_norm": 1e-2, "gradient": 0.1, "distance": 1e-3, "fit": 1e-3}


def loud(layout: str | ParallelDims = "fsdp_2", **features: object) -> Trial:
    """Judged by bounds of 40 % of the largest entry, 0.2 % of a length in step 1 and then 0.4 %, and 0.5 % of a factor."""
    return with_noise(trial_of(tiny_case(layout, ADAMW, **features)), **LOUD)


def scaled(trial: Trial, fqn: str, factor: float, *, step: int = 1) -> Trial:
    for rank in trial.ranks:
        trial = with_value(trial, rank, step, "gradients", fqn, lambda g: g * factor)
    return trial


def test_a_distance_is_that_of_lengths_and_a_fit_is_the_nearest_multiple() -> None:
    expected = np.array([3.0, 4.0], dtype=np.float32)
    assert relative_distance(np.array([3.0, 5.0]), expected) == 0.2
    assert best_fitting_factor(2 * expected, expected) == 2.0
    assert (
        best_fitting_factor(expected + np.array([4.0, -3.0]), expected) == 1.0
    )  # what is at right angles is no factor


def test_where_nothing_is_expected_only_nothing_is_near() -> None:
    nothing = np.zeros(2)
    assert (relative_distance(nothing, nothing), best_fitting_factor(nothing, nothing)) == (0.0, 1.0)
    assert relative_distance(np.array([0.0, 1e-300]), nothing) == np.inf


@pytest.mark.parametrize("layout", ["single", "ddp_2", "fsdp_2", "hsdp_2x2", "tp_2", "fsdp_2_tp_2"])
def test_every_rank_is_in_a_copy_of_each_parameter_and_a_correct_run_is_none_off(layout: str) -> None:
    trial = loud(layout)
    found, lacking = gradient_misfits(trial, 1)
    assert lacking == []
    for fqn in trial.plan.shapes:
        ranks = [rank for one in found if one.fqn == fqn for rank in one.ranks]
        assert set(ranks) == set(trial.ranks)
    assert all(one.is_within_bound and one.distance == 0 for one in found)
    assert judged("gradients", trial).verdict is Verdict.PASS


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_flat_slices_make_up_a_whole_as_well(wrapper: str) -> None:
    found, lacking = gradient_misfits(loud(wrapper=wrapper), 2)
    assert lacking == [] and len(found) == len(loud().plan.shapes)


def test_a_factor_that_no_entry_shows_is_found() -> None:
    trial = scaled(loud(), WQ, 1.02)
    assert judged("gradients", trial).findings == (
        like(
            (0, 1),
            "the reference's",
            1.02,
            step=1,
            name=WQ,
            bound=Bound(number=0.005, how="5 x the spread of 16 repeats of the reference"),
            quantity="gradient",
            unit="times the reference by best fit",
        ),
    )


def test_after_the_optimizer_has_acted_a_distance_may_be_twice_as_large() -> None:
    trial = loud()
    for step in (1, 2):
        at_angle = scaled(trial, NORM, 1.003, step=step)
        assert judged("gradients", at_angle).verdict is (Verdict.FAIL if step == 1 else Verdict.PASS)


def test_noise_that_is_not_known_of_each_parameter_is_unknown_with_the_remedy() -> None:
    trial = loud()
    assert trial.golden is not None
    (key,) = trial.golden.noise
    old = replace(trial.golden.noise[key], distance={}, fit={})
    result = judged("gradients", replace(trial, golden=replace(trial.golden, noise={key: old})))
    assert result.verdict is Verdict.UNKNOWN
    assert result.note == (
        "no bound: the noise of each parameter's gradient was never measured; `harness golden --accept -k tiny` measures it"
    )
    assert judged("loss", replace(trial, golden=replace(trial.golden, noise={key: old}))).verdict is Verdict.PASS


def test_slices_that_do_not_make_up_the_whole_are_unknown() -> None:
    trial = loud()
    gradients = {fqn: g for fqn, g in trial.ranks[1].steps[1].gradients.items() if fqn != WQ}
    result = judged("gradients", with_step(trial, 1, 2, gradients=gradients))
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        f"step 2, {WQ}: the slices that ranks hold do not make up one whole gradient",
    )


def test_a_gradient_that_is_no_number_is_no_small_misfit() -> None:
    trial = scaled(loud(), WQ, np.nan)
    (wrong,) = (one for one in gradient_misfits(trial, 1)[0] if not one.is_within_bound)
    assert (wrong.fqn, wrong.is_only_scaled) == (WQ, False)
    assert judged("gradients", trial).verdict is Verdict.FAIL
