"""The check memory on what lives on from step to step, and on copies of weights within a step; and how the probe sees them."""

from __future__ import annotations

import copy

import pytest
import torch
from caused import causes_of
from checked import like
from literal import judged, tiny_case, trial_of, with_step
from torch import nn

from harness.core.evidence.records import HeldTensor
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.probe.clock import Clock
from harness.core.probe.copies import CopyRecorder
from harness.core.probe.growth import GrowthRecorder

LOGITS = "float64 [2, 4, 8]"


def findings(trial: Trial) -> tuple[Finding, ...]:
    return judged("memory", trial).findings


def keeping(*kept: dict[str, int] | None) -> Trial:
    """What rank 1 keeps when steps 1, 2 and 3 are over."""
    trial = trial_of(tiny_case("fsdp_2"))
    for step, found in enumerate(kept, start=1):
        trial = with_step(trial, 1, step, kept=found)
    return trial


def copying(phase: str, size: int) -> Trial:
    return with_step(trial_of(tiny_case("fsdp_2")), 1, 2, copied={phase: size})


# ---- judged


def named(trial: Trial) -> str:
    """The kind of the one cause, which is the check's first finding."""
    (cause,) = causes_of(trial)
    assert cause.finding == judged("memory", trial).findings[0]
    return cause.kind


def test_logits_that_are_kept_in_every_step_are_found_and_named() -> None:
    trial = keeping({LOGITS: 512}, {LOGITS: 1024}, {LOGITS: 1536, "float64 [5]": 40})
    assert findings(trial) == (
        like(
            1,
            Limit(most=128),
            512,
            quantity="retained more after each step",
            unit="bytes",
            note="steps 1 to 3: float64 [2, 4, 8], float64 [5]",
        ),
    )
    assert named(trial) == "growing"


def test_results_of_collectives_that_nobody_waits_for_are_told_with_what_grows() -> None:
    trial = keeping({LOGITS: 512}, {LOGITS: 1024}, {LOGITS: 1536})
    for step in (1, 2, 3):
        trial = with_step(trial, 1, step, unwaited=step)
    assert named(trial) == "growing"
    (finding,) = findings(trial)
    assert LOGITS in finding.note and "2 functional collectives" in finding.note


@pytest.mark.parametrize(
    "kept",
    [
        ({"float64 []": 800}, {"float64 []": 8000}, {"float64 []": 80000}),
        ({"float64 [1, 1]": 800}, {"float64 [1, 1]": 8000}, {"float64 [1, 1]": 80000}),
        ({}, {LOGITS: 5120}, {LOGITS: 5120}),
        ({LOGITS: 512}, {LOGITS: 1024}, {LOGITS: 1024}),
        ({LOGITS: 5120}, {LOGITS: 512}, {LOGITS: 5120}),
        ({LOGITS: 512}, {LOGITS: 640}, {LOGITS: 768}),
        ({LOGITS: 512}, {LOGITS: 1024}, None),
        (None, None, None),
    ],
    ids=["losses", "single numbers", "a cache", "a cache of two", "a buffer", "within the bound", "two looks", "none"],
)
def test_what_does_not_grow_in_every_step_is_the_trainers_business(kept) -> None:
    assert judged("memory", keeping(*kept)).verdict is Verdict.PASS


def test_copies_of_all_weights_within_a_step_are_found_and_named() -> None:
    """The largest slice has 16 numbers."""
    trial = copying("other", 936)
    assert findings(trial) == (
        like(
            1,
            Limit(most=256),
            936,
            step=2,
            phase="other",
            unit="bytes",
            quantity="copies of weights at once",
            note="two may be there at a time",
        ),
    )
    assert named(trial) == "copied"


def test_two_copies_at_a_time_are_one_after_the_other() -> None:
    assert judged("memory", copying("other", 256)).verdict is Verdict.PASS
    assert judged("memory", copying("optimizer", 264)).verdict is Verdict.FAIL
    assert judged("memory", copying("forward", 512)).verdict is Verdict.PASS
    assert judged("memory", copying("backward", 520)).verdict is Verdict.FAIL


def test_what_was_looked_at_is_counted() -> None:
    plain, looked = judged("memory", trial_of(tiny_case("fsdp_2"))), judged("memory", keeping({}, {}, {}))
    assert looked.examined == plain.examined + 3
    assert judged("memory", with_step(trial_of(tiny_case("fsdp_2")), 0, 1, copied={})).examined == plain.examined + 1


# ---- seen


