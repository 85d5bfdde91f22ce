"""Gradients that are a multiple of the requested ones in recipes whose roundings make noise. Literal evidence, no ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diagnosed import NORM, with_factors
from literal import judged, tiny_case, trial_of, with_updates_that_follow, with_value
from noisy import with_noise

from harness.core.causes.assume import assume_reference
from harness.core.causes.contributions import sums_of_whole_gradients
from harness.core.causes.engine import explain, failing_checks
from harness.core.checks import judge
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.reference.counterfactual import Batch

WQ = "layers.0.attention.wq.weight"


def loud(layout: str = "fsdp_2", **sizes: float) -> Trial:
    """Judged by bounds of 40 % of the largest entry, 0.2 % of a length in step 1 and then 0.4 %, and 0.5 % of a factor."""
    usual = {"loss": 1e-4, "grad_norm": 1e-2, "gradient": 0.1, "distance": 1e-3, "fit": 1e-3}
    return with_noise(trial_of(tiny_case(layout)), **(usual | sizes))


def numbers(trial: Trial) -> list[Result]:
    """A literal run reduces in one dtype, whatever is requested: what is moved is not looked at."""
    return [result for result in judge(trial) if result.check not in ("features", "traffic")]


def in_noise(trial: Trial) -> list[dict[str, object]]:
    """The details of each cause that explains all."""
    found = explain(trial, numbers(trial), (sums_of_whole_gradients,), ())
    proven = [one for proof in found.proofs if proof.is_complete for one in proof.hypotheses]
    assert {one.cause.kind for one in proven} <= {"gradients scaled"}
    return [dict(one.cause.details) for one in proven]


@pytest.mark.parametrize(
    ("odd", "rest", "found"),
    [
        ({WQ: 1.02}, 1.0, {"factor": 1.02, "parameters": (WQ,)}),
        ({}, 0.98, {"factor": 0.98}),
        ({WQ: 1.02, NORM: 0.5}, 1.0, {"factors": (0.5, 1.02), "parameters": (WQ, NORM)}),
    ],
)
def test_factors_that_no_entry_shows_are_named(odd: dict[str, float], rest: float, found: dict[str, Any]) -> None:
    (details,) = in_noise(with_factors(loud(), lambda rank, step, fqn: odd.get(fqn, rest)))
    assert details.pop("steps") == (1, 2, 3) and details.pop("named") is not None and details.keys() == found.keys()
    assert {*details.pop("parameters", ())} == {*found.pop("parameters", ())}
    assert details == {key: pytest.approx(value, rel=1e-6) for key, value in found.items()}


def test_gradients_a_little_too_long_are_named_where_their_noise_hides_each() -> None:
    trial = with_factors(
        loud("ddp_2", grad_norm=1e-3, gradient=1e-2, distance=1e-2, fit=1e-2), lambda rank, step, fqn: 1.018
    )
    assert judged("gradients", trial).verdict is Verdict.PASS
    (details,) = in_noise(trial)
    assert details["factor"] == pytest.approx(1.018, rel=1e-6)


def test_one_replica_alone_roundings_and_noise_are_no_factor() -> None:
    alone = with_value(loud("hsdp_2x2"), 3, 1, "gradients", WQ, lambda g: g * 1.02)
    assert in_noise(with_updates_that_follow(alone)) == []
    trial, draw = loud(), np.random.default_rng(1)
    for rank in trial.ranks:
        trial = with_value(trial, rank, 1, "gradients", WQ, lambda g: g * (1 + 1e-2 * draw.choice([-1, 1], g.shape)))
    assert in_noise(with_updates_that_follow(trial)) == []


def test_of_many_parameters_not_each_has_its_own_factor() -> None:
    odd = dict(zip(loud().plan.shapes, (2.0, 3.0, 4.0, 5.0, 6.0), strict=False))
    for count, several in ((4, True), (5, False)):
        some = dict(list(odd.items())[:count])
        trial = with_factors(loud(), lambda rank, step, fqn, some=some: some.get(fqn, 1.0))
        found = sums_of_whole_gradients(trial, failing_checks(numbers(trial)))
        assert any("factors" in dict(one.cause.details) for one in found) is several


@pytest.mark.parametrize("since", [1, 2])
def test_a_loss_that_is_scaled_before_backward_counts_each_token_so_often_from_that_step_on(since: int) -> None:
    labels = np.array([[1, 2], [3, 4]])
    wrong = with_factors(loud(), lambda rank, step, fqn: 2.001 if step >= since else 1.0)
    found = [one.assume for one in sums_of_whole_gradients(wrong, {"gradients": judged("gradients", wrong)})]
    (assumed,) = [one for one in found if "batch" in getattr(one, "keywords", {})]
    assert getattr(assumed, "func", None) is assume_reference
    batch: Any = getattr(assumed, "keywords", {})["batch"]
    counts = [batch(step, Batch(labels, labels)).counts for step in (1, 2, 3)]
    assert [set(one.ravel()) for one in counts] == [{2.0 if step >= since else 1.0} for step in (1, 2, 3)]
    halved = Batch(labels, labels, counts=np.full((2, 2), 0.5))
    assert set(batch(2, halved).counts.ravel()) == {1.0}
