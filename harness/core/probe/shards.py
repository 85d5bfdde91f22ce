"""Where a rank's shards lie, of a trainer that keeps them elsewhere than in its modules' parameters and their `grad`.

ZeRO's engines step on vectors of their own: a parameter's gradient and optimizer state are intervals of these, and in ZeRO-3
the parameter is one too. The adapter reports where they lie (`note_shards`); what is in them is copied and judged as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Shards(Protocol):
    """One model part's shards, by its parameters' names. The last two may leave out those of which this rank has nothing."""

    def parameters(self) -> NamedTensors:
        """Return the slice of each parameter that this rank holds between steps."""

    def gradients(self) -> NamedTensors:
        """Return the slices of the reduced gradients that this rank's optimizer steps with; nothing while there are none."""

    def state(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        """Return the slices of the optimizer's state for each parameter, by the optimizer's keys."""


_shards: WeakKeyDictionary[nn.Module, Shards] = WeakKeyDictionary()
_starts: WeakKeyDictionary[nn.Module, Mapping[str, int]] = WeakKeyDictionary()


def note_shards(part: nn.Module, shards: Shards, starts: Mapping[str, int] = MappingProxyType({})) -> None:
    """For the adapter of a trainer that keeps a model part's parameters, gradients or optimizer state in its own vectors.

    starts: of tensors that are fused (an adapter's `fused`), at which of their elements begins what gradients and state give.
    """
    _shards[part] = shards
    _starts[part] = starts


def fused_starts_of(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Return at which element of a fused tensor this rank's interval begins, by the tensor's name."""
    starts: dict[str, int] = {}
    for part in parts:
        starts |= _starts.get(part, {})
    return starts


def shards_of(part: nn.Module) -> Shards | None:
    return _shards.get(part)


def noted_shards(parts: Iterable[nn.Module]) -> Iterator[Shards]:
    yield from (shards for part in parts if (shards := _shards.get(part)) is not None)


def all_shard_tensors(shards: Shards) -> Iterator[torch.Tensor]:
    """Yield all tensors behind parameters, gradients and optimizer state."""
    yield from (tensor for _, tensor in shards.parameters())
    yield from (tensor for _, tensor in shards.gradients())
    for _, state in shards.state():
        yield from state.values()
