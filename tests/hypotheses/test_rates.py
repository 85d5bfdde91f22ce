"""What the optimizer does not move, and rates that are not the requested ones. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from diagnosed import NORM
from literal import ADAMW, tiny_case, trained_otherwise, trial_of, with_step
from literal_reference import clip
from test_recipe import LOW, RATES, Arrays, given, kind, named, proposed

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.trial import Trial
from harness.hypotheses.recipe import matching_schedules_text
from harness.reference.config import TrainingConfig

# ---- what is not moved


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "hsdp_2x2"])
@pytest.mark.parametrize("ranks", [None, [1]])
@pytest.mark.parametrize("training", [LOW, ADAMW])
@pytest.mark.parametrize(
    ("moves", "steps"),
    [
        (lambda step, fqn: fqn != NORM, (1, 2, 3)),
        (lambda step, fqn: step != 2, (2,)),
        (lambda step, fqn: step < 2, (2, 3)),
    ],
)
def test_what_the_optimizer_does_not_move(
    layout: str,
    ranks: list[int] | None,
    training: TrainingConfig,
    moves: Callable[[int, str], bool],
    steps: tuple[int, ...],
) -> None:
    def those(number: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm, training) * g for fqn, g in gradients.items() if moves(number, fqn)}

    trial = trained_otherwise(trial_of(tiny_case(layout, training)), *([ranks] if ranks else []), given=those)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("not stepped", {"step": steps[0], "steps": steps})
    assert ("on rank" in cause.where) == bool(ranks) and (NORM in cause.where) == (steps[0] == 1)


def test_what_need_not_move_is_not_blamed() -> None:
    trial = given(lambda step, fqn, of, norm: None if step == 1 else clip(norm, LOW), LOW)
    assert "not stepped" in proposed(trial)
    first, *rest = trial.reference.steps
    still = replace(trial, reference=replace(trial.reference, steps=(replace(first, lr=0.0), *rest)))
    assert "not stepped" not in proposed(still)


# ---- rates that the optimizer shows


def showing(by_rank: dict[int, Iterable[float]], layout: str = "fsdp_2", reported: Iterable[float] = ()) -> Trial:
    """These rates are taken, shown and reported; of other ranks those requested."""
    trial = trial_of(tiny_case(layout, LOW))
    for rank, rates in by_rank.items():
        taken = [*rates]
        trial = trained_otherwise(trial, [rank], rate=lambda step, fqn, taken=taken: taken[step - 1])
        for step, lr in enumerate(taken, start=1):
            trial = with_step(trial, rank, step, lr=lr, reported_lr=([*reported] or taken)[step - 1])
    return trial


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2"])
@pytest.mark.parametrize(
    ("by_rank", "step", "rate"),
    [
        ({0: (0.07, 0.05, 0.0375), 1: (0.07, 0.05, 0.0375)}, 1, 0.07),
        ({1: (0.05, 0.05, 0.0375)}, 1, 0.05),
        ({0: (0.025, 0.05, 0.04), 1: (0.025, 0.07, 0.0375)}, 2, 0.07),
        ({0: (0.0, 0.05, 0.0375), 1: (0.0, 0.05, 0.0375)}, 1, 0.0),
    ],
)
def test_a_rate_is_named_with_its_first_step_and_the_ranks_that_have_it(
    layout: str, by_rank: dict[int, tuple[float, ...]], step: int, rate: float
) -> None:
    cause = named(showing(by_rank, layout))
    ranks = tuple(rank for rank, rates in by_rank.items() if rates[step - 1] != RATES[step - 1])
    assert (cause.kind, dict(cause.details) | {"rule": ""}) == (
        "learning rate",
        {"step": step, "rate": rate, "ranks": ranks, "rule": ""},
    )


def test_requested_rates_may_be_reported_beside_others_that_are_taken() -> None:
    both = {rank: (0.07, 0.05, 0.0375) for rank in (0, 1)}
    assert kind(showing(both, reported=RATES)) == "learning rate"
    found = diagnose(other := showing(both, reported=(0.025, 0.06, 0.05)), judge(other))
    assert found is not None and {"learning rate", "wrong report"} == {*found.kinds} | {"wrong report"}


# ---- which schedule gives them

TEN = replace(ADAMW, lr=0.01, steps=10, warmup_steps=4, final_lr_fraction=0.2)


def scheduled(step: int, warmup: int = 4, steps: int = 10, last: float = 0.2, peak: float = 0.01) -> float:
    if 0 < warmup >= step:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    return peak * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def rule(by: Callable[[int], float], training: TrainingConfig = TEN, taken: Iterable[int] = range(1, 11)) -> str:
    trial = trial_of(tiny_case("single"))
    shown = {step: by(step) for step in taken}
    wrong = [step for step, lr in shown.items() if not math.isclose(lr, scheduled(step))]
    return matching_schedules_text(replace(trial, case=replace(trial.case, training=training)), wrong, shown.items())


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (lambda step: scheduled(step - 1), ("every step", "before")),
        (lambda step: scheduled(step + 1), ("next step",)),
        (lambda step: scheduled(2 * step - 1), ("advances", "by 2")),
        (lambda step: scheduled(5 * step - 4), ("advances", "by 5")),
        (lambda step: scheduled(step - (step >= 9)), ("from step 9 on", "before")),
        (lambda step: scheduled(step, warmup=0), ("warmup_steps 0",)),
        (lambda step: scheduled(step, warmup=5), ("warmup_steps 5",)),
        (lambda step: scheduled(step, last=0.1), ("final_lr_fraction 0.1",)),
        (lambda step: scheduled(step, steps=20), ("steps 20",)),
        (lambda step: scheduled(step, steps=14), ("steps 14",)),
        (lambda step: scheduled(step, peak=0.02), ("lr 0.02",)),
        (lambda step: 0.01, ("warmup_steps 0", "final_lr_fraction 1")),
        (lambda step: scheduled(step, warmup=0, steps=20), ("warmup_steps 0", "steps 20")),
        (lambda step: 0.001 + 0.0001 * step**2, ()),
    ],
)
def test_a_schedule_is_a_shift_in_steps_or_a_field_or_two(by: Callable[[int], float], words: tuple[str, ...]) -> None:
    assert all(word in rule(by) for word in words) and bool(rule(by)) == bool(words)
