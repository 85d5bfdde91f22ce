"""Replicas that differ by request, that an optimizer keeps alike, and those of which only some parameters agree."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal import LAYOUTS, tiny_case, trial_of
from literal_recording import judged_of, summary, with_changes

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.request import neighbours
from harness.core.checks import all_checks, run_check
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import Collective, RankEvidence, Wrapper
from harness.core.evidence.summary_parts import Use
from harness.core.judge.local_training import averaging_steps, find_partly_equal, local_training_means
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import Flow
from harness.core.probe.clock import Clock
from harness.recording.cli.work.recording_report import exit_code
from harness.recording.judged import recorded
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_page import cost_rows

LOCAL = {"hooks": ("post_localSGD_hook",), "slices": 7, "shown": 2}


def replicas(*contents: dict[int, int], **changes: Any) -> Recording:
    ranks = [summary(rank, len(contents), contents=held, **changes) for rank, held in enumerate(contents)]
    return Recording(Path("run"), {one.rank: one for one in ranks})


def agreement(recording: Recording) -> Verdict:
    return judged_of("replica_agreement", [*recording.summaries.values()], ParallelDims(dp_replicate=2)).verdict


def test_replicas_that_are_averaged_from_time_to_time_are_local_training_and_no_finding() -> None:
    found = replicas({0: 1, 1: 2, 2: 3, 3: 9}, {0: 1, 1: 2, 2: 4, 3: 9}, **LOCAL)
    assert averaging_steps([*found.summaries.values()]) == (3,)
    assert (find_anomalies(found), exit_code(found), agreement(found)) == ([], PASSED, Verdict.PASS)


def test_replicas_of_local_training_that_no_step_leaves_alike_are_undecided_and_reported_first() -> None:
    found = replicas({0: 1, 1: 2, 2: 3, 3: 8}, {0: 1, 1: 2, 2: 4, 3: 9}, **LOCAL)
    assert [(one.label, one.ranks) for one in find_anomalies(found)] == [("NOT AVERAGED", (0, 1))]
    assert (exit_code(found), agreement(found)) == (NOT_JUDGED, Verdict.UNKNOWN)


BACKWARD = (Use("0,1", "all_reduce", "backward", "float32", 1, 400),)


def test_without_a_hook_replicas_that_reduce_gradients_and_differ_are_a_finding_though_they_agree_again() -> None:
    found = replicas({0: 1, 1: 2, 2: 3, 3: 9}, {0: 1, 1: 2, 2: 4, 3: 9}, slices=7, shown=2, uses=BACKWARD)
    assert [(one.label, one.step) for one in find_anomalies(found)] == [("REPLICAS DIFFER", 2)]
    assert (exit_code(found), agreement(found)) == (BROKEN, Verdict.FAIL)


@pytest.mark.parametrize("slices", [7, 0], ids=["under DDP", "of which nothing is claimed"])
def test_replicas_that_reduce_nothing_and_agree_again_are_averaged_which_is_local_training(slices: int) -> None:
    """As under no_sync with averages by hand."""
    found = replicas({0: 1, 1: 2, 2: 3, 3: 9}, {0: 1, 1: 2, 2: 4, 3: 9}, slices=slices, shown=2)
    assert local_training_means([*found.summaries.values()])
    assert (find_anomalies(found), exit_code(found), agreement(found)) == ([], PASSED, Verdict.PASS)


def test_of_replicas_that_differ_it_is_reported_whether_a_later_step_left_them_the_same() -> None:
    apart = replicas({0: 1, 1: 2, 2: 3, 3: 8}, {0: 1, 1: 2, 2: 4, 3: 9}, slices=7, shown=2, uses=BACKWARD)
    again = replicas({0: 1, 1: 2, 2: 3, 3: 9}, {0: 1, 1: 2, 2: 4, 3: 9}, slices=7, shown=2, uses=BACKWARD)
    assert ["again" in find_anomalies(one)[0].text for one in (apart, again)] == [False, True]


def unclaimed(*last: dict[str, int]) -> Recording:
    held = [{fqn: (1, value) for fqn, value in one.items()} for one in last]
    ranks = [summary(rank, len(last), unclaimed=one) for rank, one in enumerate(held)]
    return Recording(Path("run"), {one.rank: one for one in ranks})


def test_parameters_of_which_some_agree_and_some_do_not_are_named() -> None:
    found = unclaimed({"matrix": 5, "head": 6, "frozen": 1}, {"matrix": 5, "head": 7, "frozen": 1})
    (one,) = find_partly_equal(found.summaries.values())
    assert (one.ranks, one.equal, one.differ) == ((0, 1), ("matrix",), ("head",))
    assert [(one.label, one.ranks) for one in find_anomalies(found)] == [("PARTLY EQUAL", (0, 1))]
    assert exit_code(found) == NOT_JUDGED


@pytest.mark.parametrize("head", [6, 1])
def test_parameters_that_all_agree_or_that_only_frozen_ones_agree_on_are_no_anomaly(head: int) -> None:
    alike = unclaimed({"matrix": 5, "head": head}, {"matrix": 5, "head": head})
    assert find_anomalies(alike) == []
    assert find_anomalies(unclaimed({"matrix": 5, "head": 1}, {"matrix": 6, "head": 1})) == []


@pytest.mark.parametrize(
    ("op", "phase", "size", "rows"),
    [
        ("all_reduce", "backward", 400, 1),
        ("reduce", "backward", 400, 1),
        ("all_reduce", "backward", 4, 0),
        ("all_reduce", "forward", 400, 0),
        ("send", "pipeline", 400, 0),
    ],
    ids=["summed", "summed on one rank", "a norm", "tensor parallelism", "stages of a pipeline"],
)
def test_ranks_that_began_alike_and_add_up_gradients_and_of_which_all_parameters_differ_are_named(
    op: str, phase: str, size: int, rows: int
) -> None:
    """As of an optimizer that shares nothing of what it stepped on."""
    apart = unclaimed({"matrix": 5, "head": 1}, {"matrix": 6, "head": 1})
    told = {"uses": (Use("0,1", op, phase, "float32", 1, size),), "memory": {"parameters": 400}}
    found = replace(apart, summaries={rank: with_changes(one, **told) for rank, one in apart.summaries.items()})
    assert [(one.label, one.ranks) for one in find_anomalies(found)] == [("NOT KEPT EQUAL", (0, 1))] * rows
    assert exit_code(found) == (NOT_JUDGED if rows else PASSED)


@pytest.mark.parametrize(("moved", "rows"), [(100, 0), (200, 1), (250, 0), (400, 1)])
def test_gradients_that_ddp_reduces_several_times_a_step_are_reported_with_their_bytes(moved: int, rows: int) -> None:
    use = Use("0,1", "all_reduce", "backward", "float32", 4, moved)
    ranks = [
        summary(rank, 2, roles={"0,1": "replicated by ddp"}, uses=(use,), memory={"gradients": 100}) for rank in (0, 1)
    ]
    used = Use("0,1", "all_reduce", "backward", "int32", 2, 32)  # what find_unused_parameters agrees on
    for more in ((), (used,)):
        told = cost_rows([with_changes(one, uses=(use, *more)) for one in ranks])
        assert len([text for label, text in told if label == "reduced again"]) == rows


# ---- an optimizer that joins replicas in its step


Held = Callable[[int, int], int]
ALIKE: Held = lambda rank, step: 10 * step + rank % 2  # noqa: E731
APART: Held = lambda rank, step: 10 * step + rank * (step > 1) + rank % 2  # noqa: E731


def in_step(rank: int, evidence: RankEvidence) -> RankEvidence:
    """No sum over replicas in backward, and something over them in the optimizer's step."""
    pair = (rank % 2, rank % 2 + 2)
    kept = tuple(c for c in evidence.collectives if (c.op, c.phase) != ("all_reduce", "backward"))
    more = (Collective("all_reduce", pair, "r", "float32", 64, "optimizer", s.step, seq=9) for s in evidence.steps)
    return replace(evidence, collectives=(*kept, *more))


