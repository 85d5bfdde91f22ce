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
from harness.core.probe.host_copies import HostCopy, clone_all, copy_to_host, read_all

ENGINE_FUNCTION = "_engine_run_backward"
"""What Tensor.backward comes down to in torch.autograd, reductions by DDP and FSDP included."""


@dataclass(frozen=True)
class BackwardObserver:
    """What is called around each outermost backward pass, also one within a pipeline's schedule."""

    begin: Callable[[Any, Any, bool], Any]
    """Gets the roots, retain_graph, and whether gradients are accumulated into parameters. What it returns decides whether
    `end` is called for this pass."""
    end: Callable[[], None]
    """Called when the pass has ended; not called if it raised."""


def observe_backward(observer: BackwardObserver) -> Callable[[], None] | None:
    """Call the observer around each outermost backward pass from now on; return a function that ends this.

    Return None, and observe nothing, if this torch runs backward by another function.
    Passes that a compiler traces are left out.
    """
    original = getattr(torch.autograd, ENGINE_FUNCTION, None)
    if original is None:
        return None

    @functools.wraps(original)
    def run_and_note_backward(roots: Any, gradients: Any, retain_graph: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return original(roots, gradients, retain_graph, *args, **kwargs)
        is_observed = observer.begin(roots, retain_graph, kwargs.get("accumulate_grad", True))
        results = original(roots, gradients, retain_graph, *args, **kwargs)
        if is_observed:
            observer.end()
        return results

    setattr(torch.autograd, ENGINE_FUNCTION, run_and_note_backward)
    return lambda: setattr(torch.autograd, ENGINE_FUNCTION, original)


class BackwardRecorder:
    """Copies of the gradients as they were when backward ended, until torch's own clipping is seen."""

    def __init__(self, clock: Clock, gradients: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._clock = clock
        self._gradients = gradients
        self._copies: dict[str, HostCopy] = {}
        self._resolution: dict[str, float] = {}
        self._stop: Callable[[], None] | None = None
        self.is_needed = True  # until torch's own clipping is seen
        self.ended_passes = 0  # how many backward passes have ended

    def install(self) -> None:
        """Copy gradients after each backward pass, and after each pass of a schedule. Nothing if torch runs backward
        another way.
        """
        self._stop = observe_backward(BackwardObserver(self._is_counted, self._note_end))
        if self._stop:
            self._clock.on_schedule_end = self._note_end

    def remove(self) -> None:
        """Stop, and drop the copies."""
        if self._stop:
            self._stop()
        self._stop = None
        self.drop_copies()

    def _is_counted(self, roots: Any, retain_graph: Any, accumulates: bool) -> bool:
        """Return whether a pass that begins ends backward by itself: a schedule's passes are followed by others of it."""
        return accumulates and not self._clock.in_schedule

    def _note_end(self) -> None:
        """Count a backward pass that ended. While copies are needed, replace them by ones of the present gradients."""
        self.ended_passes += 1
        if self.is_needed:
            gradients = self._gradients()
            self._resolution = {fqn: torch.finfo(gradient.dtype).eps for fqn, gradient in gradients.items()}
            self._copies = clone_all(gradients)

    def drop_copies(self) -> None:
        self._copies = {}

    def take_copies(self) -> GradientsBefore:
        """Return the gradients as they were when backward ended, and forget them; empty if nothing was copied."""
        copies = {fqn: copy_to_host(copy) if torch.is_tensor(copy) else copy for fqn, copy in self._copies.items()}
        before = GradientsBefore(copies, self._resolution if copies else {})
        self.drop_copies()
        return before


@dataclass(frozen=True)
class GradientsBefore:
    """Gradients at the end of backward, by fqn, and the epsilon of each one's dtype."""

    gradients: dict[str, HostCopy]
    resolution: dict[str, float]

    def compare_with(self, later: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float | None]:
        """Return the gradients before, and the number by which all were multiplied since.

        If that was not one number: `later` and NaN. If none were copied: `later` and None."""
        if not self.gradients:
            return dict(later), None
        earlier = read_all(self.gradients)
        factor = common_factor(earlier, later, self.resolution)
        return (dict(later) if math.isnan(factor) else earlier), factor


def common_factor(
    earlier: Mapping[str, np.ndarray], later: Mapping[str, np.ndarray], resolution: Mapping[str, float]
) -> float:
    """Return the number by which all of `earlier` must be multiplied to give `later`, but for rounding.

    NaN if there is no such number."""
    if {fqn: g.shape for fqn, g in earlier.items()} != {fqn: g.shape for fqn, g in later.items()}:
        return math.nan
    if all(np.array_equal(earlier[fqn], later[fqn]) for fqn in earlier):
        return 1.0
    largest_fqn = max(
        (fqn for fqn in earlier if earlier[fqn].size), key=lambda fqn: float(np.max(np.abs(earlier[fqn])))
    )
    flat_index = int(np.argmax(np.abs(earlier[largest_fqn])))
    with np.errstate(all="ignore"):
        factor = float(
            np.float64(later[largest_fqn].flat[flat_index]) / np.float64(earlier[largest_fqn].flat[flat_index])
        )
        is_common = all(_is_multiple(earlier[fqn], later[fqn], factor, 4 * resolution[fqn]) for fqn in earlier)
    return factor if is_common and math.isfinite(factor) else math.nan


def _is_multiple(earlier: np.ndarray, later: np.ndarray, factor: float, rounding: float) -> bool:
    expected = earlier.astype(np.float64) * factor
    return bool((np.abs(later - expected) <= rounding * np.abs(expected) + np.finfo(earlier.dtype).tiny).all())
