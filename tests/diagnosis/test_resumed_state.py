"""Of another moment, exchanged, missing or changed: what ranks hold once they have resumed. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import SGD, judged, last_bit, tiny_case, trial_of, with_every_rank, without_step
from resuming import TP_2, WEIGHT, everywhere, resumed, with_resumed

from harness.diagnosis.resume import resumed_otherwise
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims

W1, W3, NORM = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight", "norm.weight"
Held = dict[str, Any]


def told(trial: Trial) -> list[str]:
    """By kind, without the engine: what each is that may be all that is wrong."""
    found = list(resumed_otherwise(trial, {"resume": judged("resume", trial)}))
    return [f"{one.cause.kind}; {cause_line(one.cause)}" for one in found]


def changed(what: str, change: Callable[[Held], Held], *ranks: int) -> list[str]:
    """On these ranks of four; told of one rank that holds all where there are none."""
    trial = resumed() if ranks else resumed(after=ParallelDims())
    for rank in ranks or (0,):
        trial = with_resumed(trial, rank, what, change)
    return told(trial)


# ---- another moment


def held_after(trial: Trial, step: int) -> Trial:
    """All parameters are those after this step, the optimizer's state is not."""
    parameters = trial.reference.steps[step - 1].parameters if step else trial.reference.weights
    return everywhere(trial, "parameters", lambda held: {fqn: parameters[fqn] for fqn in held})


@pytest.mark.parametrize(
    ("trial", "text"),
    [
        (
            held_after(resumed(after=ParallelDims()), 1),
            "resumed from the state after step 1, requested the checkpoint of step 2: an older one was read, or a stale one"
            " written",
        ),
        (
            held_after(trial_of(tiny_case(ParallelDims(), resume=(Saved(1, TP_2, until=2),))), 2),
            "resumed from the state after step 2, requested the checkpoint of step 1: it was written after training had gone"
            " on",
        ),
        (
            held_after(trial_of(tiny_case(ParallelDims(), resume=(Saved(1, TP_2), Saved(2, TP_2)))), 1),
            "resumed from the state after step 1, requested the checkpoint of step 2: an older one was read, or a stale one"
            " written",
        ),
        (
            held_after(resumed(after=ParallelDims()), 0),
            "resumed parameters are the seed's, although the optimizer's state is that of step 2: stale ones were saved, or"
            " they were not loaded",
        ),
        (
            held_after(resumed(after=ParallelDims(), training=SGD), 0),
            "the checkpoint of step 2 was ignored: training starts from scratch, parameters are the seed's",
        ),
    ],
    ids=["older", "later", "of the launch before", "the seed's", "the seed's without state"],
)
def test_where_all_parameters_are_of_another_moment_that_is_the_one_cause(trial: Trial, text: str) -> None:
    assert told(trial) == [f"resumed elsewhere; {text}"]


def test_state_that_did_not_arrive_whole_beside_the_seeds_parameters_is_from_scratch() -> None:
    lacking = lambda held: held | {W1: {k: v for k, v in held[W1].items() if k != "step"}}  # noqa: E731
    trial = everywhere(held_after(resumed(after=ParallelDims()), 0), "optimizer_state", lacking)
    ignored = "the checkpoint of step 2 was ignored: training starts from scratch, parameters are the seed's"
    assert told(trial) == [f"resumed elsewhere; {ignored}"]


def test_a_step_that_no_rank_recorded_is_no_moment() -> None:
    trial = everywhere(resumed(), "parameters", lambda held: {fqn: value + 1 for fqn, value in held.items()})
    before = with_every_rank(trial.saved[0], lambda t, rank: without_step(t, rank, 1))
    text = "parameters after resuming are not those of step 2 in every parameter"
    assert told(replace(trial, saved=(before,))) == [f"parameters changed over the checkpoint; {text}"]


def test_parameters_that_are_of_another_moment_on_some_ranks_alone_are_not_resumed_elsewhere() -> None:
    older = {rank: evidence.steps[0].parameters for rank, evidence in resumed(TP_2, TP_2).saved[0].ranks.items()}
    trial = with_resumed(resumed(TP_2, TP_2), 1, "parameters", lambda _: older[1])
    text = "parameters after resuming are not those of step 2 in every parameter on rank 1: they are those after step 1"
    assert told(trial) == [f"parameters changed over the checkpoint; {text}"]


# ---- parameters

CHANGED, NOT_THOSE = "parameters changed over the checkpoint", "parameters after resuming are not those of step 2"


def seed(fqn: str) -> np.ndarray:
    return resumed().reference.weights[fqn]


