"""Whether a trainer applies adapters one half after the other, or multiplies the halves and adds them to their matrix first."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.case.case import Case
from harness.core.plan.frozen import products_of_block


def are_merged(case: Case, of_blocks: int, layers: Sequence[int]) -> bool:
    """Return whether blocks have as few matmuls as merged adapters have. of_blocks: those of a step's forward passes."""
    return case.model.lora is not None and of_blocks == case.passes * len(layers) * products_of_block(
        case.model, merged=True
    )
