"""How long a thread is blocked by a collective: in its call, and in what it waits for after that. The clock is a made one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.core.probe import call_times
from harness.core.probe.call_times import CallTimes


class Clock:
    now = 0.0


class Slow(dist.Work):
    """Waits for a second."""


def waits(work: Any) -> None:
    Clock.now += 1.0


@pytest.fixture(name="times")
def _times(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallTimes]:
    monkeypatch.setattr(dist.Work, "wait", waits)
    clock = SimpleNamespace(perf_counter=lambda: Clock.now, time=lambda: Clock.now)
    monkeypatch.setattr(call_times, "time", clock)
    times = CallTimes()
    times.install()
    yield times
    times.close()


def call(times: CallTimes, place: int, *, waiting: bool = False) -> None:
    with times.timing_call():
        times.note_begin(place)
        if waiting:
            Slow().wait()


def blocked(times: CallTimes) -> list[float]:
    return [seconds for _, seconds in times.times_by_call.values()]


def test_a_wait_counts_for_the_last_call_of_its_thread_once(times: CallTimes) -> None:
    call(times, 0)
    call(times, 1)
    Slow().wait()
    Slow().wait()
    assert blocked(times) == [0.0, 1.0]


def test_a_call_that_waits_itself_as_a_group_of_the_trainers_own_may_is_one_time(times: CallTimes) -> None:
    call(times, 0, waiting=True)
    Slow().wait()
    assert blocked(times) == [2.0]


def test_a_wait_of_another_thread_counts_for_none(times: CallTimes) -> None:
    call(times, 0)
    thread = threading.Thread(target=Slow().wait)
    thread.start()
    thread.join()
    assert blocked(times) == [0.0]
