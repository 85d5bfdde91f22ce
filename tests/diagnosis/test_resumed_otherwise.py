"""What training may have gone on from instead of what was saved, and the reference trained from that. Literal evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import ADAMW, SGD, judged, tiny_case, trial_of, with_rank, with_step
from resuming import FSDP_4, TP_2, everywhere, resumed, with_resumed

from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.resume import _going_on, resumed_otherwise
from harness.diagnosis.words import finding_line
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig
from harness.report.cause_text import cause_line, evidence_rows
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims

W1, W3 = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"
IGNORED = (
    "the checkpoint of step 2 was ignored: training starts from scratch, parameters are the seed's",
    "resumed elsewhere",
)


def hypotheses(trial: Trial) -> list[Hypothesis]:
    result = judged("resume", trial)
    assert result.verdict is Verdict.FAIL
    return list(resumed_otherwise(trial, {"resume": result}))


def only(trial: Trial) -> Hypothesis:
    (one,) = hypotheses(trial)
    return one


def under(one: Hypothesis, trial: Trial) -> Trial:
    assert one.assume is not None
    return one.assume(trial)


def alone() -> Trial:
    return resumed(after=ParallelDims())


def with_rates(trial: Trial, rates: dict[int, float | None]) -> Trial:
    for rank in trial.ranks:
        for step, lr in rates.items():
            trial = with_step(trial, rank, step, lr=lr)
    return trial


def of_the_seed(trial: Trial) -> Trial:
    for rank, evidence in trial.ranks.items():
        seed = {tensor.fqn: tensor.value for tensor in evidence.parameters}
        trial = with_resumed(trial, rank, "parameters", lambda _, seed=seed: seed)
    return trial


def from_scratch(training: TrainingConfig = ADAMW) -> Trial:
    """Neither parameters nor state nor rate are those that were saved."""
    trial = everywhere(
        of_the_seed(resumed(training=training)), "optimizer_state", lambda held: {fqn: {} for fqn in held}
    )
    return with_rates(trial, {3: trial.reference.steps[0].lr})


def larger(held: dict[str, Any]) -> dict[str, Any]:
    return held | {W1: held[W1] + 1}


# ---- what is proposed


def test_nothing_is_proposed_where_the_check_holds_or_only_samples_are_others() -> None:
    trial = from_scratch()
    assert not list(resumed_otherwise(trial, {}))
    other = trial_of(tiny_case(FSDP_4)).ranks[1].steps[1].microbatches
    assert not hypotheses(with_step(resumed(), 1, 3, microbatches=other))


def test_each_of_what_is_wrong_may_be_all_and_the_first_is_what_was_seen() -> None:
    trial = everywhere(alone(), "parameters", larger)
    trial = everywhere(
        trial, "optimizer_state", lambda held: {f: {k: 0 * v for k, v in of.items()} for f, of in held.items()}
    )
    trial = with_rates(trial, {3: trial.reference.steps[0].lr})
    (line,) = evidence_rows((finding_line(judged("resume", trial)),))
    texts = [
        f"parameters after resuming are not those of step 2 in 1 of 12 parameters ({W1})",
        "resumed without optimizer state: exp_avg and exp_avg_sq are zero in every parameter, after 2 steps",
        "the schedule restarts after resuming: the learning rate of step 3 is that of step 1, requested 0.0075",
    ]
    kinds = ["parameters changed over the checkpoint", "optimizer state lost", "schedule starts anew"]
    also = tuple(("also", text) for text in texts[1:])
    seen = [
        (cause_line(one.cause), one.cause.kind, one.fitted, (*evidence_rows(one.lines),), one.seen)
        for one in hypotheses(trial)
    ]
    assert seen == [
        (texts[0], kinds[0], 1, (*also, line), ("resume",)),
        (texts[1], kinds[1], 1, (line,), ()),
        (texts[2], kinds[2], 1, (line,), ()),
    ]
    words = [set(under(one, trial).assumption.reference) for one in hypotheses(trial)]
    assert words == [{"left"}, {"state"}, {"rate"}]


@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_what_starts_from_scratch_has_one_cause_in_which_parameters_and_state_are_others(
    training: TrainingConfig,
) -> None:
    trial = from_scratch(training)
    one = only(trial)
    assert (cause_line(one.cause), one.cause.kind) == IGNORED
    assert one.lines == (finding_line(judged("resume", trial)),)
    assert set(under(one, trial).assumption.reference) == {"left", "state"}


def training_on(trial: Trial, *ranks: int) -> Trial:
    """These ranks train more steps."""
    for rank in ranks:
        (last,) = trial.ranks[rank].steps
        trial = with_rank(trial, rank, steps=(last, *(replace(last, step=number) for number in (4, 5))))
    return trial


@pytest.mark.parametrize(
    ("trial", "seen"),
    [
        (from_scratch(), ("resume",)),
        (training_on(from_scratch(), 0, 1, 2, 3), ("resume", "completed")),
        (training_on(from_scratch(), 0, 1, 3), ("resume",)),
        (training_on(everywhere(resumed(), "parameters", larger), 0, 1, 2, 3), ("resume",)),
    ],
    ids=["to the last step", "beyond it", "some beyond it", "from other parameters"],
)
def test_steps_beyond_the_last_are_what_is_left_from_an_earlier_moment(trial: Trial, seen: tuple[str, ...]) -> None:
    assert only(trial).seen == seen


# ---- what training went on from


def test_training_goes_on_from_the_parameters_that_were_held_after_the_step_that_was_saved() -> None:
    trial = everywhere(alone(), "parameters", larger)
    assumed, held = under(only(trial), trial), trial.ranks[0].resumed
    left: Any = assumed.assumption.reference["left"]
    assert held is not None
    assert left(1, "as it was") == left(3, "as it was") == "as it was"
    assert set(left(2, "as it was")) == set(held.parameters)
    assert all(np.array_equal(value, held.parameters[fqn]) for fqn, value in left(2, "as it was").items())
    assert not vars(assumed.assumption.optimizer)["counter"]


def counted(held: dict[str, Any]) -> dict[str, Any]:
    """One counter is ahead, one missing."""
    return held | {W1: held[W1] | {"step": np.array(7.0)}, W3: {k: v for k, v in held[W3].items() if k != "step"}}


def test_training_goes_on_from_the_state_that_was_held_before_the_first_step_and_counts_from_there() -> None:
    trial = everywhere(alone(), "optimizer_state", counted)
    assumed, held = under(only(trial), trial), trial.ranks[0].resumed
    state: Any = assumed.assumption.reference["state"]
    assert held is not None
    assert (state(2), state(4)) == (None, None)
    assert {fqn: set(of) for fqn, of in state(3).items()} == {f: set(of) for f, of in held.optimizer_state.items()}
    assert all(np.array_equal(v, held.optimizer_state[f][k]) for f, of in state(3).items() for k, v in of.items())
    counter = assumed.assumption.optimizer.counter
    assert counter is not None
    assert [counter(step, W1) for step in (3, 5)] == [8, 10]
    assert [counter(3, fqn) for fqn in (W3, "norm.weight")] == [1, 3]


def test_state_that_did_not_arrive_is_counted_from_its_first_step() -> None:
    trial = everywhere(resumed(), "optimizer_state", lambda held: {fqn: {} for fqn in held})
    counter = under(only(trial), trial).assumption.optimizer.counter
    assert counter is not None
    assert [counter(step, W1) for step in (3, 4)] == [1, 2]


def test_an_optimizer_that_keeps_no_counter_counts_as_requested() -> None:
    trial = from_scratch(SGD)
    assert under(only(trial), trial).assumption.optimizer.counter is None


# ---- the schedule


def going_on_for_two(rates: dict[int, float | None], requested: dict[int, float] | None = None) -> Trial:
    """Resumed after step 1; other rates than half, whole and three quarters of 0.01, and others of the reference."""
    trial = trial_of(tiny_case(FSDP_4, resume=(Saved(1, TP_2),)))
    steps = tuple(replace(step, lr=(requested or {}).get(step.step, step.lr)) for step in trial.reference.steps)
    return with_rates(replace(trial, reference=replace(trial.reference, steps=steps)), rates)


HALF, WHOLE, LAST = 0.005, 0.01, 0.0075
RESTARTS = "the schedule restarts after resuming: the learning rate of step {} is that of step {}, requested {}"


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({2: HALF, 3: WHOLE}, [RESTARTS.format(2, 1, 0.01)]),
        ({3: WHOLE}, [RESTARTS.format(3, 2, 0.0075)]),
        ({2: None, 3: WHOLE}, [RESTARTS.format(3, 2, 0.0075)]),
        ({2: HALF, 3: None}, [RESTARTS.format(2, 1, 0.01)]),
        ({2: HALF}, []),
        ({2: HALF, 3: HALF}, []),
        ({3: HALF}, []),
        ({3: WHOLE * (1 + 1e-10)}, []),
        ({2: None}, []),
    ],
)
def test_a_schedule_restarts_where_every_rate_from_some_step_on_is_that_of_so_many_steps_after_its_beginning(
    rates: dict[int, float | None], told: list[str]
) -> None:
    assert [cause_line(one.cause) for one in hypotheses(going_on_for_two(rates))] == told


def test_a_rate_that_differs_in_its_tenth_digit_is_another() -> None:
    trial = going_on_for_two({2: WHOLE * (1 + 1e-10)}, {1: WHOLE * (1 + 1e-10), 2: WHOLE, 3: WHOLE})
    assert cause_line(only(with_rates(trial, {3: WHOLE})).cause) == RESTARTS.format(2, 1, 0.01)


@pytest.mark.parametrize(
    ("rates", "assumed"),
    [({2: HALF, 3: WHOLE}, [HALF, HALF, WHOLE]), ({3: WHOLE}, [HALF, WHOLE, WHOLE]), ({}, [HALF, WHOLE, LAST])],
)
def test_rates_are_those_after_the_beginning_from_the_step_on_in_which_one_is_odd(
    rates: dict[int, float | None], assumed: list[float]
) -> None:
    rate: Callable[[int, str], float] = _going_on(("rate",), 2, going_on_for_two(rates)).assumption.reference["rate"]
    assert [rate(step, W1) for step in (1, 2, 3)] == assumed