def judged_of_optimizer(held: Held, claims: Callable[[Wrapper], Wrapper] = lambda one: one) -> dict[str, Result]:
    ran = trial_of(tiny_case("hsdp_2x2"))
    records = {}
    for rank, evidence in ran.ranks.items():
        names = [tensor.fqn for tensor in evidence.parameters]
        steps = [
            RecordedStep(number, dict.fromkeys(names, held(rank, number)))
            for number in (0, *(one.step for one in evidence.steps))
        ]
        wrappers = {name: claims(wrapper) for name, wrapper in evidence.structure.items()}
        left = in_step(rank, replace(evidence, structure=wrappers))
        records[rank] = RankRecord(left, tuple(steps), ended="ok", steps_seen=len(evidence.steps))
    trial = recorded.trial_of(records, LAYOUTS["hsdp_2x2"], "run", len(records))
    return {name: run_check(name, module.check, trial) for name, module in all_checks().items()}


def test_replicas_that_the_optimizers_step_leaves_alike_need_no_sum_of_gradients() -> None:
    assert judged_of_optimizer(ALIKE)["traffic"].verdict == Verdict.PASS


def test_replicas_that_the_optimizers_step_does_not_leave_alike_lack_it() -> None:
    found = judged_of_optimizer(APART)["traffic"]
    assert found.verdict == Verdict.FAIL
    first = found.findings[0]
    assert (first.axis, first.phase, first.observed) == ("dp_replicate", "backward", 0)
    assert "after step 2" in first.note


