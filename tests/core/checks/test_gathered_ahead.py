"""Parameters that are gathered by hand before a forward pass: how much of it that explains, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from literal import judged, tiny_case, trial_of, with_rank

from harness.core.checks.traffic import gathers_before_passes
from harness.core.evidence.records import Collective
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

GATHER = ("all_gather", "forward")


def moved_ahead(*, phase: str = "other", lost: bool = False, twice: bool = False, op: str = "all_gather") -> Trial:
    """In step 2 the first gather of forward comes before it, between the steps."""
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        calls = list[Collective]()
        moved = False
        for call in evidence.collectives:
            if not moved and call.step == 2 and (call.op, call.phase) == GATHER:
                ahead = replace(call, step=1, phase=phase, op=op)
                calls += [] if lost else [ahead]
                calls += [call] if twice else []
                moved = True
            else:
                calls.append(call)
        trial = with_rank(trial, rank, collectives=tuple(calls))
    return trial


def test_a_gather_between_steps_is_that_of_the_next_forward_pass():
    trial = moved_ahead()
    assert judged("traffic", trial).verdict is Verdict.PASS
    assert [len(gathers_before_passes(trial, 0, step)) for step in (1, 2, 3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"lost": True}, "forward"),
        ({"op": "broadcast"}, "forward"),
        ({"phase": "optimizer"}, "forward"),
    ],
)
def test_what_forward_lacks_or_what_comes_in_addition_is_found(changes, phase):
    trial = moved_ahead(**changes)
    findings = judged("traffic", trial).findings
    assert phase in {finding.phase for finding in findings}
    assert {finding.step for finding in findings} <= {1, 2}


def test_a_gather_that_forward_repeats_is_of_no_forward_pass():
    assert gathers_before_passes(moved_ahead(twice=True), 0, 2) == ()
