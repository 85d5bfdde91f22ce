"""Step and phase in which a collective was issued, by the ranges of a trace.

A range of autograd or of a wrapper says so itself. Between such ranges the order does: what comes before a backward
pass is forward, what comes after the last one is between passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.core.evidence.records import BACKGROUND
from harness.recording.traces.kineto import Call, Span, Trace


@dataclass(frozen=True)
class Ranges:
    """Ranges of time that do not overlap or touch, ascending. All times are microseconds of a trace's clock.

    They come from one thread, or from several.
    """

    starts: np.ndarray
    """When each begins, float64 [ranges]."""
    ends: np.ndarray
    """When each ends, float64 [ranges]."""

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> Ranges:
        """Return the spans as ranges; those that overlap are merged."""
        pairs = np.array(sorted((span.start, span.end) for span in spans)).reshape(-1, 2)
        return cls.from_pairs(pairs)

    @classmethod
    def from_pairs(cls, pairs: np.ndarray) -> Ranges:
        """Return ranges of these pairs of start and end, in any order; those that overlap are merged."""
        if not len(pairs):
            return cls(np.zeros(0), np.zeros(0))
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        latest_ends = np.maximum.accumulate(pairs[:, 1])
        is_first = np.concatenate(([True], pairs[1:, 0] > latest_ends[:-1]))
        last_indices = np.concatenate((np.flatnonzero(is_first)[1:] - 1, [len(pairs) - 1]))
        return cls(pairs[is_first, 0], latest_ends[last_indices])

    def contains(self, when: float) -> bool:
        """Return whether a time lies in a range, its start and end included."""
        index = int(np.searchsorted(self.starts, when, "right")) - 1
        return index >= 0 and when <= self.ends[index]

    def last_start(self, when: float) -> float:
        """Return the start of the last range that begins at this time or earlier; minus infinity if there is none."""
        index = int(np.searchsorted(self.starts, when, "right")) - 1
        return float(self.starts[index]) if index >= 0 else -np.inf

    def next_start(self, when: float) -> float:
        """Return the start of the first range that begins later than this time; infinity if there is none."""
        index = int(np.searchsorted(self.starts, when, "right"))
        return float(self.starts[index]) if index < len(self.starts) else np.inf

    def overlap(self, start: float, end: float) -> float:
        """Return how many microseconds between start and end lie in these ranges; 0 if none do."""
        overlapping = slice(int(np.searchsorted(self.ends, start)), int(np.searchsorted(self.starts, end)))
        parts = np.minimum(self.ends[overlapping], end) - np.maximum(self.starts[overlapping], start)
        return float(parts.clip(0).sum())


class Phases:
    """The phases of one rank's steps."""

    def __init__(self, trace: Trace, steps: Mapping[int, Span]) -> None:
        self.steps = sorted((span.start, span.end, number) for number, span in steps.items())
        self.main = {span.thread for span in trace.steps.values()}
        self.by_thread = {kind: _by_thread(spans) for kind, spans in trace.passes.items()}
        self.threads = self.main | self.by_thread["backward"].keys()
        self.backward = Ranges.from_spans(trace.passes["backward"])
        self.optimizer = Ranges.from_spans(trace.optimizer)
        forward_times = trace.forward_ops
        last_begun = np.searchsorted(self.backward.starts, forward_times, "right") - 1
        is_in_backward = (
            (last_begun >= 0) & (forward_times <= self.backward.ends[np.maximum(last_begun, 0)])
            if len(self.backward.ends)
            else last_begun >= 0
        )
        self.forward = forward_times[~is_in_backward]

    def step_and_phase(self, call: Call) -> tuple[int, str]:
        """Return (step, phase) in which a collective was issued. (0, BACKGROUND) if it is in no step, or another
        thread issued it."""
        when = call.span.start
        thread = call.span.thread
        for start, end, number in self.steps:
            if start <= when <= end and thread in self.threads:
                return number, self._phase(when, thread, Span(start, end))
        return 0, BACKGROUND

    def _phase(self, when: float, thread: str, step: Span) -> str:
        """Return the phase of a time in a step: "forward", "backward", "optimizer", or "other" after the last backward
        pass.

        The range that it is in says so; else the ranges before and after it.
        """
        if self.optimizer.contains(when):
            return "optimizer"
        for kind in ("backward", "forward"):
            if thread in self.by_thread[kind] and self.by_thread[kind][thread].contains(when):
                return kind
        next_backward = self.backward.next_start(when)
        optimizer_start = min(self.optimizer.next_start(when), step.end)
        if next_backward >= optimizer_start:
            return "other"
        last_backward = self.backward.last_start(when)
        if last_backward < max(step.start, self.optimizer.last_start(when)):
            return "forward"
        forward_range = np.searchsorted(self.forward, [last_backward, next_backward])
        return "forward" if forward_range[0] < forward_range[1] else "backward"


def _by_thread(spans: Iterable[Span]) -> dict[Any, Ranges]:
    """Return the ranges of each thread, by thread; those of a thread that overlap are merged."""
    spans_by_thread: dict[Any, list[Span]] = {}
    for span in spans:
        spans_by_thread.setdefault(span.thread, []).append(span)
    return {thread: Ranges.from_spans(thread_spans) for thread, thread_spans in spans_by_thread.items()}


def training_steps(trace: Trace) -> dict[int, Span]:
    """Return by number the steps that trained: spans of ProfilerStep, joined until an optimizer has stepped in them.

    Where no optimizer is on record, they are joined until a backward pass has run; without that, each is a step. A
    joined step has the number of its last span. What is left at the end is no whole step.
    """
    marks = [span.start for span in trace.optimizer] or [span.start for span in trace.passes["backward"]]
    ends = np.sort(np.array(marks))
    steps = {}
    start = None
    for number, span in sorted(trace.steps.items()):
        start = span.start if start is None else start
        if not len(ends) or np.searchsorted(ends, start) < np.searchsorted(ends, span.end):
            steps[number] = Span(start, span.end)
            start = None
    return steps
