"""Gradients that are a multiple of the requested ones in recipes whose roundings make noise. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import NORM, with_factors
from literal import (
    judged,
    tiny_case,
    trial_of,
    with_step,
    with_updates_that_follow,
    with_value,
)
from noisy import with_noise

from harness.checks import judge
from harness.diagnosis.assume import another_reference
from harness.diagnosis.engine import explain, failing_checks
from harness.diagnosis.localise import localise
from harness.diagnosis.scaled import scaled_gradients
from harness.judge.result import Result, Verdict
from harness.judge.trial import Trial
from harness.reference.counterfactual import Batch
from harness.report.cause_text import cause_line

WQ = "layers.0.attention.wq.weight"


def loud(layout: str = "fsdp_2") -> Trial:
    """Judged by bounds of 40 % of the largest entry, 0.2 % of a length in step 1 and then 0.4 %, and 0.5 % of a factor."""
    return with_noise(trial_of(tiny_case(layout)), loss=1e-4, grad_norm=1e-2, gradient=0.1, distance=1e-3, fit=1e-3)


def numbers(trial: Trial) -> list[Result]:
    """A literal run reduces in one dtype, whatever is requested: what is moved is not looked at."""
    return [result for result in judge(trial) if result.check not in ("features", "traffic")]


def in_noise(trial: Trial) -> list[str]:
    found = explain(trial, numbers(trial), (scaled_gradients,), ())
    return [cause_line(one.cause) for proof in found.proofs if proof.complete for one in proof.hypotheses]


def located(trial: Trial) -> str:
    assert in_noise(trial) == []
    return cause_line(localise(trial, failing_checks(numbers(trial)), 0)[0])


def test_a_factor_that_no_entry_shows_is_named() -> None:
    wrong = with_factors(loud(), lambda rank, step, fqn: 1.02 if fqn == WQ else 1.0)
    assert in_noise(wrong) == [f"gradients are 1.02 times what they should be in 1 of 12 parameters ({WQ})"]


def test_a_factor_of_all_parameters_is_one_factor() -> None:
    wrong = with_factors(loud(), lambda rank, step, fqn: 0.98)
    assert in_noise(wrong) == ["gradients are 0.98 times what they should be in every parameter"]


def test_two_factors_are_told_apart() -> None:
    wrong = with_factors(loud(), lambda rank, step, fqn: {WQ: 1.02, NORM: 0.5}.get(fqn, 1.0))
    assert [text.startswith("gradients are scaled by different factors in 2 of ") for text in in_noise(wrong)] == [True]


def test_gradients_a_little_too_long_are_told_where_their_noise_hides_each_entry() -> None:
    trial = with_noise(trial_of(tiny_case("ddp_2")), loss=1e-4, grad_norm=1e-3, gradient=1e-2, distance=1e-2, fit=1e-2)
    trial = with_factors(trial, lambda rank, step, fqn: 1.018)
    assert judged("gradients", trial).verdict is Verdict.PASS
    told = "the gradient norm is 1.02 times the reference's, though no entry is beyond its noise"
    assert in_noise(trial) == [told]


def test_one_replica_alone_that_is_off_is_located() -> None:
    trial = with_value(loud("hsdp_2x2"), 3, 1, "gradients", WQ, lambda g: g * 1.02)
    assert f"({WQ}), and no factor explains it" in located(with_updates_that_follow(trial))
    both = with_value(trial, 2, 1, "gradients", WQ, lambda g: g * 1.02)
    told = f"({WQ}): 1.02 times the reference's by best fit in {WQ} on ranks [2,3]; no single entry stands out"
    assert told in located(with_updates_that_follow(both))


def test_roundings_of_one_parameter_beyond_its_noise_are_located_and_no_factor_is_named() -> None:
    trial, draw = loud(), np.random.default_rng(1)
    for rank in trial.ranks:
        trial = with_value(trial, rank, 1, "gradients", WQ, lambda g: g * (1 + 1e-2 * draw.choice([-1, 1], g.shape)))
    told = f"gradients are off in 1 of 12 parameters ({WQ}), and no factor explains it: by 1.0e-02 of its norm in {WQ}"
    assert located(with_updates_that_follow(trial)).startswith(told)
    for rank in trial.ranks:
        part = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(part, loss_sum=1.01 * part.loss_sum),))
    assert located(with_updates_that_follow(trial)).startswith(f"the loss of step 1 is off by 1.0e-02, {told}")


@pytest.mark.parametrize(("own_model", "by", "told"), [(False, 1e-2, True), (True, 1e-2, False), (False, 0.3, False)])
def test_of_what_another_order_of_operations_may_leave_it_is_said_that_nobody_tested_it(
    own_model: bool, by: float, told: bool
) -> None:
    trial, draw = loud(), np.random.default_rng(1)
    noise = {
        key: trial.golden.noise[trial.case.noise_key] for key in (trial.case.noise_key, trial.case.golden_noise_key)
    }
    traits = replace(trial.traits, own_model=own_model)
    trial = replace(trial, plan=replace(trial.plan, traits=traits), golden=replace(trial.golden, noise=noise))
    for rank in trial.ranks:
        trial = with_value(trial, rank, 1, "gradients", WQ, lambda g: g * (1 + by * draw.choice([-1, 1], g.shape)))
    lines = dict(localise(trial, {"gradients": judged("gradients", trial)}, 0)[1])
    assert ("own_model in the adapter's `traits`" in lines.get("not tested", "")) is told


# ---- what is tried


def tried(trial: Trial) -> list[tuple[str, int]]:
    """Each hypothesis, with how many numbers were fitted for it; all show the same lines."""
    found = list(scaled_gradients(trial, {one.check: one for one in numbers(trial) if one.verdict is Verdict.FAIL}))
    assert len({one.lines for one in found}) == 1 and len(found[0].lines) in (2, 3)
    return [(cause_line(one.cause), one.fitted) for one in found]


def test_a_factor_of_everything_may_be_one_of_the_loss_and_is_no_number_of_the_case_where_noise_is_in_it() -> None:
    told = "gradients are 2 times what they should be in every parameter"
    rounded = f"{told}, and rounded otherwise: the loss is scaled before backward"
    assert tried(with_factors(loud(), lambda rank, step, fqn: 2.0)) == [
        (told, 1), (f"{told}, in step 1 alone", 2), (rounded, 2)
    ]  # fmt: skip


def test_of_few_parameters_each_may_have_its_own_factor() -> None:
    where = f"in 2 of 12 parameters ({WQ}, {NORM})"
    each = f"gradients are scaled by different factors {where}: 0.5 to 1.02 times"
    one = f"gradients are 0.76 times what they should be {where}"
    alone = ", in step 1 alone"
    assert tried(with_factors(loud(), lambda rank, step, fqn: {WQ: 1.02, NORM: 0.5}.get(fqn, 1.0))) == [
        (one, 1), (one + alone, 2), (each, 2), (each + alone, 3)
    ]  # fmt: skip
    odd = {WQ: 2.0, NORM: 3.0, "layers.0.attention.wk.weight": 4.0, "layers.0.attention.wv.weight": 5.0}
    most = with_factors(loud(), lambda rank, step, fqn: odd.get(fqn, 1.0))
    assert any("different factors in 4 of 12" in text for text, _ in tried(most))
    more = with_factors(loud(), lambda rank, step, fqn: (odd | {"output.weight": 6.0}).get(fqn, 1.0))
    assert not any("different factors" in text for text, _ in tried(more))


def test_the_gradients_that_are_furthest_off_are_shown() -> None:
    odd = {WQ: 1.02, NORM: 1.04, "output.weight": 1.03, "layers.0.attention.wk.weight": 1.05}
    trial = with_factors(loud(), lambda rank, step, fqn: odd.get(fqn, 1.0))
    (first, *_) = scaled_gradients(trial, {"gradients": judged("gradients", trial)})
    assert [text.partition(":")[0] for _, text in first.lines] == [
        "layers.0.attention.wk.weight",
        NORM,
        "output.weight",
    ]
    assert first.lines[1] == (
        "gradients",
        f"{NORM}: 1.04 times the reference's by best fit (bound 5.0e-03), off by 4.0e-02 of its norm (bound 2.0e-03)",
    )


def test_a_loss_that_is_scaled_before_backward_counts_each_token_so_often_from_that_step_on() -> None:
    labels = np.array([[1, 2], [3, 4]])
    for since in (1, 2):
        wrong = with_factors(loud(), lambda rank, step, fqn, since=since: 2.001 if step >= since else 1.0)
        *_, last = scaled_gradients(wrong, {"gradients": judged("gradients", wrong)})
        assert "rounded otherwise" in cause_line(last.cause)
        assumed: Any = last.assume
        assert assumed.func is another_reference
        counts = [assumed.keywords["batch"](step, Batch(labels, labels)).counts for step in (1, 2, 3)]
        assert [set(one.ravel()) for one in counts] == [{2.0 if step >= since else 1.0} for step in (1, 2, 3)]
        halved = Batch(labels, labels, counts=np.full((2, 2), 0.5))
        assert set(assumed.keywords["batch"](2, halved).counts.ravel()) == {1.0}