def through(dtype: type, array: np.ndarray) -> np.ndarray:
    return array.astype(dtype).astype(np.float64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda held: held | {W1: last_bit(held[W1])},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: held | {W1: 0 * held[W1]},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: {fqn: value for fqn, value in held.items() if fqn != W1},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: {fqn: 2 * value for fqn, value in held.items() if fqn != W1},
            f"{CHANGED}; {NOT_THOSE} in every parameter",
        ),
        (
            lambda held: held | {W1: (1 + 1e-8) * held[W1]},
            f"{CHANGED}; parameters are 1.00000001 times the saved ones after resuming in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: held | {W1: 2 * held[W1] * np.linspace(1, 1 + 1e-7, 4)},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: held | {W1: 2 * held[W1] + 1e-8},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: held | {W1: through(np.float32, held[W1]), W3: through(np.float16, held[W3])},
            f"{CHANGED}; {NOT_THOSE} in 2 of 12 parameters ({W1}, {W3})",
        ),
        (
            lambda held: held | {WEIGHT: held[WEIGHT].T, W1: held[W1][::-1], W3: held[W3][:, ::-1]},
            f"{CHANGED}; entries are in another order after resuming in 3 of 12 parameters ({WEIGHT}, {W1} and 1 more)",
        ),
        (
            lambda held: held | {WEIGHT: held[WEIGHT].T, W1: held[W1] + 1},
            f"{CHANGED}; {NOT_THOSE} in 2 of 12 parameters ({WEIGHT}, {W1})",
        ),
        (
            lambda held: held | {W1: held[W3], W3: held[W1], WEIGHT: held[WEIGHT] + 1, NORM: held[NORM] + 1},
            f"parameters exchanged; parameters {W1} and {W3} are swapped by the checkpoint",
        ),
        (
            lambda held: held | {W1: held[W3]},
            f"{CHANGED}; {NOT_THOSE} in 1 of 12 parameters ({W1})",
        ),
        (
            lambda held: held | {W1: seed(W1), W3: seed(W3), NORM: seed(NORM)},
            f"parameters not loaded; {W1}, {W3} and 1 more were not loaded from the checkpoint: still the seed's values",
        ),
    ],
)
def test_what_became_of_parameters_is_told_of_all_that_are_others(change: Callable[[Held], Held], text: str) -> None:
    assert changed("parameters", change) == [text]


def test_parameters_that_came_back_otherwise_on_some_ranks_are_told_with_these() -> None:
    def doubled(held: Held) -> Held:
        return {**held, W1: held[W1] + 1}

    where = f"in 1 of 12 parameters ({W1}) on ranks [1,2]"
    assert changed("parameters", doubled, 1, 2) == [f"{CHANGED}; {NOT_THOSE} {where}"]
    swapped = changed("parameters", lambda held: {**held, W1: held[W3], W3: held[W1]}, 1, 2)
    assert swapped == [f"parameters exchanged; parameters {W1} and {W3} are swapped by the checkpoint on ranks [1,2]"]


def test_what_is_wrong_on_any_rank_must_be_the_seeds_or_of_one_other_moment() -> None:
    trial = resumed(TP_2, TP_2)
    first = trial.saved[0].ranks
    older = {rank: evidence.steps[0].parameters[W1] for rank, evidence in first.items()}
    begun = {rank: next(t.value for t in evidence.parameters if t.fqn == W1) for rank, evidence in first.items()}

    def with_w1(values: dict[int, np.ndarray]) -> list[str]:
        changed = trial
        for rank, value in values.items():
            changed = with_resumed(changed, rank, "parameters", lambda held, value=value: {**held, W1: value})
        return told(changed)

    where = f"in 1 of 12 parameters ({W1})"
    assert with_w1({0: begun[0], 1: older[1]}) == [f"{CHANGED}; {NOT_THOSE} {where}"]
    assert with_w1({1: older[1]}) == [f"{CHANGED}; {NOT_THOSE} {where} on rank 1: they are those after step 1"]
    not_loaded = f"parameters not loaded; {W1} was not loaded from the checkpoint"
    assert with_w1(begun) == [f"{not_loaded}: still the seed's values"]
    assert with_w1({1: begun[1]}) == [f"{not_loaded} on rank 1: still the seed's values"]


# ---- the optimizer


def of(fqns: tuple[str, ...], change: Callable[[str, np.ndarray], np.ndarray | None]) -> Callable[[Held], Held]:
    """What the optimizer keeps of these parameters, by its name for it; None: nothing."""

    def state(held: Held) -> Held:
        made = {fqn: {name: change(name, value) for name, value in held[fqn].items()} for fqn in fqns}
        return {**held, **{f: {k: v for k, v in kept.items() if v is not None} for f, kept in made.items()}}

    return state


def from_other(held: Held, one: str, other: str, *names: str) -> Held:
    """Two parameters have these of each other."""
    mine, theirs = held[one], held[other]
    return {
        **held,
        one: mine | {name: theirs[name] for name in names},
        other: theirs | {name: mine[name] for name in names},
    }


