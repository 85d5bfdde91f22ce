"""What is said of checks that nothing explains: where, and what the parameters that are wrong have in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import broken
from literal import TINY, tiny_case, trial_of, with_parameter

from harness.diagnosis.localise import _forward, in_common, localise, one_group
from harness.report.cause_text import cause_line

TRIAL = trial_of(tiny_case("hsdp_2x2", model=replace(TINY, n_layers=2)))
NAMES = list(TRIAL.plan.shapes)


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        ("norm weights", lambda fqn: fqn.endswith("norm.weight")),
        ("matrices", lambda fqn: not fqn.endswith("norm.weight")),
        ("K/V projections", lambda fqn: ".wk." in fqn or ".wv." in fqn),
        ("weights of layers.1", lambda fqn: fqn.startswith("layers.1.")),
        ("weights of layers.0.feed_forward", lambda fqn: fqn.startswith("layers.0.feed_forward.")),
        ("attention.wo.weight of every layer", lambda fqn: fqn.endswith(".attention.wo.weight")),
        ("feed_forward weights of every layer", lambda fqn: ".feed_forward." in fqn),
        ("parameters before norm.weight", lambda fqn: NAMES.index(fqn) < NAMES.index("norm.weight")),
        (
            "parameters from layers.1.attention.wq.weight on",
            lambda fqn: NAMES.index(fqn) >= NAMES.index("layers.1.attention.wq.weight"),
        ),
    ],
)
def test_the_one_property_that_parameters_have_and_no_other_has_is_told(told: str, chosen) -> None:
    assert in_common(TRIAL, [fqn for fqn in NAMES if chosen(fqn)]) == f"; all {told} are wrong, no others"


def test_one_parameter_and_all_and_some_without_a_property_have_nothing_in_common() -> None:
    for fqns in (NAMES[:1], NAMES, [NAMES[0], NAMES[2]]):
        assert in_common(TRIAL, fqns) == ""


def test_ranks_that_are_a_group_of_the_plan_are_told_as_one() -> None:
    assert one_group(TRIAL, {0, 1}) == ", one group of dp_shard"
    assert one_group(TRIAL, {1, 3}) == ", one group of dp_replicate"
    assert one_group(TRIAL, {0, 3}) == one_group(TRIAL, {0, 1, 2, 3}) == ""


@pytest.mark.parametrize(
    ("held", "step", "told"),
    [
        ((), 1, "off; broken before the forward pass: initial_weights"),
        (("initial_weights",), 1, "the forward pass is wrong: off"),
        (("initial_weights",), 2, "the forward pass is right in step 1 and wrong in step 2: off"),
    ],
)
def test_the_forward_pass_is_blamed_where_no_check_before_it_is_broken(
    held: tuple[str, ...], step: int, told: str
) -> None:
    trial = with_parameter(TRIAL, 1, "norm.weight", value=np.full(2, 3.0))
    assert _forward(trial, "off", step, frozenset(held)) == told


def test_of_a_check_without_numbers_the_first_finding_is_told_and_which_others_are_broken() -> None:
    cause, lines = localise(TRIAL, broken("settings", "memory"), 1)
    assert (cause.kind, cause_line(cause)) == ("not explained", "settings: here: expected this, observed that")
    assert lines == (("tried", "1 hypothesis, none explains this"), ("also failing", "memory"))
    _, lines = localise(TRIAL, broken("settings"), 2, rest=True)
    assert lines == (("tried", "2 hypotheses, none explains the rest"),)
