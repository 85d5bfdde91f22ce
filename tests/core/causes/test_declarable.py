"""Gradients that a trainer reduces by itself: what its adapter has to write."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import broken, dims
from literal import judged, tiny_case, trial_of, with_collectives, with_every_rank, with_rank

from harness.core.causes import diagnose
from harness.core.causes.declarable import REDUCE_IN_BACKWARD, adapter_lines
from harness.core.checks import judge
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import evidence_rows

CLAIM = (
    'if it needs no wrapper: `harness.adapter.note_wrapper(model, "{}", replicate_ranks=..)`, the rank\'s group over '
    "dp_replicate, of rank 0 [0,1]"
)


def averaged_by_hand(wrapper: str, *, wrapped: bool, behind: bool) -> Trial:
    trial = trial_of(tiny_case("ddp_2", wrapper=wrapper))
    for rank, evidence in trial.ranks.items():
        trial = with_rank(trial, rank, structure=evidence.structure if wrapped else {})
        if behind:
            trial = with_collectives(
                trial, rank, lambda call: [replace(call, phase="other") if call.phase == "backward" else call]
            )
    return trial


@pytest.mark.slow("many of a kind; the first run in the same way", after=2)
@pytest.mark.parametrize("wrapper", ["ddp", "replicate"])
@pytest.mark.parametrize(
    ("wrapped", "behind", "lines"),
    [
        (False, True, [REDUCE_IN_BACKWARD, CLAIM]),
        (True, True, [REDUCE_IN_BACKWARD]),
        (False, False, [CLAIM]),
    ],
)
def test_gradients_that_are_averaged_by_hand_are_answered_with_the_calls_that_lack(
    wrapped: bool, behind: bool, lines: list[str], wrapper: str
) -> None:
    trial = averaged_by_hand(wrapper, wrapped=wrapped, behind=behind)
    found = diagnose(trial, judge(trial))
    assert found is not None
    assert [text for label, text in evidence_rows(found.evidence) if label == "adapter"] == [
        line.format(wrapper) for line in lines
    ]


def adapters(trial: Trial) -> list[str]:
    return [text for _, text in adapter_lines(trial, broken("features", "traffic"))]


def test_gradients_that_are_reduced_in_backward_already_are_not_told_to_be_behind_it_if_they_are_there_again() -> None:
    trial = averaged_by_hand("ddp", wrapped=False, behind=False)
    for rank in trial.ranks:
        trial = with_collectives(trial, rank, lambda call: [call, replace(call, phase="other")])
    assert adapters(trial) == [CLAIM.format("ddp")]


def test_the_group_of_the_claim_is_that_of_the_first_rank() -> None:
    trial = trial_of(tiny_case(dims(replicate=2, tp=2), wrapper="replicate"))
    (line,) = adapters(with_every_rank(trial, lambda t, rank: with_rank(t, rank, structure={})))
    assert line.endswith("the rank's group over dp_replicate, of rank 0 [0,2]")


@pytest.mark.parametrize("wrapped", [True, False])
def test_gradients_that_nobody_averages_are_not_answered_with_a_call(wrapped: bool) -> None:
    trial = averaged_by_hand("ddp", wrapped=wrapped, behind=False)
    for rank in trial.ranks:
        trial = with_collectives(trial, rank, lambda call: [] if call.phase == "backward" else [call])
    assert judged("traffic", trial).verdict is Verdict.FAIL
    found = diagnose(trial, judge(trial))
    assert found is not None and not any(label == "adapter" for label, _ in found.evidence)
