"""What a launch does not go on from, named: counters, averages, rates and data of another state. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import (
    tiny_case,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
)
from resuming import FSDP_4, TP_2, WEIGHT, cause, everywhere, resumed, with_resumed

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.evidence.records import Collective, HeldTensor
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import diagnosis_line, evidence_rows
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims


def test_a_counter_that_is_not_there_and_one_of_another_name_are_told() -> None:
    def counting(name: str, saved: float, held: float | None) -> Trial:
        trial, before = resumed(), resumed().saved[0]
        for rank, evidence in before.ranks.items():
            (*_, last) = evidence.steps
            state = {fqn: arrays | {name: np.array(saved)} for fqn, arrays in last.optimizer_state.items()}
            before = with_step(before, rank, last.step, optimizer_state=state)
        own = {} if held is None else {name: np.array(held)}
        strip = lambda arrays: {k: v for k, v in arrays.items() if k != name} | own  # noqa: E731
        trial = everywhere(trial, "optimizer_state", lambda held: {fqn: strip(arrays) for fqn, arrays in held.items()})
        return replace(trial, saved=(before,))

    anew = ": AdamW's bias correction restarts"
    assert cause(counting("step", 2.0, None)) == (
        f"the optimizer's step counter is missing after resuming, saved 2 in every parameter{anew}"
    )
    assert cause(counting("step", 2.0, 0.0)).endswith(anew)
    assert cause(counting("step", 2.0, 1.0)) == (
        "the optimizer's step counter is 1 after resuming, saved 2 in every parameter"
    )
    assert cause(counting("seen", 7.0, 3.0)) == (
        "the optimizer's seen counter is 3 after resuming, saved 7 in every parameter"
    )


def test_parameters_of_the_seed_beside_the_optimizers_state_of_the_checkpoint_are_stale() -> None:
    trial = resumed()
    for rank, evidence in trial.ranks.items():
        seed = {tensor.fqn: tensor.value for tensor in evidence.parameters}
        trial = with_resumed(trial, rank, "parameters", lambda _, seed=seed: seed)
    assert cause(trial) == (
        "resumed parameters are the seed's, although the optimizer's state is that of step 2: stale ones were saved, or"
        " they were not loaded"
    )


def test_data_of_another_step_is_told_with_the_ranks_that_are_fed_it() -> None:
    trial, whole = resumed(), trial_of(tiny_case(FSDP_4))
    for rank in (1, 2):
        trial = with_step(trial, rank, 3, microbatches=whole.ranks[rank].steps[1].microbatches)
    told = "the data position is wrong after resuming: step 3 receives"
    assert cause(trial) == f"{told} the samples of step 2 on ranks [1,2]"
    trial = with_step(trial, 2, 3, microbatches=whole.ranks[2].steps[0].microbatches)
    assert cause(trial) == f"{told} samples of other steps on ranks [1,2]"


def test_what_else_did_not_arrive_is_told_below_the_first() -> None:
    trial = everywhere(resumed(), "optimizer_state", lambda held: {fqn: {} for fqn in held})
    for rank in trial.ranks:
        trial = with_step(trial, rank, 3, lr=0.005)
    found = diagnose(trial, judge(trial))
    assert found is not None and "resumed without optimizer state" in diagnosis_line(found)
    told = diagnosis_line(found) + " ".join(text for _, text in evidence_rows(found.evidence))
    assert "the schedule restarts after resuming" in told or "learning rate of step 3 is 0.005" in told


def test_parameters_and_averages_that_are_neither_exchanged_nor_rearranged_are_told_by_their_names() -> None:
    other = "layers.0.attention.wo.weight"
    where = f"in 2 of 12 parameters ({WEIGHT}, {other})"
    larger = everywhere(resumed(), "parameters", lambda held: held | {f: 1.5 * held[f] for f in (WEIGHT, other)})
    assert cause(larger) == f"parameters are 1.5 times the saved ones after resuming {where}"
    changed = everywhere(resumed(), "parameters", lambda held: held | {f: held[f] + 0.5 for f in (WEIGHT, other)})
    assert cause(changed) == f"parameters after resuming are not those of step 2 {where}"

    def blurred(held: dict[str, Any]) -> dict[str, Any]:
        return held | {f: held[f] | {"exp_avg": 1.5 * held[f]["exp_avg"]} for f in (WEIGHT, other)}

    changed = everywhere(resumed(), "optimizer_state", blurred)
    assert cause(changed) == f"optimizer state is not what was saved: exp_avg {where}"


def test_what_only_the_last_launch_breaks_is_said_beside_the_cause_of_an_earlier_one() -> None:
    wrong = with_resumed(resumed(), 1, "parameters", lambda held: {**held, WEIGHT: 2 * held[WEIGHT]})
    found = diagnose(
        trial := replace(wrong, saved=(with_step(wrong.saved[0], 0, 1, reported_loss=99.0),)), judge(trial)
    )
    assert found is not None
    assert diagnosis_line(found).startswith("saved_1: the reported loss is wrong")
    causes = [value for label, value in found.evidence if label == "also failing" and isinstance(value, Cause)]
    said = [cause.finding for cause in causes if cause.finding is not None]
    assert sorted((one.check, one.launch, one.ranks, one.step, one.name) for one in said) == [
        ("resume", "the last launch", (1,), None, WEIGHT),
        ("update", "the last launch", (1,), 3, WEIGHT),
    ]


def test_what_an_earlier_launch_keeps_beside_does_not_explain_what_is_resumed_wrongly() -> None:
    right = resumed()
    keeping = with_rank(right.saved[0], 0, held=(HeldTensor((900,), "float64", 7200),))
    assert cause(replace(right, saved=(keeping,))).startswith("saved_1: 7.2 kB of float64 are retained in")
    wrong = with_resumed(right, 1, "parameters", lambda held: {**held, WEIGHT: 2 * held[WEIGHT]})
    both, moving = (waiting(launch) for launch in (keeping, right.saved[0]))
    assert [cause(replace(wrong, saved=(launch,))) for launch in (keeping, moving, both)] == [cause(wrong)] * 3
    worse = with_step(moving, 0, 1, reported_loss=99.0)
    assert cause(replace(wrong, saved=(worse,))).startswith("saved_1: ")


def waiting(trial: Trial) -> Trial:
    """Traffic alone is wrong: ranks of tp wait for each other in forward."""
    wait = Collective("barrier", (0, 1), "0", "float64", 0, "forward", 1, 99)
    return with_every_rank(trial, lambda t, rank: with_rank(t, rank, collectives=(*t.ranks[rank].collectives, wait)))


# ---- what has become of parameters and averages on the way, told of one rank that holds them whole

W1, W3 = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"
NOT_THOSE, FACTOR = (
    "parameters after resuming are not those of step 2",
    "parameters are 1.5 times the saved ones after resuming",
)
Held = dict[str, Any]


def alone(what: str, change: Callable[[Held], Held]) -> str:
    return cause(everywhere(resumed(after=ParallelDims()), what, lambda held: held | change(held)))


def in_float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(np.float64)


def of_the_seed(held: Held) -> Held:
    return {fqn: resumed().reference.weights[fqn] for fqn in (W1, W3)}


def after_step_1(held: Held) -> Held:
    return {fqn: resumed(after=ParallelDims()).reference.steps[0].parameters[fqn] for fqn in (W1, W3)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda held: {f: in_float32(v) for f, v in held.items()},
            "parameters come back rounded to float32 from the checkpoint in every parameter",
        ),
        (
            lambda held: {WEIGHT: held[WEIGHT].T},
            f"parameters come back transposed from the checkpoint in 1 of 12 parameters ({WEIGHT})",
        ),
        (
            lambda held: {WEIGHT: held[WEIGHT][::-1]},
            f"entries are in another order after resuming in 1 of 12 parameters ({WEIGHT})",
        ),
        (lambda held: {W1: held[W3], W3: held[W1]}, f"parameters {W1} and {W3} are swapped by the checkpoint"),
        (lambda held: {f: 1.5 * v for f, v in held.items()}, f"{FACTOR} in every parameter"),
        (lambda held: {W1: -held[W1], W3: 2 * held[W3]}, f"{NOT_THOSE} in 2 of 12 parameters ({W1}, {W3})"),
        (
            lambda held: of_the_seed(held) | {WEIGHT: held[WEIGHT] + 1},
            f"{NOT_THOSE} in 3 of 12 parameters ({WEIGHT}, {W1} and 1 more)",
        ),
        (of_the_seed, f"{W1}, {W3} were not loaded from the checkpoint: still the seed's values"),
        (
            lambda held: {W1: of_the_seed(held)[W1]},
            f"{W1} was not loaded from the checkpoint: still the seed's values",
        ),
        (after_step_1, f"{NOT_THOSE} in 2 of 12 parameters ({W1}, {W3}): they are those after step 1"),
    ],
)
def test_parameters_that_come_back_otherwise_are_told_by_what_became_of_them(
    change: Callable[[Held], Held], told: str
) -> None:
    assert alone("parameters", change) == told


def test_parameters_that_come_back_otherwise_on_some_ranks_are_told_with_these() -> None:
    def on_rank_1(change: Callable[[Held], Held]) -> str:
        return cause(with_resumed(resumed(), 1, "parameters", lambda held: {**held, **change(held)}))

    where = f"in 1 of 12 parameters ({WEIGHT}) on rank 1"
    assert on_rank_1(lambda held: {WEIGHT: held[WEIGHT] + 1}) == f"{NOT_THOSE} {where}"
    seed = {tensor.fqn: tensor.value for tensor in resumed().ranks[1].parameters}
    told = f"{WEIGHT} was not loaded from the checkpoint on rank 1: still the seed's values"
    assert on_rank_1(lambda held: {WEIGHT: seed[WEIGHT]}) == told
    told = f"parameters {W1} and {W3} are swapped by the checkpoint on rank 1"
    assert on_rank_1(lambda held: {W1: held[W3], W3: held[W1]}) == told


def test_parameters_of_a_later_step_than_the_one_that_was_saved_are_told_with_it() -> None:
    """An earlier launch goes on after it has saved."""
    trial = trial_of(tiny_case(ParallelDims(), resume=(Saved(1, TP_2, until=2),)))
    later = {fqn: trial.reference.steps[1].parameters[fqn] for fqn in (W1, W3)}
    assert cause(everywhere(trial, "parameters", lambda held: held | later)) == (
        f"parameters after resuming are not those of step 1 in 2 of 12 parameters ({W1}, {W3}): they are those after step 2"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda held: {f: {k: in_float32(v) for k, v in of.items()} for f, of in held.items()},
            "optimizer state comes back rounded to float32 from the checkpoint: exp_avg and exp_avg_sq in every parameter",
        ),
        (
            lambda held: {W1: held[W3], W3: held[W1]},
            f"optimizer state is swapped: {W1} resumed with exp_avg and exp_avg_sq of {W3}",
        ),
        (
            lambda held: {f: {k: 0 * v for k, v in of.items()} for f, of in held.items()},
            "resumed without optimizer state: exp_avg and exp_avg_sq are zero in every parameter, after 2 steps",
        ),
        (
            lambda held: {W1: held[W1] | {"exp_avg_sq": 0 * held[W1]["exp_avg_sq"]}},
            f"resumed without optimizer state: exp_avg_sq is zero in 1 of 12 parameters ({W1}), after 2 steps",
        ),
    ],
)
def test_averages_that_come_back_otherwise_are_told_by_what_became_of_them(
    change: Callable[[Held], Held], told: str
) -> None:
    assert alone("optimizer_state", change) == told
