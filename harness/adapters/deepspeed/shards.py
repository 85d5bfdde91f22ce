"""The places where DeepSpeed's engine keeps a rank's part of each parameter: intervals of flat float32 vectors.

Its optimizer steps on these vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from harness.core.probe.shards import NamedTensors


class PartInterval(NamedTuple):
    """Where a parameter's part lies: elements start to start + numel of one of the optimizer's vectors."""

    name: str
    group: int
    """Which of the optimizer's vectors."""
    start: int
    numel: int


class Vectors:
    """The shards of ZeRO-1 and 2 for the probe: parameters are whole, gradients and state are parts. zero: the engine's
    optimizer.
    """

    def __init__(self, module: torch.nn.Module, zero: Any) -> None:
        self.named = list(module.named_parameters())
        self.zero = zero

    def parameters(self) -> NamedTensors:
        return [(name, parameter.detach()) for name, parameter in self.named]

    def gradients(self) -> NamedTensors:
        """Return (name, flat part of its gradient) of the parameters of which this rank has a part.

        Vectors without a gradient are left out.
        """
        vectors = self.vectors()
        gradients = []
        for name, group, start, numel in self.part_intervals():
            if vectors[group].grad is not None:
                gradients.append((name, vectors[group].grad.narrow(0, start, numel)))
        return gradients

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, tensors by key) of the optimizer's state for each part of this rank. What is no tensor is left out.

        Tensors with elements are cut to the part; scalars, such as a step count, are whole.
        """
        vectors = self.vectors()
        for name, group, start, numel in self.part_intervals():
            state_of_vector = self.zero.optimizer.state.get(vectors[group], {})
            tensors = ((key, value) for key, value in state_of_vector.items() if torch.is_tensor(value))
            yield name, {key: value.narrow(0, start, numel) if value.dim() else value for key, value in tensors}

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.single_partition_of_fp32_groups

    def part_intervals(self) -> Iterator[PartInterval]:
        """Yield where this rank's part of each parameter lies. Parameters of which it has no part are left out."""
        for name, parameter in self.named:
            if (mapping := parameter._hp_mapping) is not None:
                address = mapping.hp_fragment_address
                yield PartInterval(name, mapping.param_group_index, address.start, address.numel)


class PartitionedParameters(Vectors):
    """The shards of ZeRO-3 for the probe: each parameter is cut as well, into equal parts with padding at the end."""

    def parameters(self) -> NamedTensors:
        """Return (name, flat part) of each parameter, without padding. It is empty where the rank holds padding alone."""
        return [
            (name, parameter.ds_tensor.detach().narrow(0, 0, self.held_numel(parameter)))
            for name, parameter in self.named
        ]

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.fp32_partitioned_groups_flat

    def part_intervals(self) -> Iterator[PartInterval]:
        """Yield where this rank's part of each parameter lies, without padding: also parts of no element."""
        for name, parameter in self.named:
            group, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            yield PartInterval(name, group, start, self.held_numel(parameter))

    def held_numel(self, parameter: Any) -> int:
        """Return the number of a parameter's elements that this rank holds, without padding."""
        part = parameter.ds_tensor.ds_numel
        return max(0, min(part, parameter.ds_numel - part * torch.distributed.get_rank()))
