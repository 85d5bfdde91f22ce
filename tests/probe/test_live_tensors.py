"""What is kept once training has ended, and what only has not been let go of yet."""

from __future__ import annotations

import threading

import torch

from harness.probe import live_tensors


def shapes() -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in live_tensors.beside([], [], [], evaluated=False, patient=True)]


def test_what_another_thread_lets_go_of_a_moment_later_is_not_kept() -> None:
    """As gloo's own does with what a collective has filled."""

    def hold() -> None:
        passing = torch.ones(3, 1217)
        taken.set()
        threading.Event().wait(live_tensors.LET_GO / 5)
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
