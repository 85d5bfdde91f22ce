"""What torch.compile did in this process: graphs made, by the end of each step and altogether, and where it did not."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import optimizer as torch_optimizer

from harness.core.probe.clock import Clock


class CompilerRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: dict[int, int] = {}
        self._hook: Any = None

    def install(self) -> None:
        self._hook = torch_optimizer.register_optimizer_step_post_hook(self._note_graphs)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def graphs_after(self, step: int) -> int | None:
        return self._steps.get(step)

    def _note_graphs(self, *_: Any) -> None:
        self._steps[self._clock.step] = compiler_counts().get("graphs", 0)


def compiler_counts() -> dict[str, int]:
    """Count torch.compile's graphs in this process, graph breaks by their reason, and the limits at which it gave up."""
    if "torch._dynamo.utils" not in sys.modules:
        return {}
    counters = sys.modules["torch._dynamo.utils"].counters
    counts = {"graphs": int(counters["stats"]["unique_graphs"])}
    counts |= {f"graph break: {str(reason).splitlines()[0]}": int(n) for reason, n in counters["graph_break"].items()}
    failures = {str(reason).splitlines()[0]: int(n) for reason, n in counters["unimplemented"].items()}
    counts |= {f"gave up: {reason}": n for reason, n in failures.items() if "limit" in reason}
    return {key: count for key, count in counts.items() if count}
