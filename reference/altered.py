"""A model that is built, altered in place: modules of one kind, all of them or one, from a step on or in some rows only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Alter = Callable[[nn.Module, int], None]
"""Alters a model in place before a step's forward pass."""
Alteration = Callable[[nn.Module], None]
"""Alters a module in place."""

KINDS = {
    "attention": ".attention",
    "inner": ".inner_attention",
    "wo": ".attention.wo",
    "feed_forward": ".feed_forward",
    "norm": "norm",
    "embedding": "tok_embeddings",
}


def unaltered(module: nn.Module) -> None:
    """What a variation of the loss alone does to a module."""


@dataclass(frozen=True)
class Variation:
    """name: of the mistake, for lists. observed, expected: in words. part: of which modules, as KINDS has them, "block" or
    "model". alter(module): in place. loss: of each token, in place of cross entropy."""

    name: str
    observed: str
    expected: str
    part: str
    alter: Alteration = unaltered
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


def modules_of(model: nn.Module, part: str) -> list[str]:
    """By name, in the model's order."""
    if part == "model":
        return [""]
    if part == "block":
        return [name for name, _ in model.named_modules() if name.startswith("layers.") and name.count(".") == 1]
    return [name for name, _ in model.named_modules() if name.endswith(KINDS[part])]


def altering(variation: Variation, modules: Sequence[str], since: int, rows: np.ndarray | None = None) -> Alter:
    """From a step on. rows: the rows of a batch that go through the altered model, where not all do."""

    def alter(model: nn.Module, step: int) -> None:
        if step != since:
            return
        other = model if rows is None else copy_of(model)
        for name in modules:
            variation.alter(other.get_submodule(name))
        if rows is not None:
            put_instead(model, _by_rows(model, other, torch.from_numpy(rows)))

    return alter


def copy_of(model: nn.Module) -> nn.Module:
    """Other modules, the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _by_rows(model: nn.Module, other: nn.Module, chosen: Tensor) -> Callable[..., Tensor]:
    def forward(original: Callable[..., Tensor], tokens: Tensor, *rest: Any, **named: Any) -> Tensor:
        other.mask_seed = model.mask_seed
        one, two = original(tokens, *rest, **named), other(tokens, *rest, **named)
        return torch.where(chosen[:, None, None], two, one)

    return forward


def instead(name: str) -> Callable[[Callable[..., Tensor]], Alteration]:
    """Of a module's submodule, "" for itself: forward(what it did before, the module, its arguments) in place of its own."""

    def put(forward: Callable[..., Tensor]) -> Callable[[nn.Module], None]:
        def alter(module: nn.Module) -> None:
            inner = module.get_submodule(name)
            put_instead(inner, lambda original, *args, **named: forward(original, module, *args, **named))

        return alter

    return put


OF_ITSELF = instead("")
Change = Callable[[Tensor], Tensor]
Rows = Iterable[tuple[str, Alteration]]
"""What is observed, in words, and how a module is altered so."""


def alike(name: str, part: str, expected: str, rows: Rows) -> list[Variation]:
    return [Variation(name, observed, expected, part, alter) for observed, alter in rows]


def given(change: Change) -> Alteration:
    """What a module gives, changed."""
    return OF_ITSELF(lambda original, _, *args, **named: change(original(*args, **named)))


def angles(change: Change) -> Alteration:
    def alter(attention: nn.Module) -> None:
        before = attention.angles
        attention.angles = lambda positions, like: change(before(positions, like))

    return alter


def put_instead(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    before = module.forward
    module.forward = lambda *args, **kwargs: forward(before, *args, **kwargs)


def setting(**values: Any) -> Alteration:
    """Of the configuration that a module reads."""

    def alter(module: nn.Module) -> None:
        module.config = replace(module.config, **values)

    return alter


# ---- positions


def turned_by(by_step: Mapping[int, Mapping[int, np.ndarray]]) -> Alter:
    """Queries and keys of each layer turned by the angles of these positions [s], by step and layer."""
    now: dict[str, int] = {}

    def alter(model: nn.Module, step: int) -> None:
        now["step"] = step
        for name, layer in model.layers.items() if step == 1 else ():
            put_instead(layer.attention, _turned(by_step, int(name), now))

    return alter


def _turned(by_step: Mapping[int, Mapping[int, np.ndarray]], layer: int, now: dict[str, int]) -> Callable[..., Tensor]:
    def forward(original: Callable[..., Tensor], x: Tensor, positions: Any = None, documents: Any = None) -> Tensor:
        rows = by_step.get(now["step"], {}).get(layer)
        return original(x, positions if rows is None else torch.from_numpy(rows), documents)

    return forward
