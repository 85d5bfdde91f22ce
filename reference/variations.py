"""Llama 3 otherwise: what a trainer may compute in place of what is requested, put on a model that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Alter = Callable[[nn.Module, int], None]
"""Alters a model in place before a step's forward pass."""


def turned_by(by_step: Mapping[int, Mapping[int, np.ndarray]]) -> Alter:
    """Queries and keys of each layer turned by the angles of these positions [s], by step and layer."""
    now: dict[str, int] = {}

    def alter(model: nn.Module, step: int) -> None:
        first = not now
        now["step"] = step
        for name, layer in model.layers.items() if first else ():
            _instead(layer.attention, _turned(by_step, int(name), now))

    return alter


def _turned(by_step: Mapping[int, Mapping[int, np.ndarray]], layer: int, now: dict[str, int]) -> Callable[..., Tensor]:
    def forward(original: Callable[..., Tensor], x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        rows = by_step.get(now["step"], {}).get(layer)
        return original(x, positions if rows is None else torch.from_numpy(rows), documents)

    return forward


def _instead(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """forward(what it did before, its arguments) in place of a module's own."""
    before = module.forward
    module.forward = lambda *args, **kwargs: forward(before, *args, **kwargs)
