"""Ranks that died, hung, raised, left early or left incomplete evidence, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    EMBEDDING,
    NORM,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    here,
    seen,
    seen_text,
)
from literal import (
    ADAMW,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
    without_rank,
    without_step,
)

from harness.checks.completed import why
from harness.diagnosis.hypothesis import Fact
from harness.diagnosis.processes import incomplete, process_failed
from harness.evidence.records import Exit
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims

# ---- processes


def with_exits(trial: Trial, *exits: Exit) -> Trial:
    """These ranks left no evidence."""
    ended = {exit.rank: exit for exit in trial.run.exits} | {exit.rank: exit for exit in exits}
    for exit in exits:
        trial = without_rank(trial, exit.rank)
    return replace(trial, run=replace(trial.run, exits=tuple(ended[rank] for rank in sorted(ended))))


def waited(*ranks: int) -> list[Exit]:
    return [Exit(rank, "raised", 1, error="RuntimeError: Connection closed by peer") for rank in ranks]


def test_a_rank_that_died() -> None:
    last = "all_gather #7 of group [0-3] (step 2, forward, 1.9 kB)"
    dead = Exit(
        1,
        "signal",
        signal="SIGKILL",
        error="died by SIGKILL, not sent by the harness.",
        blamed=True,
        last_collective=last,
    )
    expect(
        with_exits(fsdp_4(), dead, *waited(0, 2, 3)),
        """\
rank 1 died by SIGKILL: not sent by the harness
  rank 1: last collective all_gather #7 of group [0-3] (step 2, forward, 1.9 kB)
  not to blame: ranks [0,2,3] only waited""",
    )


def test_a_rank_that_hung() -> None:
    why = "no answer for 30 s; ranks 0, 2 waited for it in all_reduce #3"
    hung = Exit(3, "killed", signal="SIGKILL", error=why, blamed=True, stack="data.py:12 in read\ntrain.py:7 in step\n")
    expect(
        with_exits(fsdp_4(), hung, *waited(0, 1, 2)),
        """\
rank 3 hung: no answer for 30 s; ranks 0, 2 waited for it in all_reduce #3
  stack: data.py:12 in read
  : train.py:7 in step
  not to blame: ranks [0-2] only waited""",
    )


def test_a_rank_that_raised() -> None:
    raised = Exit(0, "raised", 1, error="ValueError: no such token: 9", blamed=True, stack="train.py:7 in step\n")
    expect(
        with_exits(fsdp_4(), raised, *waited(1, 2, 3)),
        """\
rank 0 raised: ValueError: no such token: 9
  stack: train.py:7 in step
  not to blame: ranks [1-3] only waited""",
    )


def test_a_rank_that_left_early() -> None:
    left = Exit(2, "ok", 0, error="exited while others still waited for a collective", blamed=True)
    expect(
        with_exits(fsdp_4(), left, *waited(0, 1, 3)),
        """\
rank 2 left early: exited while others still waited for a collective
  not to blame: ranks [0,1,3] only waited""",
    )


def test_several_ranks_that_failed_alike_share_a_clause_and_others_have_their_own() -> None:
    blamed = [Exit(rank, "raised", 1, error="MemoryError: 8 GB", blamed=True) for rank in (0, 1)]
    blamed.append(Exit(3, "signal", signal="SIGSEGV", error="died by SIGSEGV, not sent by the harness", blamed=True))
    expect(
        with_exits(fsdp_4(), *blamed, *waited(2)),
        """\
ranks [0,1] raised: MemoryError: 8 GB; rank 3 died by SIGSEGV: not sent by the harness
  not to blame: rank 2 only waited""",
    )


def test_ranks_that_were_only_slow() -> None:
    slow = "killed by the harness at the time limit of 9 s, still at work: --timeout gives it more"
    expect(
        with_exits(fsdp_4(), *(Exit(rank, "killed", signal="SIGKILL", error=slow) for rank in range(4))),
        """\
too slow: ranks [0-3] killed by the harness at the time limit of 9 s, still at work: --timeout gives it more""",
    )


def test_ranks_of_which_none_can_be_blamed() -> None:
    killed = [Exit(rank, "killed", signal="SIGKILL", error="no answer for 30 s") for rank in range(4)]
    expect(
        with_exits(fsdp_4(), *killed),
        """\
