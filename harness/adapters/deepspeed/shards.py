"""Where the engine keeps each parameter's part: an interval of a flat vector, on whose float32 copy its optimizer steps."""

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
    """ZeRO-1 and 2: parameters are whole. zero: the engine's optimizer."""

    def __init__(self, module: torch.nn.Module, zero: Any) -> None:
        self.named = list(module.named_parameters())
        self.zero = zero

    def parameters(self) -> NamedTensors:
        return [(name, parameter.detach()) for name, parameter in self.named]

    def gradients(self) -> NamedTensors:
        """Return the name and this rank's part of each gradient, flat. Parts whose vector has no gradient are left out."""
        vectors = self.vectors()
        gradients = []
        for name, group, start, numel in self.part_intervals():
            if vectors[group].grad is not None:
                gradients.append((name, vectors[group].grad.narrow(0, start, numel)))
        return gradients

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        vectors = self.vectors()
        for name, group, start, numel in self.part_intervals():
            state_of_vector = self.zero.optimizer.state.get(vectors[group], {})
            tensors = ((key, value) for key, value in state_of_vector.items() if torch.is_tensor(value))
            yield name, {key: value.narrow(0, start, numel) if value.dim() else value for key, value in tensors}

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.single_partition_of_fp32_groups

    def part_intervals(self) -> Iterator[PartInterval]:
        for name, parameter in self.named:
            if (mapping := parameter._hp_mapping) is not None:
                address = mapping.hp_fragment_address
                yield PartInterval(name, mapping.param_group_index, address.start, address.numel)


class PartitionedParameters(Vectors):
    """ZeRO-3: each parameter is cut as well, and padded to equal parts, the last rank's behind what it holds."""

    def parameters(self) -> NamedTensors:
        return [
            (name, parameter.ds_tensor.detach().narrow(0, 0, self.held_numel(parameter)))
            for name, parameter in self.named
        ]

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.fp32_partitioned_groups_flat

    def part_intervals(self) -> Iterator[PartInterval]:
        for name, parameter in self.named:
            group, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            yield PartInterval(name, group, start, self.held_numel(parameter))

    def held_numel(self, parameter: Any) -> int:
        part = parameter.ds_tensor.ds_numel
        return max(0, min(part, parameter.ds_numel - part * torch.distributed.get_rank()))
