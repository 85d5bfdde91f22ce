"""Rates that the optimizer shows: how they are told, and what is assumed then. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import first_line
from literal import SGD, TINY, judged, tiny_case, trained_otherwise, trial_of, with_rank, with_step
from literal_reference import retrained
from trained_so import follows

from harness.diagnosis.optimizer import _parts, _rates_of_ranks, _shown_rate
from harness.judge.contents import take
from harness.judge.result import Cause, Verdict
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.plan.stages import parameters_of_stage, stages_of_rank
from harness.spec.case import Case
from harness.spec.dims import ParallelDims

LOW = replace(SGD, max_norm=0.25)
"""Rates requested are 0.025, 0.05 and 0.0375."""
Rates = Sequence[float | None]


def showing(trial: Trial, by_rank: dict[int, Rates]) -> Trial:
    """These rates are taken, shown and reported; None: as requested, and not shown."""
    usual = [step.lr for step in trial.reference.steps]
    for rank, shown in by_rank.items():
        taken = [lr if own is None else own for lr, own in zip(usual, shown, strict=True)]
        trial = trained_otherwise(trial, [rank], rate=lambda step, fqn, taken=taken: taken[step - 1])
        for step, lr in enumerate(shown, start=1):
            trial = with_step(trial, rank, step, lr=lr, reported_lr=lr)
    return trial


def told(trial: Trial) -> list[Cause]:
    return [one.cause for one in _shown_rate(trial)]


def with_requested(trial: Trial, *rates: float) -> Trial:
    """Another schedule is that of the reference."""
    steps = tuple(replace(step, lr=lr) for step, lr in zip(trial.reference.steps, rates, strict=True))
    return replace(trial, reference=replace(trial.reference, steps=steps))


FSDP_2 = trial_of(tiny_case("fsdp_2", LOW))


@pytest.mark.parametrize(
    ("by_rank", "text", "expected", "hint"),
    [
        ({0: (0.07, 0.05, 0.0375), 1: (0.07, 0.05, 0.0375)}, "step 1 is 0.07", "0.025", ""),
        ({1: (0.07, 0.05, 0.0375)}, "step 1 on rank 1 is 0.07", "0.025", ""),
        ({1: (0.05, 0.05, 0.0375)}, "step 1 on rank 1 is 0.05 (the schedule's of step 2)", "0.025", ""),
        ({0: (0.025, 0.05, 0.04), 1: (0.025, 0.07, 0.0375)}, "step 2 on rank 1 is 0.07", "0.05", ""),
        ({1: (0.025, 0.1234567, 0.0375)}, "step 2 on rank 1 is 0.123457", "0.05", ""),
        ({0: (0.05, 0.05, 0.05)}, "step 1 on rank 0 is 0.05", "0.025", "as without a schedule"),
    ],
)
def test_a_rate_is_told_with_its_first_step_the_ranks_that_have_it_and_whose_it_is(
    by_rank: dict[int, Rates], text: str, expected: str, hint: str
) -> None:
    trial = showing(FSDP_2, by_rank)
    (one,) = _shown_rate(trial)
    assert (one.cause, one.fitted) == (Cause("learning rate", f"learning rate of {text}", "", expected, hint), 1)
    assert judged("reported_rate", follows(trial, one)).verdict is Verdict.PASS


def test_rates_that_are_not_shown_are_no_others() -> None:
    assert told(showing(FSDP_2, {0: (None, None, None), 1: (None, None, None)})) == []
    trial = showing(FSDP_2, {0: (None, None, None), 1: (None, 0.07, 0.0375)})
    assert told(trial) == [Cause("learning rate", "learning rate of step 2 on rank 1 is 0.07", "", "0.05")]


def test_a_rate_of_several_steps_of_the_schedule_is_told_with_all_of_them() -> None:
    trial = with_requested(showing(FSDP_2, {0: (0.05, 0.05, 0.05)}), 0.025, 0.05, 0.05)
    text = "learning rate of step 1 on rank 0 is 0.05 (the schedule's of step 2 or 3)"
    assert told(trial) == [Cause("learning rate", text, "", "0.025")]


def test_rates_are_as_requested_up_to_their_last_bits() -> None:
    assert told(FSDP_2) == []
    assert told(showing(FSDP_2, {0: (0.025 * (1 + 1e-13), 0.05, 0.0375)})) == []
    off = showing(FSDP_2, {0: (0.025 * (1 + 1e-11), 0.05, 0.0375)})
    assert first_line(off) == "learning rate of step 1 on rank 0 is 0.025 (reported as requested), requested 0.025"


@pytest.mark.parametrize(
    ("reported", "noted"),
    [
        ((0.025, 0.05, 0.0375), "; reported as requested"),
        ((0.025, None, None), "; reported as requested"),
        ((0.025 * (1 + 1e-8), 0.05, 0.0375), "; reported as requested"),
        ((0.025, 0.05, 0.05), ""),
        ((None, None, None), ""),
    ],
)
def test_what_is_reported_is_the_requested_rate_or_the_one_that_is_taken(reported: Rates, noted: str) -> None:
    trial = showing(FSDP_2, {0: (None, None, None), 1: (0.05, 0.05, 0.0375)})
    for rank in (0, 1):
        for step, lr in enumerate(reported, start=1):
            trial = with_step(trial, rank, step, reported_lr=lr)
    (one,) = _shown_rate(trial)
    text = f"learning rate of step 1 on rank 1 is 0.05 (the schedule's of step 2{noted})"
    assert one.cause == Cause("learning rate", text, "", "0.025")
    assert one.assume is not None
    reports = one.assume(trial.assuming(reports={"loss": lambda rank, step: 0.0})).assumption.reports
    expected = reports.pop("reported_rate")
    assert [*reports] == ["loss"]
    assert [expected(1, 1), expected(1, 2), expected(0, 1)] == [0.025 if noted else 0.05, 0.05, 0.025]


def test_a_replica_with_rates_of_its_own_trains_apart() -> None:
    trial = showing(trial_of(tiny_case("ddp_2", LOW)), {1: (0.07, 0.05, 0.02)})
    (one,) = _shown_rate(trial)
    assert one.cause == Cause("learning rate", "learning rate of step 1 on rank 1 is 0.07", "", "0.025")
    assert [*follows(trial, one).assumption.references] == [0, 1]


def test_rates_that_ranks_of_one_model_take_are_those_of_its_slices() -> None:
    """By rank, step and parameter; one that no plan knows is left alone, and so is what the first rank does not move."""

    def rates(rank: int, step: int, fqn: str) -> float:
        still = fqn == "output.weight" and step == 2
        return 0.0 if still and rank == 0 else 0.1 * step + 0.05 * rank * len(fqn)

    trial = FSDP_2
    extra = replace(trial.ranks[1].parameters[0], fqn="bias", value=np.full(3, 7.0))
    trial = with_rank(trial, 1, parameters=(*trial.ranks[1].parameters, extra))
    made = retrained(LOW, trial.reference, **_rates_of_ranks(trial, rates, [0, 1]))
    for rank in (0, 1):
        own = lambda step, fqn, rank=rank: rates(rank if rates(0, step, fqn) else 0, step, fqn)  # noqa: E731
        alone = retrained(LOW, trial.reference, rate=own)
        for step, expected in zip(made.steps, alone.steps, strict=True):
            for fqn, part in trial.plan.slices[rank].items():
                seen, wanted = take(step.parameters[fqn], part), take(expected.parameters[fqn], part)
                np.testing.assert_allclose(seen, wanted, rtol=1e-12, err_msg=f"{rank} {step.step} {fqn}")


# ---- stages of a pipeline


FOUR_LAYERS = replace(TINY, n_layers=4)


def piped(schedule: str, **features: Any) -> Trial:
    """Of two replicas each holds its stages alone."""
    trial = trial_of(tiny_case("ddp_2", LOW, model=FOUR_LAYERS))
    case = tiny_case(ParallelDims(pp=2), LOW, model=FOUR_LAYERS, schedule=schedule, microbatches=4, **features)
    for rank, evidence in trial.ranks.items():
        own = {fqn for stage in stages_of_rank(case, rank) for fqn in parameters_of_stage(case, stage)}
        trial = with_rank(trial, rank, parameters=tuple(t for t in evidence.parameters if t.fqn in own))
        for step in evidence.steps:
            kept: dict[str, Any] = {
                what: {fqn: value for fqn, value in getattr(step, what).items() if fqn in own}
                for what in ("gradients", "parameters", "optimizer_state")
            }
            trial = with_step(trial, rank, step.step, **kept)
    return replace(trial, case=case, plan=make_plan(case))


def stage(case: Case, *numbers: int) -> frozenset[str]:
    return frozenset(fqn for number in numbers for fqn in parameters_of_stage(case, number))


def test_stages_of_a_rank_are_parts_with_optimizers_of_their_own() -> None:
    looped, shaped, plain = piped("Interleaved1F1B"), piped("ZBVZeroBubble"), piped("1F1B")
    every = "", frozenset(FOUR_LAYERS.parameter_shapes())
    assert [*_parts(plain)] == [every]
    assert [*_parts(looped)] == [
        every,
        (" in stages 0 and 1", stage(looped.case, 0, 1)),
        (" in stages 2 and 3", stage(looped.case, 2, 3)),
    ]
    assert [*_parts(shaped)] == [
        every,
        (" in stages 0 and 1", stage(shaped.case, 0, 1)),
        (" in stages 2 and 3", stage(shaped.case, 2, 3)),
    ]


def test_a_rate_of_some_stages_is_told_with_them() -> None:
    trial = piped("Interleaved1F1B")
    first, shown = stage(trial.case, 0, 1), (0.07, 0.08, 0.09)
    usual = [step.lr for step in trial.reference.steps]
    made = retrained(LOW, trial.reference, rate=lambda step, fqn: (shown if fqn in first else usual)[step - 1])
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            left = {fqn: made.steps[step.step - 1].parameters[fqn] for fqn in step.parameters}
            trial = with_step(trial, rank, step.step, lr=shown[step.step - 1], parameters=left)
    whole, those, others = _shown_rate(trial)
    causes = [
        (Cause("learning rate", f"learning rate of step 1{where} is 0.07 (reported as requested)", "", "0.025"), fitted)
        for where, fitted in (("", 1), (" in stages 0 and 1", 2), (" in stages 2 and 3", 2))
    ]
    assert [(one.cause, one.fitted) for one in (whole, those, others)] == causes
    follows(trial, those)
