"""The intervals of each parameter's elements on which Megatron's distributed optimizer steps in this rank, as it
reports itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from harness.core.probe.shards import NamedTensors


class Ranges:
    """The shards of a chunk for the probe: parameters are whole, gradients and state are those of this rank's intervals.

    zero: the distributed optimizer. chunk: the model in Megatron's DDP.
    """

    def __init__(self, chunk: torch.nn.Module, zero: Any) -> None:
        self.named = list(chunk.named_parameters())
        self.zero = zero
        groups = zip(zero.model_fp32_groups, zero.shard_fp32_groups, strict=True)
        self.shards: dict[torch.nn.Parameter, torch.Tensor] = {}
        for wholes, shards in groups:
            self.shards |= dict(zip(wholes, shards, strict=True))

    def parameters(self) -> NamedTensors:
        """Return (name, parameter) of all parameters, whole.

        They are the parameters themselves: the placement noted for them (`note_placement`) does not hold for a copy.
        """
        return self.named

    def gradients(self) -> NamedTensors:
        """Return (name, gradient) of the intervals that this rank's optimizer steps on.

        Those without a gradient are left out.
        """
        return [(name, shard.grad) for name, _, shard in self.held_parameters() if shard.grad is not None]

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, tensors by key) of the optimizer's state for each interval of this rank.

        What is no tensor is left out.
        """
        for name, _, shard in self.held_parameters():
            state = self.zero.optimizer.state.get(shard, {})
            yield name, {key: value for key, value in state.items() if torch.is_tensor(value)}

    def starts(self) -> dict[str, int]:
        """Return, by name, the element of the parameter at which this rank's interval begins."""
        return {
            name: self.zero._get_model_param_range_map(whole)["param"].start
            for name, whole, _ in self.held_parameters()
        }

    def held_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Yield (name, parameter, this rank's interval as a tensor) for the parameters of which the rank has an interval."""
        return ((name, whole, self.shards[whole]) for name, whole in self.named if whole in self.shards)