@pytest.fixture
def watched():
    """A model, its optimizer, and a recorder on a clock that stands in the first step."""
    clock, model = Clock(), nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    recorder = CopyRecorder(clock)
    recorder.install()
    recorder.attach([model])
    clock.enter_forward()
    clock.leave_forward()
    yield model, recorder, clock
    recorder.remove()


WHOLE = 4 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("how", "size"),
    [
        (lambda model: [p.detach().clone() for p in model.parameters()], WHOLE),
        (lambda model: copy.deepcopy(model), WHOLE),
        (lambda model: [torch.empty_like(p).data.copy_(p) for p in model.parameters()], WHOLE),
        (lambda model: [p.detach().to(torch.float64) for p in model.parameters()], 2 * WHOLE),
        (lambda model: nn.utils.parameters_to_vector(model.parameters()), WHOLE),
        (lambda model: [float(p.detach().clone().norm()) for p in model.parameters()], WHOLE / 4),
        (lambda model: [torch.randn(64, 64).clone() for _ in range(9)], None),
        (lambda model: model.state_dict(), None),
        (lambda model: torch.nn.functional.linear(torch.ones(2, 8), model[0].weight), None),
    ],
    ids=["clone", "deepcopy", "copy_", "converted", "cat", "one_by_one", "others", "references", "used"],
)
def test_copies_of_weights_are_counted_while_they_live(watched, how, size) -> None:
    model, recorder, _ = watched
    how(model)
    seen = recorder.peak_copies_of(1)
    assert seen == ({"other": size} if size else {})


def test_what_outlives_its_step_is_kept_and_not_copied(watched) -> None:
    model, recorder, clock = watched
    kept = [p.detach().clone() for p in model.parameters()]
    clock.step = 2
    for old, p in zip(kept, model.parameters(), strict=True):
        old.copy_(p.detach())
    assert (recorder.peak_copies_of(1), recorder.peak_copies_of(2)) == ({"other": 0}, {})


def test_copies_made_before_a_step_and_given_up_in_it_are_counted_in_it(watched) -> None:
    model, recorder, clock = watched
    for step in (2, 3):
        copies = [p.detach().clone() for p in model.parameters()]  # step by step anew, before forward
        clock.step = step
        model[0].weight.detach().clone()  # the first copy that is made in the step
        del copies
    assert [recorder.peak_copies_of(step).get("before forward") for step in (1, 2, 3)] == [None, WHOLE, WHOLE]


def test_copies_before_forward_are_bounded_as_all_others_and_by_what_may_be_kept() -> None:
    trial = copying("before forward", 10**6)
    (finding,) = judged("memory", trial).findings
    assert (finding.rank, finding.step) == (1, 2)


def test_casts_in_forward_are_how_mixed_precision_computes(watched) -> None:
    model, recorder, clock = watched
    clock.enter_forward()
    casts = [p.detach().to(torch.bfloat16) for p in model.parameters()]
    assert recorder.peak_copies_of(1) == {}
    copies = [p.detach().clone() for p in model.parameters()]
    assert len(casts) == len(copies)
    assert recorder.peak_copies_of(1) == {"forward": 0}  # they live on


def test_numbers_that_torch_wraps_in_tensors_are_copied_as_without_the_probe(watched) -> None:
    assert torch.ones(2, dtype=torch.int32).add_(2).tolist() == [3, 3]
    chosen = torch.where(torch.tensor([True, False]), 1.5, torch.zeros(2, dtype=torch.float64))
    assert (chosen.dtype, chosen.tolist()) == (torch.float64, [1.5, 0.0])
    assert torch.ones(2, dtype=torch.bool).add_(True).tolist() == [True, True]
    assert torch.zeros(1, dtype=torch.complex64).add_(1j).tolist() == [1j]


def test_growth_is_looked_at_after_three_steps_and_the_last() -> None:
    clock, looked = Clock(), []

    def look() -> tuple[HeldTensor, ...]:
        looked.append(clock.step)
        return (HeldTensor((2, 3), "float32", 24), HeldTensor((2, 3), "float32", 24))

    recorder = GrowthRecorder(clock, look)
    recorder.attach()
    clock.resume_after(4)
    for _ in range(6):
        clock.enter_forward()
        clock.leave_forward()
        clock.leave_optimizer()
    recorder.note_after_last_step(10, look())
    assert looked == [5, 6, 7, 10]
    assert [recorder.retained_bytes(step) for step in (7, 8, 10)] == [
        {"float32 [2, 3]": 48},
        None,
        {"float32 [2, 3]": 48},
    ]
