"""Which collectives are on record: those of chosen steps, and of other threads the first of each group."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.core.probe.clock import Clock
from harness.recording import trace
from harness.recording.progress import Progress
from harness.recording.trace import TracedCollectives


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedCollectives]:
    """Of a group of one, in steps of which none is chosen."""
    monkeypatch.setattr(trace, "MOST_BACKGROUND", 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    clock = Clock()
    recorder = TracedCollectives(clock, lambda: False, Progress(clock))
    recorder.install()
    yield recorder
    recorder.remove()
    dist.destroy_process_group()


def test_of_other_threads_the_first_collectives_are_recorded_whichever_step_is_chosen(
    traced: TracedCollectives,
) -> None:
    def beside() -> None:
        for size in (1, 2, 3):
            dist.all_reduce(torch.ones(size))

    dist.all_reduce(torch.ones(9))
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert [(call.step, call.phase, call.bytes) for call in traced.final_records()] == [
        (0, "background", 4),
        (0, "background", 8),
    ]
    assert traced.last is not None and traced.last.text == "all_reduce in the background"


def test_a_few_collectives_before_the_last_one_are_known_the_latest_first(traced: TracedCollectives) -> None:
    for _ in range(trace.MOST_BEFORE + 2):
        dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), 0)
    dist.barrier()
    assert traced.last is not None
    assert [text.split()[0] for text in (traced.last.text, *traced.last.before[:2])] == [
        "barrier",
        "broadcast",
        "all_reduce",
    ]
    assert (traced.last.seq, len(traced.last.before)) == (trace.MOST_BEFORE + 4, trace.MOST_BEFORE)


@pytest.mark.parametrize("waits", [False, True])
def test_a_thread_that_issues_over_the_group_of_training_meanwhile_is_on_record(waits: bool, tmp_path: Path) -> None:
    """Not where the thread that trains waits for it."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    clock, trains, summed = Clock(), threading.get_ident(), list[bool]()
    recorder = TracedCollectives(clock, lambda: True, Progress(clock))
    recorder.install()
    recorder.write_concurrent_beside(tmp_path / "rank_00000.record", finished=False)

    def sums() -> None:
        while (sys._current_frames()[trains].f_globals["__name__"] == "threading") is not waits:
            torch.ones(1).add_(1)
        dist.all_reduce(torch.ones(1))
        summed.append(True)

    try:
        clock.enter_forward()
        dist.broadcast(torch.ones(1), 0)
        thread = threading.Thread(target=sums, name="sums")
        thread.start()
        while not waits and not summed:
            torch.ones(1).add_(1)
        thread.join()
        found = [(one.ranks, one.ops, one.threads, one.trains) for one in recorder.concurrent_calls]
        assert found == ([] if waits else [((0,), ("all_reduce",), ("sums",), ("broadcast",))])
        assert (tmp_path / "rank_00000.beside").exists() is not waits
        recorder.write_concurrent_beside(tmp_path / "rank_00000.record", finished=True)
        assert not (tmp_path / "rank_00000.beside").exists()
    finally:
        recorder.remove()
        dist.destroy_process_group()


def test_how_many_were_issued_over_other_groups_is_known(traced: TracedCollectives) -> None:
    other = dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=other)
    last = traced.last
    assert last is not None and last.elsewhere is not None
    ((group, count),) = last.elsewhere.items()
    assert (last.issued_over(last.group), last.issued_over("none"), count) == (1, 0, last.issued_over(group))
    assert count >= 3
