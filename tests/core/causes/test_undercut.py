"""A proof that leaves a shallower failing check, and explains only what may follow from it, is none. Checks are declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from diagnosed import here

from harness.core.causes import undercut
from harness.core.causes.hypothesis import Hypothesis, Proof
from harness.core.causes.undercut import TABLE, is_undercut
from harness.core.checks import all_checks
from harness.core.judge.result import Cause, Result, Verdict

CLIPPED, WEIGHTS = "clipping left out", "unequal contributions"


@dataclass(frozen=True)
class Assumed:
    """In the place of a trial: by check, the first step in which it fails, None if that cannot be judged."""

    steps: Mapping[str, int | None]


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undercut, "judge_check", lambda assumed, check: failing(check, assumed.steps[check]))


def failing(check: str, step: int | None) -> Result:
    if step is None:
        return Result(check, Verdict.UNKNOWN, note="no bound")
    return Result(check, Verdict.FAIL, 1, (replace(here(check)[1], step=step),))


def proof(left: Mapping[str, int | None], explained: tuple[str, ...], kinds: tuple[str, ...] = (CLIPPED,)) -> Proof:
    """left: the checks that still fail, with the first step in which they do."""
    hypotheses = tuple(Hypothesis(Cause(kind, kind), None) for kind in kinds)
    assumed: Any = Assumed(left)
    return Proof(hypotheses, explained, (*left,), assumed)


RESULTS = [
    *(failing(name, 1) for name in ("traffic", "gradients", "update", "replica_agreement")),
    *(failing(name, 2) for name in ("grad_norm", "loss", "reported_loss", "samples")),
    Result("placements", Verdict.FAIL, 1, (replace(here("placements")[1], step=None),)),
    Result("golden", Verdict.FAIL, 1, (replace(here("golden")[1], step=None),)),
    Result("memory", Verdict.PASS, 1),
]


@pytest.mark.parametrize(
    ("left", "explained", "expected"),
    [
        # gradients stay wrong, and all that is explained is made of them
        ({"gradients": 1}, ("update",), True),
        ({"gradients": 1}, ("update", "replica_agreement", "grad_norm", "loss", "reported_loss", "golden"), True),
        ({"gradients": 1, "samples": 1}, ("update",), True),
        # they are explained as well, or something that is not made of them
        ({"samples": 1}, ("gradients", "update"), False),
        ({"gradients": 1}, ("update", "samples"), False),
        ({"gradients": 1}, ("traffic",), False),
        ({}, ("gradients", "update"), False),
        # nothing follows from what fails later
        ({"gradients": 2}, ("update",), False),
        ({"gradients": 2}, ("update", "grad_norm"), False),
        ({"gradients": 2}, ("grad_norm",), True),
        ({"gradients": 3}, ("grad_norm",), False),
        # of no step: it may follow in any
        ({"gradients": 3}, ("golden",), True),
        # what cannot be judged under the assumption fails where it did
        ({"gradients": None}, ("update",), True),
    ],
)
def test_a_proof_that_leaves_gradients_wrong_and_explains_only_what_follows_of_them_is_none(
    left: dict[str, int | None], explained: tuple[str, ...], expected: bool
) -> None:
    assert is_undercut(proof(left, explained), RESULTS) is expected


@pytest.mark.parametrize(
    ("kinds", "left", "explained", "expected"),
    [
        ((WEIGHTS,), {"traffic": 1}, ("gradients", "grad_norm"), True),
        ((CLIPPED, WEIGHTS), {"traffic": 1}, ("gradients", "grad_norm"), True),
        ((WEIGHTS,), {"placements": None}, ("gradients",), True),
        # one of the checks fails from the start, whatever else fails later
        ((WEIGHTS,), {"placements": None, "traffic": 3}, ("grad_norm",), True),
        ((CLIPPED,), {"traffic": 1}, ("gradients", "grad_norm"), False),
        ((WEIGHTS,), {"samples": 1}, ("gradients", "grad_norm"), False),
        ((WEIGHTS,), {"traffic": 2}, ("gradients", "grad_norm"), False),
        ((WEIGHTS,), {"traffic": 1}, ("gradients", "samples"), False),
    ],
)
def test_weights_of_samples_are_no_proof_where_groups_are_wrong(
    kinds: tuple[str, ...], left: dict[str, int | None], explained: tuple[str, ...], expected: bool
) -> None:
    assert is_undercut(proof(left, explained, kinds), RESULTS) is expected


def test_the_table_names_checks_and_gives_reasons() -> None:
    for row in TABLE:
        assert all_checks().keys() >= row.left | row.follows
        assert row.reason
