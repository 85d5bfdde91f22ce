"""Counts of torch.compile's work in this process: graphs by the end of each step, graph breaks, and limits that it met."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from harness.core.probe.clock import Clock


class CompilerRecorder:
    """The number of graphs that torch.compile has made by the end of each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: dict[int, int] = {}

    def graphs_after(self, step: int) -> int | None:
        """Return how many graphs the process had made when a step's last optimizer had stepped; None if none stepped."""
        return self._steps.get(step)

    def after_optimizer(self, _: Optimizer) -> None:
        """Note how many graphs the process has made so far."""
        self._steps[self._clock.step] = compiler_counts().get("graphs", 0)


def compiler_counts() -> dict[str, int]:
    """Return counts of torch.compile's work in this process: "graphs", and graph breaks and limits by their reason.

    Counts of 0 are left out; empty if the compiler was never imported.
    """
    if "torch._dynamo.utils" not in sys.modules:
        return {}
    counters = sys.modules["torch._dynamo.utils"].counters
    counts = {"graphs": int(counters["stats"]["unique_graphs"])}
    counts |= {f"graph break: {str(reason).splitlines()[0]}": int(n) for reason, n in counters["graph_break"].items()}
    failures = {str(reason).splitlines()[0]: int(n) for reason, n in counters["unimplemented"].items()}
    counts |= {f"gave up: {reason}": n for reason, n in failures.items() if "limit" in reason}
    return {key: count for key, count in counts.items() if count}
