"""Which collectives are on record: those of chosen steps, and of other threads the first of each group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.probe.clock import Clock
from harness.record import trace
from harness.record.progress import Progress
from harness.record.trace import TracedCollectives


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedCollectives]:
    """Of a group of one, in steps of which none is chosen."""
    monkeypatch.setattr(trace, "MOST", 2)
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
    assert [(call.step, call.phase, call.bytes) for call in traced.settled()] == [
        (0, "background", 4),
        (0, "background", 8),
    ]
    assert traced.last is not None and traced.last.text == "all_reduce in the background"
