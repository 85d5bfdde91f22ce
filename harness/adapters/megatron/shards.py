"""Where the distributed optimizer has its part of each parameter: an interval of its elements, as it says itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from harness.core.probe.shards import NamedTensors


class Ranges:
    """Parameters are whole; the optimizer steps on views of intervals of them. zero: that optimizer. chunk: in its DDP."""

    def __init__(self, chunk: torch.nn.Module, zero: Any) -> None:
        self.named = list(chunk.named_parameters())
        self.zero = zero
        groups = zip(zero.model_fp32_groups, zero.shard_fp32_groups, strict=True)
        self.shards: dict[torch.nn.Parameter, torch.Tensor] = {}
        for wholes, shards in groups:
            self.shards |= dict(zip(wholes, shards, strict=True))

    def parameters(self) -> NamedTensors:
        """Themselves: what their layers say of them (`note_placement`) is not said of another tensor with their elements."""
        return self.named

    def gradients(self) -> NamedTensors:
        return [(name, shard.grad) for name, _, shard in self.held_parameters() if shard.grad is not None]

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        for name, _, shard in self.held_parameters():
            state = self.zero.optimizer.state.get(shard, {})
            yield name, {key: value for key, value in state.items() if torch.is_tensor(value)}

    def starts(self) -> dict[str, int]:
        return {
            name: self.zero._get_model_param_range_map(whole)["param"].start
            for name, whole, _ in self.held_parameters()
        }

    def held_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Yield the parameters of which this rank has an interval."""
        return ((name, whole, self.shards[whole]) for name, whole in self.named if whole in self.shards)
