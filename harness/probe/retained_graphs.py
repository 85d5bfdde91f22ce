"""Autograd graphs that backward was told to retain, and that still live when the next forward pass begins.

Without retain_graph=True backward frees what it saved, so that one microbatch's activations never meet the next one's. The
first nodes that backward passes are marked, and a mark lives as long as its node. A pipeline's schedule retains graphs for
its own reasons, and lets go of them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from harness.probe.backward import ENGINE
from harness.probe.clock import Clock

DEEP = 16  # nodes: behind what a loss is divided by, and what chunks of it are added up with
KEY = "harness.retained_graphs"


class Mark:
    """What a node's metadata, which the node itself owns, keeps alive."""


class RetainedGraphs:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: tuple[int, list[weakref.ref[Mark]]] = (0, [])
        self._alive: dict[int, int] = {}
        self._engine: Any = None
        self._looks = False

    def install(self) -> None:
        self._engine = original = getattr(torch.autograd, ENGINE, None)
        if original is None:  # a torch that has another way: then nobody looked
            return

        @functools.wraps(original)
        def seen(roots: Any, gradients: Any, retain: Any = None, *args: Any, **kwargs: Any) -> Any:
            outermost = torch._C._current_graph_task_id() == -1 and not self._clock.in_schedule
            marks = [ref for root in roots for ref in marked(root)] if outermost and retain is True else []
            found = original(roots, gradients, retain, *args, **kwargs)
            if outermost and kwargs.get("accumulate_grad", True):
                self._last = self._clock.step, marks
            return found

        setattr(torch.autograd, ENGINE, seen)
        self._clock.pass_begins, self._looks = self._look, True

    def remove(self) -> None:
        if self._engine is not None:
            setattr(torch.autograd, ENGINE, self._engine)
        self._engine = None

    def _look(self) -> None:
        step, marks = self._last
        if any(mark() is not None for mark in marks):
            self._alive[step] = self._alive.get(step, 0) + 1
        self._last = (0, [])

    def of_step(self, step: int) -> int | None:
        """How many backward passes of the step left a graph that lived on in the next forward pass. None: nobody looked."""
        return self._alive.get(step, 0) if self._looks else None


def marked(root: torch.Tensor) -> list[weakref.ref[Mark]]:
    """References to the marks of the nodes that backward comes to first."""
    nodes: list[Any] = [root.grad_fn]
    found: list[weakref.ref[Mark]] = []
    for node in nodes:
        if node is not None and len(found) < DEEP:
            node.metadata[KEY] = mark = Mark()
            found.append(weakref.ref(mark))
            nodes += [following for following, _ in node.next_functions]
    return found
