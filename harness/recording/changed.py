"""Which parameters are others as a step begins than they were after the step before: no optimizer's step wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from harness.core.probe.structure import sharded_parameters
from harness.recording.digests import digest


class Changed:
    """Looks once a step. What is computed on a device is read at the end."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, torch.Tensor]] = {}

    def look(self, step: int, parts: Sequence[nn.Module], before: Mapping[str, torch.Tensor]) -> None:
        """Look as the first pass of a step begins. before: parameter -> digest after the step before; empty if unknown."""
        if before and step not in self._found:
            every = ((fqn, parameter) for fqn, parameter in sharded_parameters(parts) if fqn in before)
            self._found[step] = {fqn: digest(parameter) != before[fqn] for fqn, parameter in every}

    @property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Return, by step, the parameters."""
        found = {step: tuple(fqn for fqn, is_so in of.items() if bool(is_so)) for step, of in self._found.items()}
        return {step: names for step, names in found.items() if names}