@pytest.mark.parametrize("held", [ALIKE, APART])
def test_that_no_wrapper_claims_replicas_which_the_optimizer_joins_is_no_finding_whether_it_leaves_them_alike_or_not(
    held: Held,
) -> None:
    """What tells the right one from the broken one is in traffic."""
    found = judged_of_optimizer(held, lambda one: replace(one, replicate_ranks=()))
    assert found["placements"].verdict == Verdict.PASS
    assert found["traffic"].verdict == (Verdict.PASS if held is ALIKE else Verdict.FAIL)


def test_ddp_over_one_rank_reduces_nothing_though_the_optimizer_leaves_replicas_alike() -> None:
    """As under Shampoo, whose ranks share out what each made of its own gradients."""
    found = judged_of_optimizer(ALIKE, lambda one: replace(one, kind="ddp", shard_ranks=(), replicate_ranks=()))
    quantities = {finding.quantity for finding in found["placements"].findings}
    assert found["placements"].verdict == Verdict.FAIL and "ddp replicate_ranks" in quantities


# ---- collectives of a future's callback


def test_a_callback_between_forward_and_optimizer_works_for_backward() -> None:
    clock, seen, done = Clock(), list[str](), threading.Event()
    clock.enter_forward()
    clock.leave_forward()

    def callback() -> None:
        seen.append(clock.phase())
        done.set()

    _thread.start_new_thread(callback, ())  # a thread that Python's threading does not list, as those of C++
    done.wait()
    assert (seen, clock.phase()) == (["backward"], "other")


# ---- what evidence of another layout lists


def test_what_activations_would_move_is_not_expected_of_a_recording() -> None:
    requested = ParallelDims(dp_replicate=2, tp=2)
    ran: Trial = trial_of(tiny_case(requested), tiny_case(ParallelDims(dp_shard=2, tp=2)))
    records = {rank: RankRecord(evidence, (), ended="ok", steps_seen=3) for rank, evidence in ran.ranks.items()}
    trial = recorded.trial_of(records, requested, "run", len(records))
    flows: list[Flow] = [flow for flow in trial.plan.flows[0] if flow.role == "activations"]
    assert flows  # the plan has them
    results = [run_check(name, module.check, trial) for name, module in all_checks().items()]
    cause = diagnose(trial, results, (neighbours,), ())
    assert cause is not None
    assert not [text for label, text in cause.evidence if label == "traffic" and "activations" in str(text)]