LOST, BOTH = "optimizer state lost; ", "exp_avg and exp_avg_sq"
WITHOUT, NOT_SAVED = f"{LOST}resumed without optimizer state:", f"{LOST}optimizer state is not what was saved:"
ROUNDED = f"{LOST}optimizer state comes back rounded to float32 from the checkpoint:"
IN_2 = f"in 2 of 12 parameters ({W1}, {W3})"
ANEW = "AdamW's bias correction restarts"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (of((W1, W3), lambda name, value: None), f"{WITHOUT} {BOTH} are missing {IN_2}, after 2 steps"),
        (
            of((W1, W3), lambda name, value: None if name == "exp_avg" else value),
            f"{WITHOUT} exp_avg is missing {IN_2}, after 2 steps",
        ),
        (
            of((W1, W3), lambda name, value: value if name == "exp_avg" else 0 * value),
            f"{WITHOUT} exp_avg_sq is zero {IN_2}, after 2 steps",
        ),
        (of((W1, W3), lambda name, value: 0 * value), f"{WITHOUT} {BOTH} are zero {IN_2}, after 2 steps"),
        (
            of((W1, W3), lambda name, value: None if name == "exp_avg" else 0 * value),
            f"{NOT_SAVED} {BOTH} {IN_2}",
        ),
        (
            lambda held: of((W1,), lambda name, value: 2 * value)(of((W3,), lambda name, value: 0 * value)(held)),
            f"{NOT_SAVED} {BOTH} {IN_2}",
        ),
        (
            of((W1, W3), lambda name, value: through(np.float32, value)),
            f"{ROUNDED} {BOTH} {IN_2}",
        ),
        (
            of((W3,), lambda name, value: through(np.float32, value) if name == "exp_avg" else 2 * value),
            f"{NOT_SAVED} {BOTH} in 1 of 12 parameters ({W3})",
        ),
        (
            lambda held: from_other(held, W1, W3, "exp_avg", "exp_avg_sq"),
            f"{LOST}optimizer state is swapped: {W1} resumed with {BOTH} of {W3}",
        ),
        (
            lambda held: from_other(held, W1, W3, "exp_avg_sq"),
            f"{LOST}optimizer state is swapped: {W1} resumed with exp_avg_sq of {W3}",
        ),
        (
            lambda held: of((WEIGHT, NORM), lambda name, value: 2 * value)(
                from_other(held, W1, W3, "exp_avg", "exp_avg_sq")
            ),
            f"{LOST}optimizer state is swapped: {W1} resumed with {BOTH} of {W3}",
        ),
        (
            lambda held: (
                held
                | {
                    W1: held[W1] | {"exp_avg": 2 * held[W1]["exp_avg"]},
                    W3: held[W3] | {"exp_avg_sq": 2 * held[W3]["exp_avg_sq"]},
                }
            ),
            f"{NOT_SAVED} {BOTH} {IN_2}",
        ),
        (
            lambda held: (
                held
                | {W1: held[W1] | {"exp_avg": held[W3]["exp_avg"]}}
                | {W3: {name: 2 * value for name, value in held[W3].items()}}
            ),
            f"{LOST}optimizer state is swapped: {W1} resumed with exp_avg of {W3}",
        ),
        (
            of((W1, W3), lambda name, value: 0 * value if name == "step" else value),
            f"{LOST}the optimizer's step counter is 0 after resuming, saved 2 {IN_2}: {ANEW}",
        ),
        (
            of((W1, W3), lambda name, value: None if name == "step" else value),
            f"{LOST}the optimizer's step counter is missing after resuming, saved 2 {IN_2}: {ANEW}",
        ),
        (
            of((W1, W3), lambda name, value: value + 1 if name == "step" else value),
            f"{LOST}the optimizer's step counter is 3 after resuming, saved 2 {IN_2}",
        ),
    ],
)
def test_what_became_of_the_optimizers_state_is_told_of_all_of_it_that_is_other(
    change: Callable[[Held], Held], text: str
) -> None:
    assert changed("optimizer_state", change) == [text]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            of((W1,), lambda name, value: 0 * value),
            f"{WITHOUT} {BOTH} are zero in 1 of 12 parameters ({W1}) on ranks [1,3], after 2 steps",
        ),
        (
            lambda held: from_other(held, W1, W3, "exp_avg", "exp_avg_sq"),
            f"{LOST}optimizer state is swapped: {W1} resumed with {BOTH} of {W3} on ranks [1,3]",
        ),
        (
            of((W1,), lambda name, value: 2 * value),
            f"{NOT_SAVED} {BOTH} in 1 of 12 parameters ({W1}) on ranks [1,3]",
        ),
        (
            of((W1,), lambda name, value: 0 * value if name == "step" else value),
            f"{LOST}the optimizer's step counter is 0 after resuming, saved 2 in 1 of 12 parameters ({W1}) on ranks [1,3]:"
            f" {ANEW}",
        ),
    ],
)
def test_state_that_came_back_otherwise_on_some_ranks_is_told_with_these(
    change: Callable[[Held], Held], text: str
) -> None:
    assert changed("optimizer_state", change, 1, 3) == [text]


def test_averages_alone_are_told_where_counters_of_other_parameters_are_lost_too() -> None:
    def both(held: Held) -> Held:
        halved = of((W1,), lambda name, value: value / 2 if name == "exp_avg" else value)(held)
        return of((W3,), lambda name, value: None if name == "step" else value)(halved)

    assert changed("optimizer_state", both) == [f"{NOT_SAVED} exp_avg in 1 of 12 parameters ({W1})"]
