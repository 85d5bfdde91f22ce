"""Where a process is in its training, as it is told to each of its threads."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import torch

from harness.core.probe.clock import Clock

Where = tuple[int, str]


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def told_in_a_thread(clock: Clock) -> Where:
    found: list[Where] = []
    in_a_thread(lambda: found.append(clock.step_and_phase()))
    return found[0]


def test_what_a_thread_beside_the_one_that_trains_does_is_of_no_step() -> None:
    clock = Clock()
    assert (clock.step_and_phase(), told_in_a_thread(clock)) == ((0, "other"), (0, "background"))
    clock.enter_forward()
    assert (clock.step_and_phase(), told_in_a_thread(clock)) == ((1, "forward"), (0, "background"))


def test_training_may_run_in_another_thread_than_the_main_one() -> None:
    clock, found = Clock(), []

    def train() -> None:
        clock.enter_forward()
        found.append(clock.step_and_phase())

    in_a_thread(train)
    assert (found, clock.step_and_phase()) == ([(1, "forward")], (0, "background"))


def test_a_backward_pass_is_one_in_whichever_thread() -> None:
    clock, found, x = Clock(), [], torch.ones(1, requires_grad=True)
    clock.enter_forward()
    clock.leave_forward()
    x.register_hook(lambda _: found.append(clock.step_and_phase()))
    in_a_thread((x * 2).sum().backward)
    assert found == [(1, "backward")]


def test_a_thread_that_no_python_code_started_works_for_the_one_that_trains() -> None:
    """Such as one of gloo's, which runs what follows a future in a communication hook."""
    clock, found, done = Clock(), [], threading.Event()
    clock.enter_forward()

    def call_back() -> None:
        found.append(clock.step_and_phase())
        done.set()

    _thread.start_new_thread(call_back, ())
    assert done.wait(10) and found == [(1, "forward")]
