"""How long collectives take by their kernels, what computation hides, and who comes last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from literal_traces import GPU, Rank, ddp_step, fsdp_step, save_job

from harness.core.evidence.keys import ranks_from_key
from harness.core.plan.figures.gpus import MACHINES
from harness.recording.cli.work.trace_report import plan_of_layout
from harness.recording.pages.trace_times import time_rows
from harness.recording.traces.job import job_of
from harness.recording.traces.kineto import load_trace
from harness.recording.traces.times import Times, times_of, with_links


def times(folder: Path) -> Times:
    found = times_of(job_of([load_trace(path) for path in sorted(folder.iterdir())]))
    assert found is not None
    return found


def sums(late: int) -> Callable[[Rank], None]:
    """Rank `late` comes to the sum 30 us after the others, so its kernel is as much shorter."""

    def did(rank: Rank) -> None:
        rank.forward()
        rank.now += 100
        rank.backward()
        rank.collective(("allreduce", "world", 1000, 1000), lasts=10.0 if rank.rank == late else 40.0)
        rank.optimizer()

    return did


def test_the_rank_with_the_shortest_kernel_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    found = times(save_job(tmp_path / "t", sums(late=2), world=4, shards=2))
    assert found.compared == 3
    assert {rank: round(1e6 * one.waited) for rank, one in found.ranks.items()} == {0: 30, 1: 30, 2: 0, 3: 30}
    assert {rank: round(1e6 * one.caused) for rank, one in found.ranks.items()} == {0: 0, 1: 0, 2: 90, 3: 0}
    (one,) = found.took
    assert (one.op, one.phase, one.groups) == ("all_reduce", "other", ("0-3",))
    assert one.waited is not None
    assert (round(1e6 * one.seconds, 1), round(1e6 * one.waited, 1)) == (32.5, 22.5)
    assert one.rate == pytest.approx(2 * 4000 * 3 / 4 / 10e-6)


def test_what_computation_hides_is_not_exposed(tmp_path: Path) -> None:
    def did(rank: Rank) -> None:
        rank.backward()
        rank.now += 100
        rank.add("kernel", "gemm", 21.0, GPU, stream=3)  # the kernel of the sum begins 11 us later, and lasts 40
        rank.collective(("allreduce", "world", 1000, 1000))
        rank.optimizer()

    found = times(save_job(tmp_path / "t", did, world=2, shards=1))
    (one,) = found.took
    assert (round(1e6 * one.seconds), round(1e6 * one.exposed)) == (40, 30)
    rank = found.ranks[0]
    assert (round(1e6 * rank.computes), round(1e6 * rank.exposed)) == (51, 30)
    assert rank.computes + rank.exposed + rank.idle == pytest.approx(found.step)


def test_of_a_rank_alone_nothing_is_said_of_waiting(tmp_path: Path) -> None:
    found = times(save_job(tmp_path / "t", ddp_step, world=2, shards=1, ranks=[1]))
    assert (found.compared, [one.waited for one in found.took]) == (0, [None])


def test_links_are_those_within_a_node_where_every_group_is(tmp_path: Path) -> None:
    found = times(save_job(tmp_path / "t", fsdp_step("shard", "replicate"), world=16, shards=8))
    machine = MACHINES["H100"]
    by_size = {len(ranks_from_key(one.groups[0])): one.link for one in with_links(found, machine, 8).took}
    assert by_size == {
        8: machine.bytes_per_second_in_node,
        2: machine.bytes_per_second_across_nodes,
        16: machine.bytes_per_second_across_nodes,
    }
    assert {one.link for one in with_links(found, machine, 4).took} == {machine.bytes_per_second_across_nodes}
    assert {one.link for one in found.took} == {None}


def test_a_bubble_is_compared_where_a_plan_is_known_and_has_a_pipeline(tmp_path: Path) -> None:
    found = times(save_job(tmp_path / "t", ddp_step, world=2, shards=1))
    flat, piped = (plan_of_layout(name, 2) for name in ("llama3_8b_512", "llama3_405b_16384"))
    labels = [{label for label, _ in time_rows(found, case)} for case in (None, flat, piped)]
    assert [("bubble" in of) for of in labels] == [False, False, True]
    assert plan_of_layout("pp=2,dp_shard=8", 16) is None and plan_of_layout("accelerate.yaml", 16) is None


def test_traces_without_kernels_have_no_times(tmp_path: Path) -> None:
    rank = Rank(0, 2, {"world": range(2)})
    rank.whole_step(ddp_step)
    rank.events = [event for event in rank.events if event["cat"] != "kernel"]
    assert times_of(job_of([load_trace(rank.save(tmp_path))])) is None
