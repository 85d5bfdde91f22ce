"""What a checkpoint holds that was not trained, and what it lacks, told by kind. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from literal import judged, tiny_case, trial_of, with_parameter, with_step
from resuming import FSDP_4, TP_2, WEIGHT

from harness.diagnosis.resume import wrong_checkpoint
from harness.diagnosis.words import finding_line
from harness.evidence.checkpoint_index import SavedTensor
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.report.finding_text import sentence
from harness.spec.case import Saved

W1, W3, NORM = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight", "norm.weight"
Tensors = tuple[SavedTensor, ...]


def saving() -> Trial:
    """The launch that saves after step 2."""
    return trial_of(tiny_case(FSDP_4, resume=(Saved(2, TP_2),))).saved[0]


def holding(change: Callable[[Tensors], Tensors], trial: Trial | None = None) -> Trial:
    trial = trial or saving()
    assert trial.run.checkpoint is not None
    held = replace(trial.run.checkpoint, tensors=change(trial.run.checkpoint.tensors))
    return replace(trial, run=replace(trial.run, checkpoint=held))


def told(trial: Trial) -> tuple[str, ...]:
    """The cause, and what is said below it before what the check found."""
    result = judged("checkpoint", trial)
    assert result.verdict is Verdict.FAIL
    (fact,) = wrong_checkpoint(trial, {"checkpoint": result})
    *also, line = fact.lines
    assert (fact.cause.kind, fact.checks, fact.symptom) == ("checkpoint", ("checkpoint",), False)
    assert line == finding_line(result) and {label for label, _ in also} <= {"also"}
    return (cause_line(fact.cause), *(text for _, text in also))


def without_state_of(fqn: str) -> Trial:
    """No rank's optimizer keeps anything of it."""
    trial = saving()
    for rank, evidence in trial.ranks.items():
        state = evidence.steps[1].optimizer_state
        trial = with_step(trial, rank, 2, optimizer_state={of: kept for of, kept in state.items() if of != fqn})
    return trial


def copies(tensors: Tensors, under: str, *fqns: str) -> Iterator[SavedTensor]:
    """Another tensor like that of each parameter."""
    return (replace(one, name=f"{under}.{one.fqn}") for one in tensors if one.name in {f"model.{f}" for f in fqns})


def in_type(tensors: Tensors, dtype: str, name: Callable[[str], bool]) -> Tensors:
    return tuple(replace(one, dtype=dtype) if name(one.name) else one for one in tensors)


def without(tensors: Tensors, *names: str) -> Tensors:
    return tuple(one for one in tensors if one.name not in names)


def of_nothing(*names: str) -> Tensors:
    return tuple(SavedTensor(name, "", (4,), "float32", 4) for name in names)


