"""The check `completed`: ranks that ended early, lost evidence, missing parameters. Literal evidence, no ranks."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
from checked import EMBEDDING, findings, like
from literal import (
    tiny_case,
    trial_of,
    with_rank,
    with_step,
    without_rank,
)

from harness.core.causes import diagnose
from harness.core.checks import completed, judge
from harness.core.evidence.records import Exit
from harness.core.judge.result import Verdict


def with_exit(trial, exit: Exit):
    exits = tuple(exit if old.rank == exit.rank else old for old in trial.run.exits)
    return replace(trial, run=replace(trial.run, exits=exits))


# ---- completed


def test_a_rank_that_died_is_shown_before_those_that_waited() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_exit(trial, Exit(0, "killed", error="time limit", last_collective="all_reduce over [0,1]"))
    trial = with_exit(trial, Exit(1, "signal", signal="SIGKILL", blamed=True, stack="train.py:7 in step\n"))
    assert findings("completed", without_rank(trial, 1)) == (
        like(1, "exit code 0", "died by SIGKILL\ntrain.py:7 in step"),
        like(0, "exit code 0", "killed: time limit; last collective all_reduce over [0,1]", quantity="only waited"),
    )


def test_of_fsdp1s_own_clipping_in_float64_the_reason_is_told_and_what_to_do() -> None:
    error = (
        "RuntimeError: linalg.vector_norm: the dtype of the input (Double) should be convertible without narrowing to the "
        "specified dtype (Float)"
    )
    trial = with_exit(
        trial_of(tiny_case("single")), Exit(0, "raised", code=1, blamed=True, error=error, stack="a.py:7")
    )
    (told,) = findings("completed", without_rank(trial, 0))
    assert told.observed.splitlines() == [f"raised: {error}", completed.remedy_text(error), "a.py:7"]
    assert "--dtype float32" in completed.remedy_text(error) and 'dtypes = ("float32",)' in completed.remedy_text(error)
    assert completed.remedy_text("RuntimeError: linalg.vector_norm: expected a floating point tensor") == ""
    found = diagnose(trial, judge(trial))
    assert found is not None and ("why", completed.remedy_text(error)) in found.evidence


def test_a_rank_whose_file_was_damaged_is_no_verdict_on_the_trainer() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    trial = replace(trial, run=replace(trial.run, unreadable={1: "rank_01.npz: damaged"}))
    result = completed.check(trial)
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        "the evidence of rank 1 cannot be read: rank_01.npz: damaged",
    )
    trial = with_exit(trial, Exit(0, "raised", error="ValueError", blamed=True))
    assert completed.check(trial).verdict is Verdict.FAIL


def test_a_rank_that_left_no_file_has_not_completed() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    assert findings("completed", trial) == (like(1, "an evidence file", None),)


def test_ranks_lost_with_their_launcher_are_no_verdict_on_the_trainer() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in (0, 1):
        lost = Exit(rank, "lost", error="the rank server ended", blamed=rank == 1)
        trial = without_rank(with_exit(trial, lost), rank)
    result = completed.check(trial)
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "rank 0 was lost: the rank server ended")
    trial = with_exit(trial, Exit(1, "signal", signal="SIGSEGV", blamed=True))
    assert completed.check(trial).verdict is Verdict.FAIL


def test_a_rank_of_whose_end_nothing_is_known_has_not_completed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = replace(trial, run=replace(trial.run, exits=trial.run.exits[:1]))
    assert findings("completed", trial) == (like(1, "exit code 0", "exit not reported"),)


def test_a_launch_of_fewer_ranks_than_asked_has_not_completed() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2"))
    assert findings("completed", trial)[0] == like((), 4, 2, quantity="launch", unit="ranks started")


def test_ranks_that_each_trained_in_a_world_of_their_own_are_named() -> None:
    trial = with_rank(trial_of(tiny_case("ddp_2")), 1, rank=0, world_size=1)
    assert findings("completed", trial) == (like(1, "rank 1 of 2", "rank 0 of 1", quantity="its own place"),)


def test_a_parameter_that_a_rank_does_not_have_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    kept = tuple(t for t in trial.ranks[1].parameters if t.fqn != EMBEDDING)
    assert findings("completed", with_rank(trial, 1, parameters=kept)) == (
        like(1, "one", None, kind="parameter", name=EMBEDDING, quantity="value at the start"),
        *(
            like(1, None, "one", step=step, kind="parameter", name=EMBEDDING, quantity=what)
            for step in (1, 2, 3)
            for what in ("gradient", "update")
        ),
    )


def test_a_gradient_missing_in_the_last_step_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rest = {fqn: g for fqn, g in trial.ranks[1].steps[2].gradients.items() if fqn != "norm.weight"}
    assert findings("completed", with_step(trial, 1, 3, gradients=rest)) == (
        like(1, "one", None, step=3, name="norm.weight", kind="parameter", quantity="gradient"),
    )


def test_a_rank_of_which_no_optimizer_was_seen_is_told_what_is_seen() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    first = replace(trial.ranks[0].steps[0], parameters={}, lr=None)
    (steps, *_) = findings("completed", with_rank(trial, 0, steps=(first,)))
    assert (steps.expected, steps.observed) == ((1, 2, 3), (1,))
    assert steps.note.endswith(completed.UNSEEN_OPTIMIZER)
    (fewer, *_) = findings("completed", with_rank(trial, 0, steps=trial.ranks[0].steps[:1]))
    assert fewer.note == "1 in all: passes that no optimizer's step follows count to the next one"


# ---- FSDP units


def test_a_disk_that_took_no_evidence_is_no_verdict_on_the_trainer_however_it_was_raised() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for error in ("EvidenceError: full", "OSError: [Errno 28] no space; raised again as EvidenceError: full"):
        full = with_exit(trial, Exit(1, "raised", error=error, blamed=True))
        assert completed.check(without_rank(full, 1)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_limit_of_the_machine_on_what_is_written_is_no_verdict_on_the_trainer(number: int) -> None:
    error = f"OSError: {OSError(number, os.strerror(number), 'model.pt')}"
    full = with_exit(trial_of(tiny_case("fsdp_2")), Exit(1, "raised", error=error, blamed=True))
    result = completed.check(without_rank(full, 1))
    assert result.verdict is Verdict.UNKNOWN and error in result.note
    other = with_exit(full, Exit(1, "raised", error="OSError: [Errno 2] No such file: 'x'", blamed=True))
    assert completed.check(without_rank(other, 1)).verdict is Verdict.FAIL


UNABLE = {"how": "raised", "error": "ImportError: x; raised again as CannotStart: mine.py", "blamed": True}
MADE = "init_process_group #0 of group [0,1]"


@pytest.mark.parametrize(
    ("exits", "verdict"),
    [
        ((Exit(0, **UNABLE), Exit(1, **UNABLE)), Verdict.UNKNOWN),
        (
            (Exit(0, **{**UNABLE, "error": "CannotStart: mine.py: cannot be loaded"}), Exit(1, "killed")),
            Verdict.UNKNOWN,
        ),
        ((Exit(0, "killed", last_collective=MADE), Exit(1, **UNABLE, last_collective=MADE)), Verdict.UNKNOWN),
        (
            (Exit(0, "raised", error="E: closed", last_collective=MADE), Exit(1, **UNABLE, last_collective=MADE)),
            Verdict.UNKNOWN,
        ),
        ((Exit(0, "killed", last_collective=MADE), Exit(1, **UNABLE)), Verdict.FAIL),
        ((Exit(0, "killed", last_collective="all_reduce #0"), Exit(1, **UNABLE, last_collective=MADE)), Verdict.FAIL),
        ((Exit(0, "raised", error="ValueError: x", blamed=True), Exit(1, **UNABLE)), Verdict.FAIL),
        ((Exit(0, "ok"), Exit(1, **UNABLE)), Verdict.FAIL),
    ],
)
def test_what_keeps_all_ranks_from_starting_is_no_verdict_on_the_trainer(
    exits: tuple[Exit, ...], verdict: Verdict
) -> None:
    """Where one rank got further than the others, it may be the trainer that keeps them from it."""
    trial = without_rank(without_rank(trial_of(tiny_case("fsdp_2")), 0), 1)
    for some in (exits, exits[::-1]):
        assert completed.check(with_exit(with_exit(trial, some[0]), some[1])).verdict is verdict


def test_a_rank_that_left_evidence_had_started() -> None:
    trial = with_exit(trial_of(tiny_case("fsdp_2")), Exit(1, **UNABLE))
    ended = with_exit(without_rank(trial, 1), Exit(0, "killed"))
    assert completed.check(ended).verdict is Verdict.FAIL
    assert completed.check(without_rank(ended, 0)).verdict is Verdict.UNKNOWN
