"""Where the engine keeps each parameter's part: an interval of a flat vector, on whose float32 copy its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from harness.core.probe.shards import Named


class Place(NamedTuple):
    """group: of which of the optimizer's vectors elements start to start + numel are this parameter's."""

    name: str
    group: int
    start: int
    numel: int


class Vectors:
    """ZeRO-1 and 2: parameters are whole. zero: the engine's optimizer."""

    def __init__(self, module: torch.nn.Module, zero: Any) -> None:
        self.named, self.zero = list(module.named_parameters()), zero

    def parameters(self) -> Named:
        return [(name, parameter.detach()) for name, parameter in self.named]

    def gradients(self) -> Named:
        vectors = self.vectors()
        there = (place for place in self.places() if vectors[place.group].grad is not None)
        return [(place.name, vectors[place.group].grad.narrow(0, place.start, place.numel)) for place in there]

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        vectors = self.vectors()
        for name, group, start, numel in self.places():
            held = self.zero.optimizer.state.get(vectors[group], {})
            tensors = ((key, value) for key, value in held.items() if torch.is_tensor(value))
            yield name, {key: value.narrow(0, start, numel) if value.dim() else value for key, value in tensors}

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.single_partition_of_fp32_groups

    def places(self) -> Iterator[Place]:
        for name, parameter in self.named:
            if (held := parameter._hp_mapping) is not None:
                address = held.hp_fragment_address
                yield Place(name, held.param_group_index, address.start, address.numel)


class PartitionedParameters(Vectors):
    """ZeRO-3: each parameter is cut as well, and padded to equal parts, the last rank's behind what it holds."""

    def parameters(self) -> Named:
        return [(name, p.ds_tensor.detach().narrow(0, 0, self.held(p))) for name, p in self.named]

    def vectors(self) -> list[torch.Tensor]:
        return self.zero.fp32_partitioned_groups_flat

    def places(self) -> Iterator[Place]:
        for name, parameter in self.named:
            group, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            yield Place(name, group, start, self.held(parameter))

    def held(self, parameter: Any) -> int:
        part = parameter.ds_tensor.ds_numel
        return max(0, min(part, parameter.ds_numel - part * torch.distributed.get_rank()))