TOLD = "the checkpoint of step 2 "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda all_: (*all_, *copies(all_, "ema", WEIGHT)),
            [f"holds 2 tensors, expected one, in 1 of 12 parameters ({WEIGHT}): ema.* and model.*"],
        ),
        (
            lambda all_: (*copies(all_, "teacher", NORM, W1), *copies(all_, "ema", W1, NORM), *all_),
            [f"holds 3 tensors, expected one, in 2 of 12 parameters ({W1}, {NORM}): ema.* and model.* and teacher.*"],
        ),
        (
            lambda all_: (*all_, *copies(all_, "ema", W1), *copies(all_, "teacher", W3)),
            [
                f"holds 2 tensors, expected one, in 1 of 12 parameters ({W1}): ema.* and model.*",
                f"it holds 2 tensors, expected one, in 1 of 12 parameters ({W3}): model.* and teacher.*",
            ],
        ),
        (
            lambda all_: (*all_, *of_nothing("cache", "more")),
            ["holds 2 tensors of no parameter: cache"],
        ),
        (
            lambda all_: in_type(all_, "bfloat16", lambda name: name.startswith("model.")),
            ["holds parameters in bfloat16, trained in float64, in every parameter"],
        ),
        (
            lambda all_: in_type(all_, "float32", lambda name: name in (f"optimizer.{W3}.exp_avg", f"model.{W1}")),
            [
                f"holds parameters in float32, trained in float64, in 1 of 12 parameters ({W1})",
                f"it holds exp_avg in float32, trained in float64, in 1 of 12 parameters ({W3})",
            ],
        ),
        (
            lambda all_: in_type(
                (*all_, *copies(all_, "ema", W1)), "float32", lambda name: name in (f"model.{W1}", f"model.{W3}")
            ),
            [
                f"holds 2 tensors, expected one, in 1 of 12 parameters ({W1}): ema.* and model.*",
                f"it holds parameters in float32, trained in float64, in 1 of 12 parameters ({W3})",
            ],
        ),
        (
            lambda all_: without(all_, f"model.{W3}", f"model.{W1}", f"optimizer.{NORM}.exp_avg_sq"),
            [
                f"lacks parameters in 2 of 12 parameters ({W1}, {W3})",
                f"it lacks exp_avg_sq in 1 of 12 parameters ({NORM})",
            ],
        ),
        (
            lambda all_: (
                *without(in_type(all_, "float32", lambda n: n == f"model.{W3}"), f"model.{W1}"),
                *of_nothing("x"),
            ),
            [
                "holds 1 tensor of no parameter: x",
                f"it holds parameters in float32, trained in float64, in 1 of 12 parameters ({W3})",
                f"it lacks parameters in 1 of 12 parameters ({W1})",
            ],
        ),
    ],
)
def test_what_a_checkpoint_holds_and_lacks_is_told_by_kind(
    change: Callable[[Tensors], Tensors], said: list[str]
) -> None:
    assert told(holding(change)) == (TOLD + said[0], *said[1:])


def test_state_of_a_parameter_of_which_the_optimizer_keeps_none_is_expected_nowhere_however_often_it_is_saved() -> None:
    trial = without_state_of(W1)
    where = f"expected none, in 1 of 12 parameters ({W1})"
    assert told(trial) == (
        f"{TOLD}holds 1 tensor, {where}: optimizer.*.exp_avg",
        f"it holds 1 tensor, {where}: optimizer.*.exp_avg_sq",
    )
    again = SavedTensor(f"again.{W1}.exp_avg", W1, (8, 4), "float32", 32)
    trial = holding(lambda all_: (*without(all_, f"optimizer.{W1}.exp_avg_sq"), again), trial)
    assert told(trial) == (f"{TOLD}holds 2 tensors, {where}: again.*.exp_avg and optimizer.*.exp_avg",)


def test_types_in_which_ranks_trained_are_all_told() -> None:
    trial = holding(lambda all_: in_type(all_, "bfloat16", lambda name: name == f"model.{W1}"))
    trial = with_parameter(trial, 1, W1, dtype="float32")
    assert told(trial) == (
        f"{TOLD}holds parameters in bfloat16, trained in float32 or float64, in 1 of 12 parameters ({W1})",
    )


def test_where_all_tensors_are_there_once_and_in_their_types_the_check_says_what_is_wrong() -> None:
    short = lambda one: replace(one, shape=(4, 4), numbers=16) if one.name == f"model.{W1}" else one  # noqa: E731
    trial = holding(lambda all_: tuple(map(short, all_)))
    found = judged("checkpoint", trial).findings[0]
    assert (found.name, found.expected, found.observed) == (W1, (8, 4), (4, 4))
    assert told(trial) == (f"{TOLD}does not hold what was trained: {sentence(found)}",)


def test_a_checkpoint_is_told_of_where_it_was_read_and_fails_its_check() -> None:
    trial = holding(lambda all_: without(all_, f"model.{W1}"))
    assert not list(wrong_checkpoint(trial, {}))
    unread = replace(trial, run=replace(trial.run, checkpoint=None))
    assert not list(wrong_checkpoint(unread, {"checkpoint": judged("checkpoint", trial)}))
    right = saving()
    assert judged("checkpoint", right).verdict is Verdict.PASS