ranks [0-3] did not finish, and nothing shows which of them is the cause
  rank 0: killed: no answer for 30 s
  rank 1: killed: no answer for 30 s
  rank 2: killed: no answer for 30 s
  rank 3: killed: no answer for 30 s""",
    )


def test_a_rank_that_left_nothing() -> None:
    expect(
        without_rank(fsdp_4(), 1),
        """\
rank 1 left no evidence: its process ended with code 0 and wrote no file
  completed: rank 1: expected an evidence file, observed none""",
    )


def test_a_rank_without_steps() -> None:
    expect(
        with_rank(fsdp_4(), 1, steps=()),
        """\
rank 1 trained no step, requested 3 steps
  completed: rank 1, steps: expected [1, 2, 3], observed none""",
    )


def test_a_rank_that_stopped_a_step_early() -> None:
    expect_first(without_step(fsdp_4(), 1, 3), """rank 1 took 2 optimizer steps, requested 3 steps""")


def test_fewer_ranks_than_asked() -> None:
    expect_first(
        trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2")),
        """2 ranks were launched, requested 4 (dp_replicate 2 x dp_shard 2)""",
    )
    alone = trial_of(tiny_case("ddp_2"), tiny_case("single"))
    assert seen_text(incomplete, alone, "completed") == "1 rank was launched, requested 2 (dp_replicate 2)"


def test_ranks_that_each_trained_alone() -> None:
    trial = with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=0, world_size=1))
    expect_first(trial, """ranks did not find each other: ranks [0-3] ran as rank 0 of 1, requested 4 ranks""")


def test_a_parameter_that_a_rank_does_not_hold() -> None:
    trial = fsdp_4()
    kept = tuple(tensor for tensor in trial.ranks[1].parameters if tensor.fqn != EMBEDDING)
    expect_first(
        with_rank(trial, 1, parameters=kept), """rank 1 does not hold tok_embeddings.weight, requested 12 parameters"""
    )


def test_a_parameter_that_is_frozen() -> None:
    start = fsdp_4().reference.weights[NORM]
    trial = trained_otherwise(
        fsdp_4(),
        gradients=lambda step, own: {**own, NORM: 0 * own[NORM]},
        left=lambda step, of: {**of, NORM: start},
    )
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        rest = {f: g for f, g in trial.ranks[rank].steps[step - 1].gradients.items() if f != NORM}
        trial = with_step(trial, rank, step, gradients=rest)
    assert first_line(trial) == (
        "ranks [0-3] have no gradient of norm.weight in step 1: none was in place as the optimizer stepped"
    )


def test_a_parameter_in_no_optimizer_is_told_by_its_gradients_that_nothing_sets_to_zero() -> None:
    sums: dict[int, np.ndarray] = {}

    def added(step: int, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sums[step] = own[NORM] + sums.get(step - 1, 0)
        return {**own, NORM: sums[step]}

    recipe, start = replace(ADAMW, max_norm=None), trial_of(tiny_case("fsdp_2")).reference.weights[NORM]
    trial = trained_otherwise(
        trial_of(tiny_case("fsdp_2", recipe)), gradients=added, left=lambda step, of: {**of, NORM: start}
    )
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        seen = trial.ranks[rank].steps[step - 1]
        kept = {fqn: value for fqn, value in seen.parameters.items() if fqn != NORM}
        trial = with_step(trial, rank, step, parameters=kept)
    assert first_line(trial) == (
        "ranks [0,1] do not update norm.weight in step 1: frozen, unused, or in no optimizer that steps;"
        " nothing sets their gradients to zero either, so no optimizer has them"
    )


def test_a_rank_that_issues_another_collective_is_named_by_it_and_not_by_its_exception() -> None:
    other = "issued barrier #3 of group [0,1] (step 2, other, 0 B) where rank 1 issued all_reduce #3 of group [0,1]"
    culprit = Exit(0, "raised", 1, error="RuntimeError: Timed out", blamed=True, reason=other, diverged=True)
    waiting = Exit(1, "raised", 1, error="RuntimeError: Connection closed by peer")
    expect_first(
        with_exits(trial_of(tiny_case("fsdp_2")), culprit, waiting),
        """rank 0 issued barrier #3 of group [0,1] (step 2, other, 0 B) where rank 1 issued all_reduce #3 of group [0,1], then raised: RuntimeError: Timed out""",
    )


