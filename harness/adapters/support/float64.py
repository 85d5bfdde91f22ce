"""Patches that keep a float64 recipe in float64: a trainer's casts to float32 then mean "at least float32".

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
    """Patch torch for a float64 recipe: float64 is the default dtype, and `Tensor.float` does not narrow.

    Other recipes change nothing.
    name: the recipe's dtype. modules: in these torch.float32 means float64 as well.
    """
    if name != "float64":
        return
    torch.set_default_dtype(torch.float64)
    original = Tensor.float

    @functools.wraps(original)
    def at_least_float32(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return float64 tensors as they are, other floats as float32, and whole numbers as float64.

        Whole numbers in float32 would make all that follows float32.
        """
        if tensor.dtype == torch.float64:
            return tensor
        return original(tensor, *args, **kwargs) if tensor.is_floating_point() else tensor.double()

    Tensor.float = at_least_float32
    widen(name, *modules)


def widen(name: str, *modules: str) -> None:
    """Make torch.float32 mean float64 in these modules, by replacing their `torch`.

    Nothing unless the recipe's dtype is float64.
    """
    if name != "float64":
        return
    for module in modules:
        importlib.import_module(module).torch = _Wide("torch")  # type: ignore[attr-defined]


class _Wide(ModuleType):
    """A stand-in for the module torch, in which `float` and `float32` are float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name in ("float", "float32") else name)
