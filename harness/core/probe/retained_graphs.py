"""Autograd graphs that backward retained on request, and that still live when the next forward pass begins.

Without retain_graph=True backward frees what it saved, so that one microbatch's activations never meet the next one's. The
first nodes that backward passes are marked, and a mark lives as long as its node. A pipeline's schedule retains graphs for
its own reasons, and lets go of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from harness.core.probe.backward import BackwardObserver, observe_backward
from harness.core.probe.clock import Clock

MARKED_NODES = 16  # nodes: behind what a loss is divided by, and what chunks of it are added up with
METADATA_KEY = "harness.retained_graphs"


class Mark:
    """What a node's metadata, which the node itself owns, keeps alive."""


class RetainedGraphs:
    """How many backward passes of each step retained a graph that lived on in the next forward pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[weakref.ref[Mark]] = []
        self._last_marks: tuple[int, list[weakref.ref[Mark]]] = (0, [])
        self._retained_by_step: dict[int, int] = {}
        self._stop: Callable[[], None] | None = None
        self._is_observing = False

    def install(self) -> None:
        """Observe backward passes and the begin of forward passes. Nothing if torch runs backward another way."""
        self._stop = observe_backward(BackwardObserver(self._mark_roots, self._keep_marks))
        if self._stop:
            self._clock.on_pass_begin = self._count_living
            self._is_observing = True

    def remove(self) -> None:
        """Observe no more backward passes."""
        if self._stop:
            self._stop()
        self._stop = None

    def _mark_roots(self, roots: Any, retain_graph: Any, accumulates: bool) -> bool:
        """Mark the first nodes of a pass that retains its graph.

        Return False, and mark nothing, for passes of a schedule and for torch.autograd.grad."""
        if self._clock.in_schedule or not accumulates:
            return False
        self._marks = []
        if retain_graph is True:
            for root in roots:
                self._marks += mark_first_nodes(root)
        return True

    def _keep_marks(self) -> None:
        self._last_marks = self._clock.step, self._marks

    def _count_living(self) -> None:
        """Count the last backward pass if a node that it marked lives as a forward pass begins; forget its marks."""
        step, marks = self._last_marks
        if any(mark() is not None for mark in marks):
            self._retained_by_step[step] = self._retained_by_step.get(step, 0) + 1
        self._last_marks = (0, [])

    def retained_graphs_of(self, step: int) -> int | None:
        """Return how many backward passes of the step left a graph that lived on in the next forward pass.

        None if that was not recorded."""
        return self._retained_by_step.get(step, 0) if self._is_observing else None


def mark_first_nodes(root: torch.Tensor) -> list[weakref.ref[Mark]]:
    """Mark the nodes that backward comes to first; return references to the marks."""
    nodes: list[Any] = [root.grad_fn]
    marks: list[weakref.ref[Mark]] = []
    for node in nodes:
        if node is not None and len(marks) < MARKED_NODES:
            node.metadata[METADATA_KEY] = mark = Mark()
            marks.append(weakref.ref(mark))
            nodes += [following for following, _ in node.next_functions]
    return marks
