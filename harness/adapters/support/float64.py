"""A float64 recipe is kept in float64: a trainer's casts to float32 (norms, rotary embedding, loss) mean "at least float32".

Trainers write `x.float()` where bfloat16 is too narrow. Cutting float64 there would hide mistakes below 1e-7. Which
operations run, and on which ranks, is unchanged.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def preserve(name: str, *modules: str) -> None:
    """Models are made in the recipe's dtype `name`. Only ever widens: bfloat16 recipes are left to the trainer's own options.

    modules: in these torch.float32 is as wide as well.
    """
    if name != "float64":
        return
    torch.set_default_dtype(torch.float64)
    original = Tensor.float

    @functools.wraps(original)
    def at_least_float32(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Whole numbers become float64, as float32 would be the dtype of all that follows."""
        if tensor.dtype == torch.float64:
            return tensor
        return original(tensor, *args, **kwargs) if tensor.is_floating_point() else tensor.double()

    Tensor.float = at_least_float32
    widen(name, *modules)


def widen(name: str, *modules: str) -> None:
    """Make torch.float32 as wide as float64 in these modules, in a recipe of float64. name: the recipe's dtype."""
    if name != "float64":
        return
    for module in modules:
        importlib.import_module(module).torch = _Wide("torch")  # type: ignore[attr-defined]


class _Wide(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name in ("float", "float32") else name)