# ---- layout and processes


def test_a_rank_that_ended_in_a_way_of_its_own_is_told_by_it() -> None:
    exits = [Exit(1, "vanished", 1, blamed=True), *waited(0, 2, 3)]
    assert first_line(with_exits(fsdp_4(), *exits)) == "rank 1 vanished"


def test_three_kinds_of_culprits_are_told_and_no_more() -> None:
    blamed = [Exit(rank, "raised", 1, error=f"ValueError: {rank}", blamed=True) for rank in range(4)]
    assert first_line(with_exits(fsdp_4(), *blamed)) == "; ".join(f"rank {r} raised: ValueError: {r}" for r in range(3))


def test_where_nobody_can_be_blamed_the_first_ones_stack_is_shown() -> None:
    killed = [
        Exit(rank, "killed", signal="SIGKILL", error="no answer", stack=f"{rank}:1\n {rank}:2") for rank in (1, 2)
    ]
    found = seen(process_failed, with_exits(fsdp_4(), *killed))
    assert (
        found is not None
        and cause_line(found.cause) == "ranks [1,2] did not finish, and nothing shows which of them is the cause"
    )
    assert found.lines == (
        ("rank 1", "killed: no answer"),
        ("rank 2", "killed: no answer"),
        ("stack", "1:1"),
        ("", "1:2"),
    )
    told = seen_text(process_failed, with_exits(fsdp_4(), killed[0]))
    assert told == "rank 1 did not finish, and nothing shows which of them is the cause"


def test_ranks_that_take_themselves_for_others_are_not_said_to_be_alone() -> None:
    trial = with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=3 - rank))
    assert first_line(trial) == "ranks do not know who they are: ranks [0-3] ran as rank 3 of 4, requested 4 ranks"


def test_a_parameter_of_no_model_is_named() -> None:
    trial = fsdp_4()
    extra = replace(trial.ranks[2].parameters[0], fqn="a.buffer")
    trial = with_rank(trial, 2, parameters=(*trial.ranks[2].parameters, extra))
    assert first_line(trial) == "rank 2 holds a.buffer, which the model does not have"


def test_a_parameter_of_another_stage_is_told_with_its_owner() -> None:
    trial = fsdp_4()
    without = {fqn: cut for fqn, cut in trial.plan.slices[2].items() if fqn != NORM}
    trial = replace(trial, plan=replace(trial.plan, slices={**trial.plan.slices, 2: without}))
    assert first_line(trial) == f"rank 2 holds {NORM}, which belongs to ranks [0,1,3]"


# ---- processes


def test_of_many_that_failed_four_are_told_and_of_a_stack_four_lines() -> None:
    stack = "\n".join(f"line {number}" for number in range(6))
    exits = tuple(Exit(rank, "killed", signal="SIGKILL", error="no answer", stack=stack) for rank in range(6))
    trial = fsdp_4()
    found = seen(process_failed, replace(trial, run=replace(trial.run, exits=exits)))
    assert found is not None
    assert [label for label, _ in found.lines] == [*(f"rank {rank}" for rank in range(4)), "stack", "", "", ""]
    assert [text for _, text in found.lines[4:]] == [f"line {number}" for number in range(4)]


def test_steps_that_a_resumed_launch_left_out_are_told_with_those_it_was_requested() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),)))
    short = with_rank(trial, 1, steps=trial.ranks[1].steps[:1])
    assert seen_text(incomplete, short, "completed") == "rank 1 took 1 optimizer step, requested steps 2 to 3"


def test_how_a_rank_ended_is_told_without_its_full_stop_and_first_what_it_issued() -> None:
    def ended(error: str, **why: Any) -> str:
        exits = (Exit(0, "raised", 1, error=error, blamed=True, **why), *DDP_2.run.exits[1:])
        return seen_text(process_failed, replace(DDP_2, run=replace(DDP_2.run, exits=exits)))

    assert ended("ValueError: X.") == "rank 0 raised: ValueError: X"
    assert ended("lost", reason="issued a", diverged=True) == "rank 0 issued a, then raised: lost"
    assert ended("lost", reason="the first to fail") == "rank 0 raised: lost; the first to fail"


