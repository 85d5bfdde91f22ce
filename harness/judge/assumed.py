"""What a hypothesis assumes of the optimizer on some ranks or parameters, where neither recipe nor reference says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from harness.reference.config import TrainingConfig


@dataclass(frozen=True)
class AssumedOptimizer:
    """given(rank, step, fqn, gradient) -> what it is given in place of the clipped gradient; None: nothing, so that it leaves
    the parameter alone. rate(rank, step, fqn). recipe(step, fqn). amsgrad: it divides by the largest second moment so far, and
    keeps that. copies: it keeps so many more numbers of each parameter than requested. counter(step, fqn): of the steps
    taken, for its bias correction. All that is None is as requested.
    """

    given: Callable[[int, int, str, np.ndarray], np.ndarray | None] | None = None
    rate: Callable[[int, int, str], float] | None = None
    recipe: Callable[[int, str], TrainingConfig] | None = None
    counter: Callable[[int, str], int] | None = None
    amsgrad: bool = False
    copies: int = 0

    def and_besides(self, other: AssumedOptimizer) -> AssumedOptimizer:
        """Both; where both say something of the same, the other. What either leaves alone is left alone."""
        said = {key: value for key, value in vars(other).items() if value}
        first, second = self.given, other.given
        if first and second:
            said["given"] = lambda *of: None if first(*of) is None else second(*of)
        return replace(self, **said)


AS_REQUESTED = AssumedOptimizer()
