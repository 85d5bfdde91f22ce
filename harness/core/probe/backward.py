"""Gradients as they were when backward ended, for a trainer that clips by its own function.

torch's clipping is seen where it is called. A trainer that multiplies gradients itself gives no sign, and gives the optimizer
clipped ones. So gradients are copied, on the device, each time backward has ended, and compared with what the optimizer gets.
They may be all multiplied by one number, or unchanged, or altered in another way. After torch's own clipping nothing is
copied any more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.core.probe.clock import Clock
from harness.core.probe.host_copies import Copy, all_cloned, all_read, copied

ENGINE = "_engine_run_backward"
"""What Tensor.backward comes down to in torch.autograd, reductions by DDP and FSDP included."""


def observe_backward(
    clock: Clock, began: Callable[[Any, Any], None], ended: Callable[[], None]
) -> Callable[[], None] | None:
    """Calls both around each outermost backward pass that accumulates gradients, but not within a pipeline's schedule.

    began: gets the roots and retain_graph. Returns what stops it; None if this torch does it in another way: nothing is seen.
    """
    original = getattr(torch.autograd, ENGINE, None)
    if original is None:
        return None

    @functools.wraps(original)
    def seen(roots: Any, gradients: Any, retain: Any = None, *args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == -1 and not clock.in_schedule
        counts = outermost and kwargs.get("accumulate_grad", True)
        if counts:
            began(roots, retain)
        found = original(roots, gradients, retain, *args, **kwargs)
        if counts:
            ended()
        return found

    setattr(torch.autograd, ENGINE, seen)
    return lambda: setattr(torch.autograd, ENGINE, original)


class BackwardRecorder:
    """gradients: the present ones, by fqn."""

    def __init__(self, clock: Clock, gradients: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._clock, self._gradients = clock, gradients
        self._copies: dict[str, Copy] = {}
        self._resolution: dict[str, float] = {}
        self._stop: Callable[[], None] | None = None
        self.needed, self.ended = True, 0  # whether torch's own clipping was not seen; how many passes have ended

    def install(self) -> None:
        self._stop = observe_backward(self._clock, lambda roots, retain: None, self._end)
        if self._stop:
            self._clock.schedule_ended = self._end

    def remove(self) -> None:
        if self._stop:
            self._stop()
        self._stop = None
        self.drop()

    def _end(self) -> None:
        self.ended += 1
        if self.needed:
            gradients = self._gradients()
            self._resolution = {fqn: torch.finfo(gradient.dtype).eps for fqn, gradient in gradients.items()}
            self._copies = all_cloned(gradients)

    def drop(self) -> None:
        self._copies = {}

    def taken(self) -> Before:
        """What there was when backward ended; empty if nothing was copied."""
        copies = {fqn: copied(copy) if torch.is_tensor(copy) else copy for fqn, copy in self._copies.items()}
        before = Before(copies, self._resolution if copies else {})
        self.drop()
        return before


@dataclass(frozen=True)
class Before:
    """Gradients at the end of backward. resolution: the epsilon of each one's dtype."""

    gradients: dict[str, Copy]
    resolution: dict[str, float]

    def against(self, later: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float | None]:
        """The gradients before, and what all were multiplied by since; `later` and NaN if that was not one number; `later` and
        None if none were copied."""
        if not self.gradients:
            return dict(later), None
        earlier = all_read(self.gradients)
        factor = common_factor(earlier, later, self.resolution)
        return (dict(later) if math.isnan(factor) else earlier), factor


def common_factor(
    earlier: Mapping[str, np.ndarray], later: Mapping[str, np.ndarray], resolution: Mapping[str, float]
) -> float:
    """What all of `earlier` times that is `later`, but for rounding; NaN if there is no such number."""
    if {fqn: g.shape for fqn, g in earlier.items()} != {fqn: g.shape for fqn, g in later.items()}:
        return math.nan
    if all(np.array_equal(earlier[fqn], later[fqn]) for fqn in earlier):
        return 1.0
    largest = max((fqn for fqn in earlier if earlier[fqn].size), key=lambda fqn: float(np.max(np.abs(earlier[fqn]))))
    at = int(np.argmax(np.abs(earlier[largest])))
    with np.errstate(all="ignore"):
        factor = float(np.float64(later[largest].flat[at]) / np.float64(earlier[largest].flat[at]))
        fits = all(_is_multiple(earlier[fqn], later[fqn], factor, 4 * resolution[fqn]) for fqn in earlier)
    return factor if fits and math.isfinite(factor) else math.nan


def _is_multiple(earlier: np.ndarray, later: np.ndarray, factor: float, rounding: float) -> bool:
    wanted = earlier.astype(np.float64) * factor
    return bool((np.abs(later - wanted) <= rounding * np.abs(wanted) + np.finfo(earlier.dtype).tiny).all())
