"""What a hypothesis assumes of the optimizer on some ranks or parameters, where neither recipe nor reference says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.reference.config import TrainingConfig


@dataclass(frozen=True)
class AssumedOptimizer:
    """given(rank, step, fqn, gradient) -> what it is given in place of the clipped gradient. rate(step, fqn). recipe(fqn).
    All that is None is as requested."""

    given: Callable[[int, int, str, np.ndarray], np.ndarray] | None = None
    rate: Callable[[int, str], float] | None = None
    recipe: Callable[[str], TrainingConfig] | None = None


AS_REQUESTED = AssumedOptimizer()