def test_the_last_collectives_of_two_culprits_are_told() -> None:
    blamed = tuple(Exit(rank, "raised", 1, error="x", blamed=True, last_collective="all_gather") for rank in range(4))
    found = seen(process_failed, replace(fsdp_4(), run=replace(fsdp_4().run, exits=blamed)))
    assert found is not None and found.lines == (
        ("rank 0", "last collective all_gather"),
        ("rank 1", "last collective all_gather"),
    )


def test_steps_beyond_those_requested_are_told_without_only() -> None:
    trial = fsdp_4()
    longer = with_rank(trial, 1, steps=(*trial.ranks[1].steps, replace(trial.ranks[1].steps[-1], step=4)))
    assert first_line(longer) == "rank 1 took 4 optimizer steps, requested 3 steps"


def test_an_error_of_torchs_that_says_no_reason_is_told_with_it_before_all_else() -> None:
    error = "RuntimeError: linalg.vector_norm: input (Double) must be without narrowing to dtype (Float)"
    raised = Exit(0, "raised", 1, error=error, blamed=True, last_collective="all_gather", stack="train.py:7 in step")
    found = seen(process_failed, with_exits(fsdp_4(), raised, *waited(1)))
    assert found == Fact(
        Cause("a process failed", f"rank 0 raised: {error}"),
        ("completed",),
        (
            ("why", why(error)),
            ("rank 0", "last collective all_gather"),
            ("stack", "train.py:7 in step"),
            ("not to blame", "rank 1 only waited"),
        ),
    )
    assert why(error)


def test_what_did_not_come_through_between_ranks_that_nobody_blames_is_told() -> None:
    lost = "what rank 1 sent to rank 2 did not arrive"
    killed = [Exit(rank, "killed", signal="SIGKILL", error="no answer", undelivered=lost) for rank in (1, 2)]
    found = seen(process_failed, with_exits(fsdp_4(), *killed))
    assert found == Fact(
        Cause("a process failed", f"ranks [1,2] did not finish: {lost}"),
        ("completed",),
        (("rank 1", "killed: no answer"), ("rank 2", "killed: no answer")),
    )


def left_behind(*ranks: int) -> Trial:
    left = {rank: (f"python loader.py {rank}", "tee log") for rank in ranks}
    exits = tuple(replace(exit, left=left.get(exit.rank, ())) for exit in DDP_2.run.exits)
    return replace(DDP_2, run=replace(DDP_2.run, exits=exits))


@pytest.mark.parametrize(("ranks", "who", "which"), [((0, 1), "ranks [0,1]", 0), ((1,), "rank 1", 1)])
def test_processes_that_ranks_left_behind_are_those_of_the_first(ranks: tuple[int, ...], who: str, which: int) -> None:
    told = f"{who} left a process behind: python loader.py {which}; tee log, which the harness ended"
    assert seen_text(incomplete, left_behind(*ranks), "completed") == told


FOLLOWING = ("completed", "initial_weights", "checkpoint", "features", "memory", "traffic", "schedule", "resume")


@pytest.mark.parametrize(
    ("trial", "told", "checks"),
    [
        (left_behind(1), "rank 1 left a process behind", FOLLOWING),
        (with_rank(DDP_2, 1, steps=()), "rank 1 trained no step", FOLLOWING),
        (with_rank(DDP_2, 1, parameters=()), "rank 1 does not hold", FOLLOWING),
        (without_rank(DDP_2, 1), "rank 1 left no evidence", ("completed", "loss")),
        (with_rank(DDP_2, 1, world_size=1), "ranks did not find each other", ("completed", "loss")),
        (trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2")), "2 ranks were launched", ("completed", "loss")),
    ],
)
def test_whole_ranks_that_are_missing_break_every_check_and_what_they_lack_those_of_it(
    trial: Trial, told: str, checks: tuple[str, ...]
) -> None:
    found = seen(incomplete, trial, "completed", "loss")
    assert found is not None and cause_line(found.cause).startswith(told)
    assert (found.cause.kind, found.checks) == ("incomplete", checks)
    assert found.lines == (here("completed"),)
