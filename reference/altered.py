"""A model that is built, altered in place: modules of one kind, all of them or one, from a step on or in some rows only."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Alter = Callable[[nn.Module, int], None]
"""Alters a model in place before a step's forward pass."""

KINDS = {
    "attention": ".attention",
    "inner": ".inner_attention",
    "feed_forward": ".feed_forward",
    "norm": "norm",
    "embedding": "tok_embeddings",
}


@dataclass(frozen=True)
class Variation:
    """name: of the mistake, for lists. observed, expected: in words. part: of which modules, as KINDS has them, "block" or
    "model". alter(module): in place. loss: of each token, in place of cross entropy."""

    name: str
    observed: str
    expected: str
    part: str
    alter: Callable[[nn.Module], None] = lambda module: None
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
        other = model if rows is None else _copy(model)
        for name in modules:
            variation.alter(other.get_submodule(name))
        if rows is not None:
            put_instead(model, _by_rows(model, other, torch.from_numpy(rows)))

    return alter


def _copy(model: nn.Module) -> nn.Module:
    """Other modules, the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _by_rows(model: nn.Module, other: nn.Module, chosen: Tensor) -> Callable[..., Tensor]:
    def forward(original: Callable[..., Tensor], tokens: Tensor, *rest: Any, **named: Any) -> Tensor:
        other.mask_seed = model.mask_seed
        one, two = original(tokens, *rest, **named), other(tokens, *rest, **named)
        return torch.where(chosen[:, None, None], two, one)

    return forward


def instead(name: str) -> Callable[[Callable[..., Tensor]], Callable[[nn.Module], None]]:
    """Of a module's submodule, "" for itself: forward(what it did before, the module, its arguments) in place of its own."""

    def put(forward: Callable[..., Tensor]) -> Callable[[nn.Module], None]:
        def alter(module: nn.Module) -> None:
            inner = module.get_submodule(name)
            put_instead(inner, lambda original, *args, **named: forward(original, module, *args, **named))

        return alter

    return put


def put_instead(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    before = module.forward
    module.forward = lambda *args, **kwargs: forward(before, *args, **kwargs)


def setting(**values: Any) -> Callable[[nn.Module], None]:
    """Of the configuration that a module reads."""

    def alter(module: nn.Module) -> None:
        module.config = replace(module.config, **values)

    return alter


# ---- masks of dropout


def masks_by_rank(groups: Mapping[int, np.ndarray], seed: int) -> Alter:
    """Each rank draws its masks from the sum of the seed and its number. groups: by rank, the rows that it computes."""
    now: dict[str, int] = {}

    def forward(original: Any, tokens: Tensor, *rest: Any, model: nn.Module, **named: Any) -> Tensor:
        usual, whole = model.mask_seed, original(tokens, *rest, **named)
        for rank, rows in groups.items():
            model.mask_seed = zlib.crc32(f"{seed + rank} {now['step']}".encode())
            chosen = torch.zeros(len(tokens), dtype=torch.bool)
            chosen[torch.from_numpy(rows)] = True
            whole = torch.where(chosen[:, None, None], original(tokens, *rest, **named), whole)
        model.mask_seed = usual
        return whole

    def alter(model: nn.Module, step: int) -> None:
        begins = step <= now.get("step", step)  # another model, trained from the beginning
        now["step"] = step
        if begins:
            put_instead(model, lambda original, *args, **named: forward(original, *args, model=model, **named))

    return alter


def recomputed_without_random_state(names: Sequence[str]) -> Alter:
    """These modules are recomputed in backward, with the random numbers that then come."""

    def alter(model: nn.Module, step: int) -> None:
        for name in names if step == 1 else ():
            put_instead(
                model.get_submodule(name),
                lambda original, *args: checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False),
            )

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
