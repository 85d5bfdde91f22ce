"""What is kept once training has ended, and what only has not been let go of yet."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from harness.core.probe import FREEZE_THRESHOLD, Probe, live_tensors


def shapes() -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in live_tensors.find_unaccounted_tensors([], [], [], evaluated=False, patient=True)]


def test_what_another_thread_lets_go_of_a_moment_later_is_not_kept() -> None:
    """As gloo's own does with what a collective has filled."""

    def hold() -> None:
        passing = torch.ones(3, 1217)
        taken.set()
        threading.Event().wait(live_tensors.SECONDS_TO_LET_GO / 5)
        del passing

    taken = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    assert (3, 1217) not in shapes()
    thread.join()


def test_what_a_local_variable_or_a_list_holds_is_kept() -> None:
    local, listed = torch.ones(3, 1223), [torch.ones(3, 1229)]
    assert {(3, 1223), (3, 1229)} <= set(shapes())
    del local, listed


@pytest.mark.parametrize(("objects", "looked_through"), [(10, True), (2 * FREEZE_THRESHOLD, False)])
def test_many_old_objects_are_looked_through_before_and_after_a_probe_but_not_by_it(
    objects: int, looked_through: bool
) -> None:
    old: list[list[object]] = [[] for _ in range(objects)]
    gc.collect()
    probe = Probe(0, 1)
    found = []
    for done in (probe.install, probe.remove):
        done()
        found.append(any(thing is old for thing in gc.get_objects(generation=2)))
    assert found == [looked_through, True]
